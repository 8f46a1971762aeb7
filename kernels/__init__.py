"""Operators of the model, one folder each, and their number formats.

``kernels/<op>/ref.py`` is the meaning of an op, ``kernel.py`` the same function in Triton, and
``test_<op>.py`` the proof. ``kernels/formats`` is the one home of number formats. To add an op, write
``ref.py`` and its test first; a rounding point is an argument of the ref and names a format module.

Dimension letters, one list for the whole project, in jaxtyping strings and in ``# [T, H, K]`` comments:

======  ==========================
letter  meaning
======  ==========================
B       sequences
T       tokens
D       hidden_size
H       query heads
K       head_dim
P       rope part of K
R       q_lora_rank
S       chosen KV entries
C       compressed entries
N       hyper-connection streams
E       experts
F       expert width
G       output groups
V       vocabulary
======  ==========================
"""
