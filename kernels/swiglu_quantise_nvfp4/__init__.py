"""Clamped SwiGLU and NVFP4 quantiser in one launch."""
