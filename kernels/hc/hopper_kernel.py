"""mHC's partial sums on Hopper, Gluon; the same meaning as mix_kernel.py's, its fallback, in an order of its own.

Written for Triton 3.6 (Gluon changes between versions) and built for sm_90 only; the interpreter does not run it.

A block owns BLOCK_T rows and a part of the sum, in steps of 64 columns. Streams and weights come by TMA, some steps
ahead. Streams go from shared memory to registers once: as operand A of the tensor cores, and squared. The weights,
FP32, are cut into three BF16 terms, which all warps read from shared memory.

The sum over K runs over SEGMENT steps on the tensor cores, over four segments as a chain, and over chains as a tree,
whatever the number of rows: a block sums one segment, one chain or four, and the second kernel adds the rest.

What orders the memory: a step's streams are all in registers, and its terms written, before the block's barrier; after
it the stage is filled again, and the terms are read. Terms have two buffers, as the other one's reader is awaited
before the barrier.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TRITON = "3.6."
STEP = 64  # columns: 128 bytes of streams, one swizzle
SINGLES = 4  # segments of a chain
LONGEST = 16384  # values of a stream


@gluon.jit
def _cut(x):
    """The upper 16 bits of FP32."""
    return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _upper(x):
    """FP32 as BF16, cut off: exact where the lower 16 bits are 0."""
    return (x.to(gl.int32, bitcast=True) >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def store_terms(weight, terms, turn):
    """FP32 [32, 64] as three BF16 values whose sum it is, largest first, cut, not rounded: two bare operations."""
    high = _cut(weight)
    rest = weight - high
    middle = _cut(rest)
    terms.index(turn * 3).store(_upper(high))
    terms.index(turn * 3 + 1).store(_upper(middle))
    terms.index(turn * 3 + 2).store(_upper(rest - middle))


@gluon.jit
def multiply(x, terms, turn, total):
    """``total + x @ weight.T``, smallest terms first, issued."""
    total = warpgroup_mma(x, terms.index(turn * 3 + 2).permute((1, 0)), total, is_async=True)
    total = warpgroup_mma(x, terms.index(turn * 3 + 1).permute((1, 0)), total, is_async=True)
    return warpgroup_mma(x, terms.index(turn * 3).permute((1, 0)), total, is_async=True)


@gluon.jit
def _fill(loads, stage, row, k, BLOCK_T: gl.constexpr):
    """Copy one step's streams and weights."""
    streams, fn, staged, weights, full = loads
    mbarrier.expect(full.index(stage), BLOCK_T * 64 * 2 + 32 * 64 * 4)
    tma.async_copy_global_to_shared(fn, [0, k], full.index(stage), weights.index(stage))
    tma.async_copy_global_to_shared(streams, [row, k], full.index(stage), staged.index(stage))


@gluon.jit
def row_squares(x):
    """Sum of each row's squares."""
    wide = x.to(gl.float32)
    return gl.sum(wide * wide, 1)


@gluon.jit
def _segment(loads, terms, zeros, operand: gl.constexpr, plain: gl.constexpr, SEGMENT: gl.constexpr):
    """One segment with a stage and terms for each step: products and squares."""
    _, _, staged, weights, full = loads
    held = ()
    for step in gl.static_range(SEGMENT):
        mbarrier.wait(full.index(step), 0)
        held = held + (staged.index(step).load(operand),)  # noqa: RUF005
        store_terms(weights.index(step).load(plain), terms, step)
    fence_async_shared()
    gl.thread_barrier()
    part = warpgroup_mma_init(zeros)
    for step in gl.static_range(SEGMENT):
        part = multiply(held[step], terms, step, part)
    square = row_squares(held[0])
    for step in gl.static_range(1, SEGMENT):
        square += row_squares(held[step])
    return warpgroup_mma_wait(0, deps=(part,)), square


