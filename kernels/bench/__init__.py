"""Timing every kernel beside its floor, what it replaces and its peers, on the GPU of this machine.

``python -m kernels.bench --out results/bench.json`` measures and merges, ``python -m kernels.bench.page
results/bench.json docs/bench.md`` renders what was measured. No table of times is typed by hand.
"""
