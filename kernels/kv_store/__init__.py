"""Rows of kv into the paged cache, in any record."""
