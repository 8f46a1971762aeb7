"""Experts over the tokens that chose them."""
