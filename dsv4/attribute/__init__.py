"""Which op of which layer makes text worse: ops of a variant are swapped back to the reference's, one at a time."""
