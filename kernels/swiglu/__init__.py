"""Clamped SwiGLU."""
