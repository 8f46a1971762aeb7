"""The lightning indexer's scores."""
