"""Prefill's weighted-ReLU MQA logits for Hopper, Gluon; the same meaning as kernel.py's prefill, its fallback.

Written for Triton 3.6 (Gluon changes between versions) and built for sm_90 only; the interpreter does not run it.

A block owns BLOCK_N keys, in the registers of operand A for its whole life, and walks the queries of a block of rows:
a product reads 64 heads of one query from shared memory, half of what it would read with both operands there, where
its 128 bytes a clock are as scarce as the tensor cores. Two accumulators take turns: while the tensor cores multiply
query i, the threads weight and sum query i - 1.

Who may touch a query's stage in shared memory, and what orders it: every thread copies its part (cp.async), waits for
its own copies, and meets the others at the barrier of step i; each then fences what was copied for the tensor cores,
and query i may be multiplied. Past the same barrier every warp has waited for the product of query i - 1, so that its
stage may be filled again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.build_spec import Build, Sizes

TRITON = "3.6."
HEADS, HEAD_DIM = 64, 128  # the only sizes
WARPS = 4  # one warp group, 32 keys a warp; two blocks a multiprocessor
STEPS = 64  # queries a block, a multiple of 4
KEEP_NAN = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def _copy_query(stage, q_ptr, row, WARPS: gl.constexpr):
    """Begin to copy the 64 x 128 codes of a row's query into a stage."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    heads = gl.arange(0, 64, gl.SliceLayout(1, layout))
    dims = gl.arange(0, 128, gl.SliceLayout(0, layout))
    at = heads[:, None] * 128 + dims[None, :]
    async_copy.async_copy_global_to_shared(stage, q_ptr + row.to(gl.int64) * 8192 + at)
    async_copy.commit_group()


@gluon.jit
def _await_query():
    """The oldest of three copies is there for the tensor cores, and the product before it is done in all warps."""
    async_copy.wait_group(2)
    gl.thread_barrier()
    fence_async_shared()


