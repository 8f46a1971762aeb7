"""Activations to FP8: E4M3 codes, a power-of-two scale per 128."""
