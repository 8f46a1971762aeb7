"""Compiling every kernel ahead of time, without a GPU, and saying what came out.

``python -m kernels.build --arch sm_100a --out results/build/sm_100a`` compiles, ``python -m kernels.build.check
results/build`` judges what every architecture's ``build.json`` says. Nothing that is built here has run.
"""
