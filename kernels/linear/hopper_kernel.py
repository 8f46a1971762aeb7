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
from kernels.linear.hopper_product_kernel import rest, stage_layout, start
from kernels.linear.nvfp4_kernel import operands
from kernels.overlap import OVERLAPPED

TRITON = "3.6."
STEP = 256  # columns of a step
MOST_STAGED = 1 << 15  # activation values in shared memory: 64 KB of FP16 a block of programs
MOST_ROWS = 16
# Rows of the weight a block, H200, CUDA graphs, us of q_b with one row and of o_b with 16: 64 8.0, 12.5; 128 8.3, 12.2;
# 256 8.7, 11.7. Steps in flight and registers (2026-12-01): q_b with one row 7.1 with 2 and 96, 7.4 with 2 and 80, 7.6
# with 1 and 64; with 16 rows 8.3 with 2 and 96, 9.6 with 2 and 80, 8.7 with 1 and 64; o_b with one row and with 16 7.7,
# 9.4 with 1 and 96, 8.1, 10.0 with 2 and 96, 8.6, 11.1 with 2 and 80. With 96 two blocks fit a multiprocessor, so that
# all of a launch run at once and the next one's take nothing from them.
WARPS = 8
WHOLE = 2, 96
OF_PARTS = 1, 128  # docs/evidence/nvfp4.md has others


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
    at, loaded = start(w_at, scale_at, K, AHEAD, WARPS)
    gdc_wait()  # nothing but the weight may be touched before: the launch before this one may still run
    gdc_launch_dependents()
    row = gl.arange(0, ROWS, gl.SliceLayout(1, stage_layout(WARPS, ROWS, PADDED)))
    x_first = part * COLS + group * (X_AHEAD // 8)
    acc = rest(
        at,
        loaded,
        w_at,
        scale_at,
        x_ptr,
        x_scale_ptr,
        row,
        row < T,
        x_stride,
        x_scale_stride,
        x_first,
        COLS,
        AHEAD,
        BT,
        ROWS,
        PADDED,
        WARPS,
    )
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

    def constants(self, warps: int) -> dict[str, int]:
        """Of a kernel around :func:`kernels.linear.hopper_product_kernel.rest`."""
        return {"AHEAD": self.ahead, "BT": self.bt, "ROWS": self.rows, "PADDED": self.padded, "WARPS": warps}


def plan(k: int, num_rows: int, most_ahead: int) -> Plan:
    """Of ``num_rows`` rows, at most 16, and ``k`` columns a program, a multiple of 256."""
    rows = 1 if num_rows == 1 else 8 if num_rows <= 8 else MOST_ROWS
    ahead = next(ahead for ahead in range(most_ahead, 0, -1) if k // STEP % ahead == 0)
    return Plan(bt=max(8, rows), rows=rows, padded=triton.next_power_of_2(k // 8), ahead=ahead)


def depth(parts: int) -> tuple[int, int]:
    """Most steps in flight, and registers of a thread."""
    return OF_PARTS if parts > 1 else WHOLE


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


def arguments(x: tuple[Tensor, Tensor, Tensor], weight: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """A kernel's first six, of what :func:`launch` takes: scales of rows in pairs, of the weight in fours."""
    (words, scales, gsa), (w_words, w_scales, scale_2) = x, weight
    return words, scales.view(torch.int16), gsa, w_words, w_scales.view(torch.int32), scale_2


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
    tensors = arguments(x, weight)
    words, pairs, _, w_words, _, scale_2 = tensors
    groups, n, k = w_words.shape[0], w_words.shape[1], 8 * w_words.shape[2]
    most_ahead, registers = depth(parts)
    _linear_hopper_kernel[(groups * (n // (16 * WARPS)), parts)](
        *tensors,
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
        **plan(k // parts, len(words), most_ahead).constants(WARPS),
        num_warps=WARPS,
        maxnreg=registers,
        **OVERLAPPED,
    )


def build(name: str, k: int, rows: int, parts: int, ahead: int) -> Build:
    """One specialisation."""
    pointers = operands("*i32", "*i16", "*i32", "*bf16" if parts == 1 else "*fp32")
    integers = ("T", "N", "G", "x_stride", "x_scale_stride", "scale_2_stride")
    constants = {"K": k, "X_AHEAD": ahead, "PARTS": parts}
    most_ahead, registers = depth(parts)
    return Build(
        name=f"linear/nvfp4_hopper/{name}",
        kernel=_linear_hopper_kernel,
        signature=pointers | dict.fromkeys(integers, "i32"),
        constants=constants | plan(k // parts, rows, most_ahead).constants(WARPS),
        aligned=(*pointers, "N", "x_stride", "x_scale_stride"),
        options={"num_warps": WARPS, "maxnreg": registers, **OVERLAPPED},
        only=("sm_90a",),
    )
