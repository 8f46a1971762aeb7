"""Rotary position embedding on the last dimensions of a head, interleaved pairs."""
