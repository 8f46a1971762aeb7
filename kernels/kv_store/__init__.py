"""Rows of kv into the paged cache, in either record."""
