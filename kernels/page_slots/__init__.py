"""Slots of cached rows, and of the keys that a row attends to, behind page tables."""
