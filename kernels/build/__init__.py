"""Compiling every kernel ahead of time, without a GPU, and saying what came out.

``python -m kernels.build --out results/build`` compiles, ``python -m kernels.build.check results/build`` judges what
every architecture's ``build.json`` says. Nothing that is built here has run.
"""
