"""The indexer's query as its scores read it."""
