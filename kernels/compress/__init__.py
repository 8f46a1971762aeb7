"""Gated pooling of a window of tokens into one compressed entry."""
