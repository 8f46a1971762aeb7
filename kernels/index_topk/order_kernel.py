"""Scores as unsigned integers that order alike, and the largest of each run of them: what a choice starts from."""

import triton
import triton.language as tl


@triton.jit
def ordered(score, present):
    """FP32 scores as uint32 in the same order: 0 where not present, -0 as 0, NaN over infinity (as torch sorts)."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0
    key = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
    key = tl.where(score == score, key, 0xFFFFFFFF)
    return tl.where(present, key, 0).to(tl.uint32)
