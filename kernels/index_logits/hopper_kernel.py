"""Prefill's weighted-ReLU MQA logits for Hopper, Gluon; the same meaning as fp8_kernel.py's prefill, its fallback.

Written for Triton 3.6 (Gluon changes between versions) and built for sm_90 only; the interpreter does not run it.

A block owns keys: two warp groups hold TILE each in the registers of operand A for the block's whole life, and walk
the queries of a block of rows. A product reads 64 heads of one query from shared memory, which both groups share: half
of what it would read with both operands there, where 128 bytes a clock are as scarce as the tensor cores. One more
warp copies queries (TMA) and their weights ahead. Each group has two accumulators that take turns: while the tensor
cores multiply query i, its threads weight and sum query i - 1. A thread's sums of four rows change places with its
three neighbours', so that each adds up, scales and stores a row of its own.

Measured on an H200 (2026-11-30, 2048 queries x 32768 keys): 1047 us; sums met by shuffles and stored four times 1118;
blocks of 128 or 512 rows 1103 and 1056; four stages 1085; three groups of 128 keys with one accumulator each 1132 (as
DeepGEMM's four of 64 keys, 1094), of 64 keys and two queries a product 1315; one group a block, two blocks a
multiprocessor that each copy and meet at a barrier a query, 1311. Tensor cores were 49% busy in that last one, 65% in
DeepGEMM's; the busier, the lower the clock.

Who may touch a stage, and what orders it: the copying warp's TMA and its 32 threads arrive at ``full`` when query and
weights have landed; each group waits there, reads the weights, multiplies. Its warps meet when the product is done,
and one thread arrives at ``empty``, where the copying warp waits before it fills the stage again.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.build_spec import Build, Sizes

TRITON = "3.6."
HEADS, HEAD_DIM = 64, 128  # the only sizes
GROUPS = 2  # of a block; also in the kernel, which cannot count them
TILE = 128  # keys of a group, 32 a warp; the kernel's layouts are for this
STAGES = 8  # of queries: 66 KB
ROWS = 256  # of a block
KEEP_NAN = gl.constexpr(triton.language.PropagateNan.ALL)


@gluon.jit
def _begin(keys, queries, weights, full, stage, phase, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """Await a stage and issue ``keys @ q^T``: the accumulator, not yet to be read, and the heads' weights."""
    mbarrier.wait(full.index(stage), phase)
    head_weights = weights.index(stage).load(gl.SliceLayout(0, LAYOUT))
    zeros = gl.zeros([TILE, 64], gl.float32, LAYOUT)
    query = queries.index(stage).permute((1, 0))
    return warpgroup_mma(keys, query, zeros, use_acc=False, is_async=True), head_weights


@gluon.jit
def _end(dots, empty, stage, phase, STAGES: gl.constexpr):
    """Await the product and give its stage back: the products, the next stage and its phase."""
    dots = warpgroup_mma_wait(0, deps=(dots,))
    mbarrier.arrive(empty.index(stage))
    stage += 1
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
    return dots, stage, phase


