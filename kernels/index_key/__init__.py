"""The indexer's key from the compressor's pooling to its cache."""
