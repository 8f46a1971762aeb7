"""Manifold-constrained hyper-connections (mHC): mixing weights, collapse, expansion."""
