"""The indexer's choice of entries."""
