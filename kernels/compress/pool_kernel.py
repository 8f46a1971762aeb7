"""A window in a program's registers and its pooling, Triton: what prefill's kernel and a decode step's share."""

import triton
import triton.language as tl

ELEMENTS = 4096  # of kv and gate each, a program: 32 a thread
WARPS = 4
CSA_RATIO, HCA_RATIO = 4, 128


@triton.jit
def window_columns(slot, channel, D, RATIO: tl.constexpr, OVERLAP: tl.constexpr):
    """Columns of each slot's channels and which are there, both [SLOTS, BLOCK_D], and the columns of a row.

    Slots past RATIO are the entry's own window, second series; before: the window before it, first.
    """
    width = D
    column = channel[None, :]
    if OVERLAP:
        width = 2 * D
        column = channel[None, :] + (slot >= RATIO).to(tl.int32)[:, None] * D
    return column, (slot < (2 * RATIO if OVERLAP else RATIO))[:, None] & (channel < D)[None, :], width


@triton.jit
def pooled(kv, gate):
    """Sum over axis 0 of FP32 [SLOTS, BLOCK_D] under the softmax of its gate."""
    power = tl.exp(gate - tl.max(gate, 0)[None, :])
    return tl.div_rn(tl.sum(power * kv, 0), tl.sum(power, 0))


def tile(ratio: int, overlap: bool, D: int) -> tuple[int, int]:
    """Slots, a power of two, and channels of a program."""
    slots = triton.next_power_of_2(2 * ratio if overlap else ratio)
    return slots, max(16, min(triton.next_power_of_2(D), ELEMENTS // slots))
