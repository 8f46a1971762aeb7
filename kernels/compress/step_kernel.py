"""A decode step of the compressor in one launch, Triton: a token joins its open window, and the window is pooled.

The window is pooled at every token, whole or not, so that the launch is the same one at every position; whoever
stores the result looks whether it is. A program owns some channels of one sequence.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build, Sizes
from kernels.compress.pool_kernel import CSA_RATIO, HCA_RATIO, WARPS, pooled, tile, window_columns
from kernels.overlap import OVERLAPPED, follow, overlap


class Pooled(NamedTuple):
    """Rows (B, D) FP32; the entry that each is (B,) int64, -1 if its window is open; its first token (B,) int64."""

    rows: Tensor
    entries: Tensor
    starts: Tensor


@triton.jit
def _compress_step_kernel(
    kv_ptr,
    gate_ptr,
    ring_kv_ptr,
    ring_gate_ptr,
    bias_ptr,
    position_ptr,
    out_ptr,
    entry_ptr,
    start_ptr,
    kv_stride,
    gate_stride,
    D,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    BEFORE: tl.constexpr = RATIO if OVERLAP else 0
    SIZE: tl.constexpr = RATIO + BEFORE
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    channel = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    position = tl.load(position_ptr + row)
    start = position // RATIO * RATIO
    column, there, width = window_columns(slot, channel, D, RATIO, OVERLAP)
    new = (slot == BEFORE + position - start)[:, None]
    at = (row * SIZE + (start - BEFORE + SIZE + slot) % SIZE)[:, None] * width + column
    kv = tl.load(ring_kv_ptr + at, there & ~new, other=0.0)
    gate = tl.load(ring_gate_ptr + at, there & ~new, other=float("-inf"))
    kv = tl.where(new, tl.load(kv_ptr + row * kv_stride + column, there & new, other=0.0), kv)
    gate = tl.where(
        new, tl.load(gate_ptr + row * gate_stride + column, there & new, other=float("-inf")), gate
    )
    place = (row * SIZE + position % SIZE) * width
    for series in tl.static_range(2 if OVERLAP else 1):
        some = channel + series * D
        tl.store(
            ring_kv_ptr + place + some, tl.load(kv_ptr + row * kv_stride + some, channel < D), channel < D
        )
        tl.store(
            ring_gate_ptr + place + some,
            tl.load(gate_ptr + row * gate_stride + some, channel < D),
            channel < D,
        )
    gate += tl.load(bias_ptr + (slot % RATIO)[:, None] * width + column, there, other=0.0)
    tl.store(out_ptr + row * D + channel, pooled(kv, gate), channel < D)
    if tl.program_id(1) == 0:
        tl.store(entry_ptr + row, tl.where((position + 1) % RATIO == 0, position // RATIO, -1))
        tl.store(start_ptr + row, start)


def compress_step(
    kv: Tensor,
    gate: Tensor,
    ring_kv: Tensor,
    ring_gate: Tensor,
    position_bias: Tensor,
    positions: Tensor,
    *,
    ratio: int,
    overlap_windows: bool,
) -> Pooled:
    """Write each sequence's token into its ring and pool the window that it is in; see the ref's ``step``.

    Parameters
    ----------
    kv, gate : (B, K) FP32
        K = 2 * D with overlap, else D. Rows may be strided.
    ring_kv, ring_gate : (B, size, K) FP32, contiguous
        Token t lies at t mod size: 2 * ratio with overlap, else ratio. Written in place.
    position_bias : (ratio, K) FP32
    positions : (B,) int64
    ratio : int
    overlap_windows : bool

    Raises
    ------
    TypeError, ValueError
        A dtype, shape or stride that is not the above.
    """
    size = ratio * (2 if overlap_windows else 1)
    sizes = check(
        "compress_step",
        dense=("ring_kv", "ring_gate", "position_bias", "positions"),
        kv=(kv, "B K", torch.float32),
        gate=(gate, "B K", torch.float32),
        ring_kv=(ring_kv, f"B {size} K", torch.float32),
        ring_gate=(ring_gate, f"B {size} K", torch.float32),
        position_bias=(position_bias, f"{ratio} K", torch.float32),
        positions=(positions, "B", torch.int64),
    )
    B, K = sizes["B"], sizes["K"]
    if overlap_windows and K % 2:
        raise ValueError(f"compress_step: kv of shape {tuple(kv.shape)} is not of two series")
    D = K // 2 if overlap_windows else K
    rows = torch.empty(B, D, dtype=torch.float32, device=kv.device)
    entries, starts = torch.empty(2, B, dtype=torch.int64, device=kv.device)
    if B and D:
        slots, block = tile(ratio, overlap_windows, D)
        _compress_step_kernel[(B, triton.cdiv(D, block))](
            kv,
            gate,
            ring_kv,
            ring_gate,
            position_bias,
            positions,
            rows,
            entries,
            starts,
            kv.stride(0),
            gate.stride(0),
            D,
            RATIO=ratio,
            OVERLAP=overlap_windows,
            SLOTS=slots,
            BLOCK_D=block,
            num_warps=WARPS,
            **overlap(kv.device),
        )
    return Pooled(rows, entries, starts)


def builds(sizes: Sizes) -> list[Build]:
    """CSA's entries and index keys, HCA's entries."""
    found = []
    floats = ("kv_ptr", "gate_ptr", "ring_kv_ptr", "ring_gate_ptr", "bias_ptr")
    pointers = dict.fromkeys(floats, "*fp32") | {"position_ptr": "*i64", "out_ptr": "*fp32"}
    pointers |= {"entry_ptr": "*i64", "start_ptr": "*i64"}
    numbers = ("kv_stride", "gate_stride", "D")
    for name, ratio, D in (
        ("csa", CSA_RATIO, sizes.head_dim),
        ("csa_index", CSA_RATIO, sizes.index_head_dim),
        ("hca", HCA_RATIO, sizes.head_dim),
    ):
        slots, block = tile(ratio, ratio == CSA_RATIO, D)
        constants = {
            "RATIO": ratio,
            "OVERLAP": ratio == CSA_RATIO,
            "SLOTS": slots,
            "BLOCK_D": block,
            "PDL": True,
        }
        found.append(
            Build(
                name=f"compress/{name}_step/{sizes.name}",
                kernel=_compress_step_kernel,
                signature={**pointers, **dict.fromkeys(numbers, "i32")},
                constants=constants,
                aligned=(*floats, "position_ptr", "out_ptr", "entry_ptr", *numbers),
                options={"num_warps": WARPS, **OVERLAPPED},
            )
        )
    return found
