"""The NVFP4 linears of up to 16 rows on Hopper, Gluon: see :mod:`kernels.linear.hopper_product_kernel`.

The launch begins while the one before it still runs (programmatic dependent launch): each program asks for its first
columns of the weight, and only then waits for the others' results. So the weight may not be written by a launch that
is still under way; rows, gsa and scale_2 may. Without it q_b with one row takes 9.6 us, not 8.2.

What bounds these launches is no single pipe (H200, ncu: memory 38% busy, logic 38%, issue 36%, tensor cores 3%) but
that all programs first wait for memory and then compute together: reading the same bytes alone takes 4.2 us.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.build_spec import Build
from kernels.linear.hopper_product_kernel import load_step, offsets, product, stage_layout, stage_rows
from kernels.overlap import OVERLAPPED

TRITON = "3.6."
STEP = 256  # columns of a step
MOST_STAGED = 1 << 15  # activation values in shared memory: 64 KB of FP16 a block of programs
MOST_ROWS = 16
# Measured on an H200 (CUDA graphs, 2026-11-30), us of q_b with one row and of o_b with 16. Rows of the weight a block:
# 64 8.0, 12.5; 128 8.3, 12.2; 256 8.7, 11.7. Of the 128, 4 steps in flight in 128 registers 8.3, 12.2, but 2 in 80 7.3,
# 10.9: a third block fits a multiprocessor, so the next launch's first loads run beside this one's products.
WARPS = 8
MOST_REGISTERS = 80
MOST_AHEAD = 2


@gluon.jit(do_not_specialize=["T"])
def _linear_hopper_kernel(
    x_ptr,
    x_scale_ptr,
    gsa_ptr,
    w_ptr,
    w_scale_ptr,
    scale_2_ptr,
    out_ptr,
    T,
    N,
    G,
    x_stride,
    x_scale_stride,
    scale_2_stride,
    K: gl.constexpr,
    X_AHEAD: gl.constexpr,
    PARTS: gl.constexpr,
    AHEAD: gl.constexpr,
    BT: gl.constexpr,
    ROWS: gl.constexpr,
    PADDED: gl.constexpr,
    WARPS: gl.constexpr,
):
    BN: gl.constexpr = 16 * WARPS
    COLS: gl.constexpr = K // PARTS // 8
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    tiles = N // BN
    part = gl.program_id(1)
    group = gl.program_id(0) // tiles
    first = (gl.program_id(0) % tiles) * BN
    w_row = group.to(gl.int64) * N + first
    w_at = w_ptr + w_row * (K // 8) + part * COLS
    scale_at = w_scale_ptr + w_row * (K // 64) + part * (COLS // 8)
    at = offsets(K, WARPS)
    loaded = ()
    for step in gl.static_range(AHEAD):
        loaded = loaded + (load_step(w_at, scale_at, at, step),)  # noqa: RUF005 (Gluon has no starred tuples)
    gdc_wait()  # nothing but the weight may be touched before: the launch before this one may still run
    gdc_launch_dependents()
    row = gl.arange(0, ROWS, gl.SliceLayout(1, stage_layout(WARPS, ROWS, PADDED)))
    x_first = part * COLS + group * (X_AHEAD // 8)
    staged = stage_rows(
        x_ptr, x_scale_ptr, row, row < T, x_stride, x_scale_stride, x_first, COLS, PADDED, ROWS, WARPS
    )
    gl.thread_barrier()
    acc = product(loaded, staged, w_at, scale_at, at, COLS // 32, AHEAD, BT, ROWS, WARPS)
    n = first + gl.arange(0, BN, gl.SliceLayout(1, mma))
    t = gl.arange(0, BT, gl.SliceLayout(0, mma))
    gsa = gl.load(gsa_ptr + t, mask=t < T, other=0.0)
    acc = acc * gsa[None, :] * gl.load(scale_2_ptr + group * scale_2_stride)
    out_at = ((part * T + t[None, :].to(gl.int64)) * G + group) * N + n[:, None]
    gl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=(t < T)[None, :])


class Plan(NamedTuple):
    """Constants of a launch: activation rows of a product and in shared memory, words there, steps in flight."""

    bt: int
    rows: int
    padded: int
    ahead: int


def plan(k: int, num_rows: int, most_ahead: int) -> Plan:
    """Of ``num_rows`` rows, at most 16, and ``k`` columns a program, a multiple of 256."""
    rows = 1 if num_rows == 1 else 8 if num_rows <= 8 else MOST_ROWS
    ahead = next(ahead for ahead in range(most_ahead, 0, -1) if k // STEP % ahead == 0)
    return Plan(bt=max(8, rows), rows=rows, padded=triton.next_power_of_2(k // 8), ahead=ahead)


def here(device: torch.device) -> bool:
    """Whether kernels of this kind can run."""
    if device.type != "cuda" or not triton.__version__.startswith(TRITON):
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def fits(n: int, k: int, most_rows: int, warps: int = WARPS) -> bool:
    """Whether products of N x K in one program are for this kernel; from the sizes alone, not from a batch."""
    return n % (16 * warps) == 0 and k % STEP == 0 and most_rows * triton.next_power_of_2(k) <= MOST_STAGED


def addressable(*scales: Tensor) -> bool:
    """Whether rows of E4M3 bytes start at multiples of 4, as these kernels read them."""
    return all(not (part.data_ptr() % 4 or any(step % 4 for step in part.stride()[:-1])) for part in scales)


def launch(
    x: tuple[Tensor, Tensor, Tensor],
    weight: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    *,
    parts: int,
    ahead: int,
) -> None:
    """Launch on checked arguments of :func:`kernels.linear.kernel.nvfp4_linear`.

    Parameters
    ----------
    x : words int32 (T, ...), scales uint8 (T, ...), gsa (T,); T at most 16
    weight : words int32 (G, N, K/8), scales uint8 (G, N, K/16), scale_2
    out : (T, G*N), or (parts, T, G*N) FP32
    parts : parts of K
    ahead : columns between the groups of ``x``
    """
    (words, scales, gsa), (w_words, w_scales, scale_2) = x, weight
    groups, n, k = w_words.shape[0], w_words.shape[1], 8 * w_words.shape[2]
    bt, rows, padded, steps = plan(k // parts, len(words), MOST_AHEAD)
    pairs = scales.view(torch.int16)
    _linear_hopper_kernel[(groups * (n // (16 * WARPS)), parts)](
        words,
        pairs,
        gsa,
        w_words,
        w_scales.view(torch.int32),
        scale_2,
        out,
        len(words),
        n,
        groups,
        words.stride(0),
        pairs.stride(0),
        int(scale_2.numel() > 1),
        K=k,
        X_AHEAD=ahead,
        PARTS=parts,
        AHEAD=steps,
        BT=bt,
        ROWS=rows,
        PADDED=padded,
        WARPS=WARPS,
        num_warps=WARPS,
        maxnreg=MOST_REGISTERS,
        **OVERLAPPED,
    )


def build(name: str, k: int, rows: int, parts: int, ahead: int) -> Build:
    """One specialisation."""
    bt, staged, padded, steps = plan(k // parts, rows, MOST_AHEAD)
    pointers = {"x_ptr": "*i32", "x_scale_ptr": "*i16", "gsa_ptr": "*fp32", "w_ptr": "*i32"}
    pointers |= {"w_scale_ptr": "*i32", "scale_2_ptr": "*fp32", "out_ptr": "*bf16" if parts == 1 else "*fp32"}
    integers = ("T", "N", "G", "x_stride", "x_scale_stride", "scale_2_stride")
    constants = {"K": k, "X_AHEAD": ahead, "PARTS": parts, "AHEAD": steps, "BT": bt, "ROWS": staged}
    return Build(
        name=f"linear/nvfp4_hopper/{name}",
        kernel=_linear_hopper_kernel,
        signature=pointers | dict.fromkeys(integers, "i32"),
        constants=constants | {"PADDED": padded, "WARPS": WARPS},
        aligned=(*pointers, "N", "x_stride", "x_scale_stride"),
        options={"num_warps": WARPS, "maxnreg": MOST_REGISTERS, **OVERLAPPED},
        only=("sm_90a",),
    )