@gluon.jit
def _chains(
    loads,
    terms,
    zeros,
    row,
    first,
    steps,
    operand: gl.constexpr,
    plain: gl.constexpr,
    SEGMENT: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Up to four chains of four segments: products and squares."""
    _, _, staged, weights, full = loads
    no_squares = gl.zeros([BLOCK_T], gl.float32, gl.SliceLayout(1, operand))
    total, pair, chain = zeros, zeros, zeros
    total_square, pair_square, chain_square, square = no_squares, no_squares, no_squares, no_squares
    part = warpgroup_mma_init(zeros)
    held = gl.zeros([BLOCK_T, 64], gl.bfloat16, operand)  # streams that the tensor cores still read
    stage = 0
    phase = 0
    turn = 0
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        x = staged.index(stage).load(operand)
        store_terms(weights.index(stage).load(plain), terms, turn)
        fence_async_shared()
        done, held = warpgroup_mma_wait(0, deps=(part, held))
        gl.thread_barrier()
        if step + STAGES < steps:
            _fill(loads, stage, row, first + (step + STAGES) * 64, BLOCK_T)
        if step % SEGMENT == 0:
            chain += done
            done = zeros
            chain_square += square
            square = no_squares
            if step % (4 * SEGMENT) == 0:
                pair += chain
                chain = zeros
                pair_square += chain_square
                chain_square = no_squares
                if step % (8 * SEGMENT) == 0:
                    total += pair
                    pair = zeros
                    total_square += pair_square
                    pair_square = no_squares
        part = multiply(x, terms, turn, done)
        held = x
        square += row_squares(x)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase = phase ^ 1
        turn = turn ^ 1
    done, held = warpgroup_mma_wait(0, deps=(part, held))
    return total + (pair + (chain + done)), total_square + (pair_square + (chain_square + square))


@gluon.jit
def store_sums(part_ptr, total, square, first_row, num_rows, operand: gl.constexpr, OUTPUTS: gl.constexpr):
    """Store products [BLOCK_T, 32] and squares [BLOCK_T] of the rows from ``first_row`` on: part [T, 32]."""
    rows: gl.constexpr = total.shape[0]
    accumulator: gl.constexpr = operand.parent
    row = first_row + gl.arange(0, rows, gl.SliceLayout(1, accumulator))
    column = gl.arange(0, 32, gl.SliceLayout(0, accumulator))
    place = row.to(gl.int64)[:, None] * 32 + column[None, :]
    gl.store(part_ptr + place, total, (row < num_rows)[:, None] & (column < OUTPUTS)[None, :])
    row = first_row + gl.arange(0, rows, gl.SliceLayout(1, operand))
    gl.store(part_ptr + row.to(gl.int64) * 32 + 24, square, row < num_rows)


@gluon.jit
def partial_hopper_kernel(
    streams,
    fn,
    part_ptr,
    num_rows,
    K,
    steps,
    OUTPUTS: gl.constexpr,
    SEGMENT: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
    ALONE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Sums of ``steps`` steps of 64 columns for BLOCK_T rows, not normalised: part [split, T, 32].

    ALONE: of one segment, which has a stage for each of its steps.
    """
    WARPS: gl.constexpr = BLOCK_T // 16
    TURNS: gl.constexpr = SEGMENT if ALONE else 2
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 32, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator, 2)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    staged = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_T, 64], swizzled)
    weights = gl.allocate_shared_memory(gl.float32, [STAGES, 32, 64], gl.NVMMASharedLayout(128, 32, 2))
    terms = gl.allocate_shared_memory(gl.bfloat16, [3 * TURNS, 32, 64], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = gl.program_id(0) * BLOCK_T
    first = gl.program_id(1) * steps * 64
    loads = (streams, fn, staged, weights, full)
    steps = gl.minimum(steps, (K - first + 63) // 64)
    zeros = gl.zeros([BLOCK_T, 32], gl.float32, accumulator)
    for stage in gl.static_range(STAGES):
        if ALONE or stage < steps:  # columns past K come as zeros
            _fill(loads, stage, row, first + stage * 64, BLOCK_T)
    if ALONE:
        total, square = _segment(loads, terms, zeros, operand, plain, SEGMENT)
    else:
        total, square = _chains(
            loads, terms, zeros, row, first, steps, operand, plain, SEGMENT, BLOCK_T, STAGES
        )

    part_ptr += gl.program_id(1).to(gl.int64) * num_rows * 32
    store_sums(part_ptr, total, square, row, num_rows, operand, OUTPUTS)


def why_not(streams: Tensor, fn: Tensor) -> str | None:
    """Why this kernel cannot run on streams (T, 4, D) and fn; None if it can."""
    if not triton.__version__.startswith(TRITON):
        return f"Triton is {triton.__version__}, not {TRITON}x"
    if streams.device.type != "cuda":
        return f"device is {streams.device.type}"
    if torch.cuda.get_device_capability(streams.device) != (9, 0):
        return f"compute capability is {torch.cuda.get_device_capability(streams.device)}, not (9, 0)"
    if streams.dtype is not torch.bfloat16:
        return f"streams are {streams.dtype}"
    if streams.shape[2] > LONGEST:
        return f"a stream of {streams.shape[2]} values; a segment of so long a row outgrows shared memory"
    if streams.data_ptr() % 16 or streams.stride(0) % 8 or fn.data_ptr() % 16:
        return "a row of the streams or of fn does not start at a multiple of 16 bytes"
    return None


def layout(bits: int) -> Any:
    """Shared memory of values that TMA writes: rows of 128 bytes, swizzled."""
    return gl.NVMMASharedLayout(128, bits, 2)


def descriptors(streams: Tensor, fn: Tensor, block: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Streams (T, 4, D) and fn (outputs, 4 D) as what TMA copies ``block`` or 32 rows and 64 columns of."""
    T, _, D = streams.shape
    return (
        TensorDescriptor(streams, [T, 4 * D], [streams.stride(0), 1], [block, STEP], layout(16)),
        TensorDescriptor(fn, [len(fn), 4 * D], [4 * D, 1], [32, STEP], layout(32)),
    )