@gluon.constexpr_function
def _turned():
    """[128, 4] partial sums of a product's rows: four of a row in a thread, a row of the thread's four a lane."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[8, 0], [64, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [128, 4]
    )


@gluon.jit
def _store(dots, weights, scale, row, entries, call, FILL: gl.constexpr):
    """Weight, sum and store the scores of one query, unless its row is past the last."""
    _, limit_ptr, out_ptr, _, last, _, C, out_stride = call
    parts = gl.maximum(dots, 0.0, propagate_nan=KEEP_NAN) * weights[None, :]
    parts = gl.sum(gl.reshape(gl.permute(gl.reshape(parts, [128, 8, 4, 2]), [0, 2, 1, 3]), [128, 4, 16]), 2)
    turned: gl.constexpr = _turned()
    scores = gl.sum(gl.convert_layout(parts, turned), 1) * scale
    limit = gl.minimum(gl.load(limit_ptr + gl.minimum(row, last)), C)
    there = row <= last
    out_ptr += row.to(gl.int64) * out_stride  # outgrows int32 on a long prompt
    if FILL:
        scores = gl.where(entries < limit, scores, float("-inf"))
        gl.store(out_ptr + entries, scores, (entries < C) & there)
    else:
        gl.store(out_ptr + entries, scores, (entries < limit) & there)


@gluon.jit
def _score(group: gl.constexpr, shared, call, TILE: gl.constexpr, STAGES: gl.constexpr, FILL: gl.constexpr):
    """Score the group's keys against all queries of the block, and up to two rows past them that are not stored."""
    staged, queries, weights, landed, full, empty = shared
    scale_ptr, _, _, first, last, start, C, _ = call
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator, 4)
    turned: gl.constexpr = _turned()
    entries = start + group * TILE + gl.arange(0, TILE, gl.SliceLayout(1, turned))
    scale = gl.load(scale_ptr + entries, entries < C, other=0.0)
    mbarrier.wait(landed, 0)
    keys = staged.index(group).load(operand)

    even, even_weights = _begin(keys, queries, weights, full, 0, 0, TILE, accumulator)
    even = warpgroup_mma_wait(0, deps=(even,))
    mbarrier.arrive(empty.index(0))
    stage = 1
    phase = 0
    for pair in range((last - first + 2) // 2):
        row = first + 2 * pair
        odd, odd_weights = _begin(keys, queries, weights, full, stage, phase, TILE, accumulator)
        _store(even, even_weights, scale, row, entries, call, FILL)
        odd, stage, phase = _end(odd, empty, stage, phase, STAGES)
        even, even_weights = _begin(keys, queries, weights, full, stage, phase, TILE, accumulator)
        _store(odd, odd_weights, scale, row + 1, entries, call, FILL)
        even, stage, phase = _end(even, empty, stage, phase, STAGES)


@gluon.jit
def _copy(q_desc, weight_ptr, queries, weights, full, empty, first, last, T, STAGES: gl.constexpr):
    """Copy queries and weights, row by row: all of the block, and one or two more, since groups take them in pairs."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    head = gl.arange(0, 64, line)
    stage = 0
    phase = 1
    for step in range((last - first + 2) // 2 * 2 + 1):
        row = gl.minimum(first + step, T - 1)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), 64 * 128)
        tma.async_copy_global_to_shared(q_desc, [row * 64, 0], full.index(stage), queries.index(stage))
        async_copy.async_copy_global_to_shared(
            weights.index(stage), weight_ptr + row.to(gl.int64) * 64 + head
        )
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase = phase ^ 1


@gluon.jit
def _prefill_hopper_kernel(
    q_desc,
    key_desc,
    key_scale_ptr,
    weight_ptr,
    limit_ptr,
    out_ptr,
    T,
    C,
    out_stride,
    FILL: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
):
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    # a thread's heads 8 i + 2 q + {0, 1} lie together: 16-byte loads without conflicts
    by_thread: gl.constexpr = gl.SharedLinearLayout([[1], [8], [2], [4], [16], [32]], [], 16)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])

    start = gl.program_id(0) * (2 * TILE)
    first = gl.program_id(1) * ROWS
    last = gl.minimum(first + ROWS, T) - 1
    rows = first + gl.arange(0, ROWS, line)
    furthest = gl.max(gl.load(limit_ptr + rows, rows < T, other=0), 0)
    if start < furthest:
        staged = gl.allocate_shared_memory(gl.float8e4nv, [2, TILE, 128], shared)
        queries = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], shared)
        weights = gl.allocate_shared_memory(gl.float32, [STAGES, 64], by_thread)
        landed = gl.allocate_shared_memory(gl.int64, [1], barrier)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
        mbarrier.init(landed, count=1)
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=33)  # the query's TMA, and each thread's weights
            mbarrier.init(empty.index(stage), count=2)  # both groups
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.expect(landed, 2 * TILE * 128)
        for group in gl.static_range(2):
            tma.async_copy_global_to_shared(key_desc, [start + group * TILE, 0], landed, staged.index(group))
        kept = (staged, queries, weights, landed, full, empty)
        call = (key_scale_ptr, limit_ptr, out_ptr, first, last, start, C, out_stride)
        gl.warp_specialize(
            [
                (_score, (0, kept, call, TILE, STAGES, FILL)),
                (_score, (1, kept, call, TILE, STAGES, FILL)),
                (_copy, (q_desc, weight_ptr, queries, weights, full, empty, first, last, T, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
    elif FILL:
        plain: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
        entries = start + gl.arange(0, 2 * TILE, plain)
        hidden = gl.full([2 * TILE], float("-inf"), gl.float32, plain)
        for step in range(last - first + 1):
            row = (first + step).to(gl.int64)
            gl.store(out_ptr + row * out_stride + entries, hidden, entries < C)


def why_not(q: Tensor, k: Tensor | None = None) -> str | None:
    """Why this kernel cannot run on queries (T, H, 128), over keys; None if it can."""
    if not triton.__version__.startswith(TRITON):
        return f"Triton is {triton.__version__}, not {TRITON}x"
    if q.device.type != "cuda":
        return f"device is {q.device.type}"
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        return f"compute capability is {torch.cuda.get_device_capability(q.device)}, not (9, 0)"
    if q.data_ptr() % 16 or (k is not None and k.data_ptr() % 16):
        return "q or k does not start at a multiple of 16 bytes"
    return None if q.shape[1] == HEADS else f"{q.shape[1]} heads, not {HEADS}"


def launch(
    q: Tensor, k: Tensor, key_scale: Tensor, weights: Tensor, limits: Tensor, out: Tensor, *, fill: bool
) -> None:
    """Launch on checked arguments of :func:`kernels.index_logits.kernel.index_logits`, T and C at least 1."""
    T, C = out.shape
    swizzled = _layout()
    _prefill_hopper_kernel[(triton.cdiv(C, GROUPS * TILE), triton.cdiv(T, ROWS))](
        TensorDescriptor.from_tensor(q.view(T * HEADS, HEAD_DIM), [HEADS, HEAD_DIM], swizzled),
        TensorDescriptor.from_tensor(k, [TILE, HEAD_DIM], swizzled),
        key_scale,
        weights,
        limits,
        out,
        T,
        C,
        out.stride(0),
        FILL=fill,
        ROWS=ROWS,
        TILE=TILE,
        STAGES=STAGES,
        num_warps=4,
    )


def _layout() -> Any:
    """Shared memory of codes that the tensor cores read: rows of 128 bytes, swizzled."""
    return gl.NVMMASharedLayout(128, 8, 2)


def builds(sizes: Sizes) -> list[Build]:
    """The one specialisation of a model with these heads."""
    if (sizes.index_n_heads, sizes.index_head_dim) != (HEADS, HEAD_DIM):
        return []
    return [
        Build(
            name=f"index_logits/prefill_hopper/{sizes.name}",
            kernel=_prefill_hopper_kernel,
            signature={
                "q_desc": f"tensordesc<fp8e4nv[{HEADS}, {HEAD_DIM}],{_layout()!r}>",
                "key_desc": f"tensordesc<fp8e4nv[{TILE}, {HEAD_DIM}],{_layout()!r}>",
                "key_scale_ptr": "*fp32",
                "weight_ptr": "*fp32",
                "limit_ptr": "*i32",
                "out_ptr": "*fp32",
                "T": "i32",
                "C": "i32",
                "out_stride": "i32",
            },
            constants={"FILL": False, "ROWS": ROWS, "TILE": TILE, "STAGES": STAGES},
            aligned=("key_scale_ptr", "weight_ptr", "limit_ptr", "out_ptr", "C", "out_stride"),
            options={"num_warps": 4},
            native=("fp8",),
            only=("sm_90a",),
        )
    ]
