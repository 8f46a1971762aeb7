"""Splits of a row's keys: how many, and their parts made one, Triton.

The number of splits is a function of the launch (rows, head tiles, keys), so a row's last bits depend on its
batch where the batch changes that number; at a given number they do not. The audit's noise floor holds both.
Parts are added in the order of their keys: the same launch gives the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import FLOATS, check
from kernels.overlap import follow, overlap
from kernels.sparse_attn.keys_kernel import LN2, LOG2E

PROGRAMS = 132  # one a multiprocessor of an H200: at two tiles of 200 KB no more fit
MAX_SPLITS = 64
AT_ONCE = 16  # parts of a turn: all 64 in one is a program that takes a compiler 4 s


def num_splits(rows: int, head_tiles: int, num_keys: int, tile: int) -> int:
    """Splits of each row's keys: as many as fill the device, and no more than there are tiles of keys.

    Measured best for (rows, keys) = (2, 640): 10, (64, 640): 2, (128, 640): 1 at 64 heads and 64-key tiles.
    """
    tiles = max(triton.cdiv(num_keys, tile), 1)
    return max(min(tiles, PROGRAMS // max(rows * head_tiles, 1), MAX_SPLITS), 1)


def sizes_for(parts: int) -> dict[str, int]:
    """Constants of the kernel that joins so many parts."""
    most = triton.next_power_of_2(parts)
    return {"PARTS": most, "AT_ONCE": most} if most <= AT_ONCE else {"PARTS": MAX_SPLITS, "AT_ONCE": AT_ONCE}


@triton.jit
def _add(
    weighted,
    total,
    part_ptr,
    part_lse_ptr,
    at,
    peak,
    first,
    num_parts,
    row_heads,
    K: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Sums of weighted values FP32 [K] and of weights FP32 with COUNT parts of row and head ``at`` added.

    From part ``first`` on; those from ``num_parts`` on are none. ``at`` is int64: times K it outgrows int32.

    A part's LSE is a scalar of its own: any tensor of two parts or two heads would be passed through shared memory.
    """
    for offset in tl.static_range(COUNT):
        part = first + offset
        held = part < num_parts
        lse = tl.load(part_lse_ptr + part * row_heads + at, mask=held, other=float("-inf"))
        values = tl.load(part_ptr + (part * row_heads + at) * K + tl.arange(0, K), mask=held, other=0.0)
        factor = tl.exp2(lse - peak)
        total += factor
        weighted += factor * values.to(tl.float32)
    return weighted, total


@triton.jit
def _combine_kernel(
    part_ptr,
    part_lse_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    num_parts,
    row_heads,
    heads,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    at = tl.program_id(0).to(tl.int64)  # row * heads + head; times K outgrows int32
    every = tl.arange(0, PARTS)
    lses = tl.load(part_lse_ptr + every * row_heads + at, mask=every < num_parts, other=float("-inf"))
    peak = tl.max(lses, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weighted = tl.zeros((K,), tl.float32)
    total = 0.0
    if PARTS == AT_ONCE:  # as a loop of one turn it took 0.2 to 1.3 us more (H200, 2026-12-01)
        weighted, total = _add(
            weighted, total, part_ptr, part_lse_ptr, at, peak, 0, num_parts, row_heads, K, AT_ONCE
        )
    else:
        for first in tl.range(0, num_parts, AT_ONCE):
            weighted, total = _add(
                weighted, total, part_ptr, part_lse_ptr, at, peak, first, num_parts, row_heads, K, AT_ONCE
            )

    sink = tl.load(sinks_ptr + at % heads) * LOG2E
    inverse = tl.where(total == 0, 0.0, tl.div_rn(1.0, total + tl.exp2(sink - peak)))
    tl.store(out_ptr + at * K + tl.arange(0, K), (weighted * inverse).to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + at, tl.where(total == 0, float("-inf"), (peak + tl.log2(total)) * LN2))


def combine(part: Tensor, part_lse: Tensor, sinks: Tensor, out: Tensor, lse: Tensor) -> None:
    """Make splits one row: ``out = sum_s 2^(lse_s) part_s / (sum_s 2^(lse_s) + e^sink)``.

    Parameters
    ----------
    part : (N, T, H, K) BF16 or FP32
        Each normalised by its own sum, without the sink.
    part_lse : (N, T, H) FP32
        Base 2; -inf for a part without keys.
    sinks : (H,) FP32
    out : (T, H, K) BF16 or FP32
        Written.
    lse : (T, H) FP32
        Written: natural, without the sink; -inf for a row without keys.

    Raises
    ------
    TypeError, ValueError
        A tensor does not fit, or is not dense.
    """
    check(
        "combine",
        dense=("part", "part_lse", "sinks", "out", "lse"),
        part=(part, "N T H K", FLOATS),
        part_lse=(part_lse, "N T H", torch.float32),
        sinks=(sinks, "H", torch.float32),
        out=(out, "T H K", FLOATS),
        lse=(lse, "T H", torch.float32),
    )
    launch(part, part_lse, sinks, out, lse)


def launch(part: Tensor, part_lse: Tensor, sinks: Tensor, out: Tensor, lse: Tensor) -> None:
    """Launch on checked arguments of :func:`combine`."""
    parts, rows, heads, width = part.shape
    _combine_kernel[(rows * heads,)](
        part,
        part_lse,
        sinks,
        out,
        lse,
        parts,
        rows * heads,
        heads,
        K=width,
        **sizes_for(parts),
        num_warps=1,  # H200, 2026-11-30: 2.1 us for 10 parts of 128 rows, 5.3 for 2 of 4096; with 4 warps 4.0, 5.6
        **overlap(part.device),
    )


def parts_of(splits: int, rows: int, heads: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for parts (N, T, H, K) BF16 and their LSE (N, T, H) FP32."""
    part = torch.empty(splits, rows, heads, width, dtype=torch.bfloat16, device=device)
    return part, torch.empty(splits, rows, heads, dtype=torch.float32, device=device)
