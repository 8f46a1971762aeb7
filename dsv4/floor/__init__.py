"""The noise floor: every stage once more, in FP64, from the equations and the formats alone.

Nothing of ``kernels/<op>`` or of the model's stages is used, so a bug there cannot hide here:
this is the second opinion on what a plan's numerics give, and how far FP32 accumulation may
move them.
"""
