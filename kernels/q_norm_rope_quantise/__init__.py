"""Norm of each head of q, RoPE, and the form in which attention reads q, in one launch."""
