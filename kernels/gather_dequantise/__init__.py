"""Gather of cache rows by index list into a dense buffer."""
