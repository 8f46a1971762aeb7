"""Normalised Walsh-Hadamard transform of rows."""