@gluon.jit
def _begin(keys, stage, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Issue ``keys @ q^T`` of a stage: the accumulator, not yet to be read."""
    zeros = gl.zeros([BLOCK_N, 64], gl.float32, LAYOUT)
    return warpgroup_mma(keys, stage.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _weighted(dots, weights, scale):
    """Scores of one query: ReLU, weights, sum over heads, the keys' scales."""
    return gl.sum(gl.maximum(dots, 0.0, propagate_nan=KEEP_NAN) * weights[None, :], 1) * scale


@gluon.jit
def _store(scores, out_ptr, row, limit, entries, C, out_stride, FILL: gl.constexpr):
    out_ptr += row.to(gl.int64) * out_stride  # outgrows int32 on a long prompt
    if FILL:
        gl.store(out_ptr + entries, gl.where(entries < limit, scores, float("-inf")), entries < C)
    else:
        gl.store(out_ptr + entries, scores, entries < limit)


@gluon.jit
def _step(
    step,
    here,
    freed,
    done,
    weights,
    limit,
    call,
    FILL: gl.constexpr,
    BLOCK_N: gl.constexpr,
    LAYOUT: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Multiply query ``step`` from the stage ``here`` while query step - 1, ``done``, is weighted and stored.

    Refills ``freed``, the stage of query step - 1. Rows are first + step, or the last again. Gives the products, the
    weights and the limit of the query.
    """
    keys, scale, entries, q_ptr, weight_ptr, limit_ptr, out_ptr, first, last, C, out_stride = call
    row = gl.minimum(first + step, last)
    _await_query()
    dots = _begin(keys, here, BLOCK_N, LAYOUT)
    _copy_query(freed, q_ptr, gl.minimum(first + step + 3, last), WARPS)
    head = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    next_weights = gl.load(weight_ptr + row.to(gl.int64) * 64 + head)
    next_limit = gl.minimum(gl.load(limit_ptr + row), C)
    before = gl.minimum(first + step - 1, last)
    _store(_weighted(done, weights, scale), out_ptr, before, limit, entries, C, out_stride, FILL)
    return warpgroup_mma_wait(0, deps=(dots,)), next_weights, next_limit


@gluon.jit
def _prefill_hopper_kernel(
    q_ptr,
    key_ptr,
    key_scale_ptr,
    weight_ptr,
    limit_ptr,
    out_ptr,
    T,
    C,
    out_stride,
    FILL: gl.constexpr,
    STEPS: gl.constexpr,
    WARPS: gl.constexpr,
):
    BLOCK_N: gl.constexpr = 32 * WARPS
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator, 4)
    by_key: gl.constexpr = gl.SliceLayout(1, accumulator)
    plain: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])

    start = gl.program_id(0) * BLOCK_N
    first = gl.program_id(1) * STEPS
    last = gl.minimum(first + STEPS, T) - 1
    entries = start + gl.arange(0, BLOCK_N, by_key)
    rows = first + gl.arange(0, STEPS, line)
    furthest = gl.max(gl.load(limit_ptr + rows, rows < T, other=0), 0)
    if start < furthest:
        # four allocations, not one of four stages: Triton would put a barrier between a product and a copy
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
        stage0 = gl.allocate_shared_memory(gl.float8e4nv, [64, 128], shared)
        stage1 = gl.allocate_shared_memory(gl.float8e4nv, [64, 128], shared)
        stage2 = gl.allocate_shared_memory(gl.float8e4nv, [64, 128], shared)
        stage3 = gl.allocate_shared_memory(gl.float8e4nv, [64, 128], shared)
        _copy_query(stage0, q_ptr, first, WARPS)
        _copy_query(stage1, q_ptr, gl.minimum(first + 1, last), WARPS)
        _copy_query(stage2, q_ptr, gl.minimum(first + 2, last), WARPS)

        key = start + gl.arange(0, BLOCK_N, gl.SliceLayout(1, plain))
        dims = gl.arange(0, 128, gl.SliceLayout(0, plain))
        at = key.to(gl.int64)[:, None] * 128 + dims[None, :]
        codes = gl.load(key_ptr + at, (key < C)[:, None], other=0.0)
        staged = gl.allocate_shared_memory(
            gl.float8e4nv, [BLOCK_N, 128], gl.SwizzledSharedLayout(16, 1, 8, [1, 0]), codes
        )
        keys = staged.load(operand)
        scale = gl.load(key_scale_ptr + entries, entries < C, other=0.0)

        _await_query()
        dots = _begin(keys, stage0, BLOCK_N, accumulator)
        _copy_query(stage3, q_ptr, gl.minimum(first + 3, last), WARPS)
        head = gl.arange(0, 64, gl.SliceLayout(0, accumulator))
        weights = gl.load(weight_ptr + first.to(gl.int64) * 64 + head)
        limit = gl.minimum(gl.load(limit_ptr + first), C)
        dots = warpgroup_mma_wait(0, deps=(dots,))
        steps = (last - first + 4) // 4 * 4  # rows up to a multiple of four: the last row may be done again
        call = keys, scale, entries, q_ptr, weight_ptr, limit_ptr, out_ptr, first, last, C, out_stride
        for step in range(1, steps - 3, 4):
            dots, weights, limit = _step(
                step, stage1, stage0, dots, weights, limit, call, FILL, BLOCK_N, accumulator, WARPS
            )
            dots, weights, limit = _step(
                step + 1, stage2, stage1, dots, weights, limit, call, FILL, BLOCK_N, accumulator, WARPS
            )
            dots, weights, limit = _step(
                step + 2, stage3, stage2, dots, weights, limit, call, FILL, BLOCK_N, accumulator, WARPS
            )
            dots, weights, limit = _step(
                step + 3, stage0, stage3, dots, weights, limit, call, FILL, BLOCK_N, accumulator, WARPS
            )
        dots, weights, limit = _step(
            steps - 3, stage1, stage0, dots, weights, limit, call, FILL, BLOCK_N, accumulator, WARPS
        )
        dots, weights, limit = _step(
            steps - 2, stage2, stage1, dots, weights, limit, call, FILL, BLOCK_N, accumulator, WARPS
        )
        dots, weights, limit = _step(
            steps - 1, stage3, stage2, dots, weights, limit, call, FILL, BLOCK_N, accumulator, WARPS
        )
        _store(_weighted(dots, weights, scale), out_ptr, last, limit, entries, C, out_stride, FILL)
        async_copy.wait_group(0)  # no copy may be under way to shared memory that the next block gets
    elif FILL:
        hidden = gl.full([BLOCK_N], float("-inf"), gl.float32, by_key)
        for step in range(last - first + 1):
            row = (first + step).to(gl.int64)
            gl.store(out_ptr + row * out_stride + entries, hidden, entries < C)


def why_not(q: Tensor) -> str | None:
    """Why this kernel cannot run on queries (T, H, 128); None if it can."""
    if not triton.__version__.startswith(TRITON):
        return f"Triton is {triton.__version__}, not {TRITON}x"
    if q.device.type != "cuda":
        return f"device is {q.device.type}"
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        return f"compute capability is {torch.cuda.get_device_capability(q.device)}, not (9, 0)"
    if q.data_ptr() % 16:
        return "q does not start at a multiple of 16 bytes"
    return None if q.shape[1] == HEADS else f"{q.shape[1]} heads, not {HEADS}"


def launch(
    q: Tensor, k: Tensor, key_scale: Tensor, weights: Tensor, limits: Tensor, out: Tensor, *, fill: bool
) -> None:
    """Launch on checked arguments of :func:`kernels.index_logits.kernel.index_logits`, T and C at least 1."""
    T, C = out.shape
    _prefill_hopper_kernel[(triton.cdiv(C, 32 * WARPS), triton.cdiv(T, STEPS))](
        q,
        k,
        key_scale,
        weights,
        limits,
        out,
        T,
        C,
        out.stride(0),
        FILL=fill,
        STEPS=STEPS,
        WARPS=WARPS,
        num_warps=WARPS,
    )


def builds(sizes: Sizes) -> list[Build]:
    """The one specialisation of a model with these heads."""
    if (sizes.index_n_heads, sizes.index_head_dim) != (HEADS, HEAD_DIM):
        return []
    return [
        Build(
            name=f"index_logits/prefill_hopper/{sizes.name}",
            kernel=_prefill_hopper_kernel,
            signature={
                "q_ptr": "*fp8e4nv",
                "key_ptr": "*fp8e4nv",
                "key_scale_ptr": "*fp32",
                "weight_ptr": "*fp32",
                "limit_ptr": "*i32",
                "out_ptr": "*fp32",
                "T": "i32",
                "C": "i32",
                "out_stride": "i32",
            },
            constants={"FILL": False, "STEPS": STEPS, "WARPS": WARPS},
            aligned=(
                "q_ptr",
                "key_ptr",
                "key_scale_ptr",
                "weight_ptr",
                "limit_ptr",
                "out_ptr",
                "C",
                "out_stride",
            ),
            options={"num_warps": WARPS},
            native=("fp8",),
            only=("sm_90a",),
        )
    ]
