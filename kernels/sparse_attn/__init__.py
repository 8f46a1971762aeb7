"""Attention over chosen rows of a KV pool, one vector for K and V, with a sink."""
