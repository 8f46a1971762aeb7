"""Which files of a tree can run: reached from entry points through imports, loader calls and includes."""
