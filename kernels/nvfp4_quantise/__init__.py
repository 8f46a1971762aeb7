"""Activations to NVFP4: packed codes, a scale per 16, a factor per row."""
