"""Attention over gathered BF16 keys for Hopper, Gluon: B0 on sm_90, four warp groups of one block a multiprocessor.

The same meaning as bf16_kernel.py over a buffer at head_dim 512 with BF16 results; that file is the fallback, where
Triton computes all scores in each of two warp groups: on an H200 (2026-11-30) 49.9 us against 31.9 for 128 rows of 64
heads and 640 keys. Written for Triton 3.6 and built for sm_90 only; the interpreter does not run it.

A block owns 64 heads of one row and one split of its keys, 64 keys a step: the scores group makes S = q K^T, the
softmax in base 2 and P (BF16, shared memory); two values groups own 256 columns of the result each, O += P V; the
producer copies keys, 16 bytes at a time, two tiles ahead. Who may touch what in shared memory, and the barrier that
orders it (arrivals in brackets):

* key tiles: producer -> all by ``full`` [128 of the copies, 1 after the stores of what masks keys]; back by
  ``empty`` [3: each group, its products complete]. wgmma reads what the generic proxy wrote: readers fence.
* P, shrink: scores -> values by ``p_full`` [1: after a fence by every writing thread and a barrier of the group];
  back by ``p_empty`` [2: products complete]. Two buffers.
* reciprocal sums: scores -> values by ``sums_full`` [1], after the last S (one step past the end, of a tile that
  nobody writes; dropped). Then only a values group reads the key tiles of its columns: it puts its output there.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import allocate_shared_memory
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.overlap import overlap
from kernels.sparse_attn.hopper_layouts_kernel import (
    LOG2E,
    MASKED,
    column_layout,
    line_layout,
    tile_layout,
)
from kernels.sparse_attn.hopper_softmax_kernel import (
    arrive,
    block_of,
    end_sums,
    next_of,
    put_weights,
    start_barriers,
    start_sums,
    step_sums,
)
from kernels.sparse_attn.tiles import BLOCK, check_hopper


@gluon.constexpr_function
def _copy_layout():
    return gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])


@gluon.constexpr_function
def _accumulator(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _dots(q, keys, stage):
    """Issue S = q K^T; not waited for."""
    dots = gl.zeros([64, 64], gl.float32, _accumulator(64))
    dots = warpgroup_mma(q[0], keys[0].index(stage).permute((1, 0)), dots, use_acc=False, is_async=True)
    for part in gl.static_range(3):
        dots = warpgroup_mma(q[part + 1], keys[part + 1].index(stage).permute((1, 0)), dots, is_async=True)
    return dots


@gluon.jit
def _scores(
    q_ptr,
    sinks_ptr,
    lse_ptr,
    lse_at,
    heads_left,
    head_of_tile,
    factor,
    steps,
    keys,
    q,
    p,
    shrinks,
    sums,
    columns,
    bars,
    STAGES: gl.constexpr,
):
    full, empty, p_full, p_empty, sums_full = bars
    layout: gl.constexpr = _accumulator(64)
    by_key: gl.constexpr = gl.SliceLayout(0, layout)
    wide: gl.constexpr = _copy_layout()
    row = gl.arange(0, 64, gl.SliceLayout(1, wide))[:, None]
    word = gl.arange(0, 128, gl.SliceLayout(0, wide))[None, :]
    for part in gl.static_range(4):
        async_copy.async_copy_global_to_shared(
            q[part], q_ptr + row * 512 + part * 128 + word, row < heads_left
        )
    async_copy.commit_group()
    peak, total = start_sums(layout)
    async_copy.wait_group(0)
    mbarrier.wait(full.index(0), 0)
    fence_async_shared()
    gl.thread_barrier()
    dots = _dots(q, keys, 0)
    column = columns.index(0).load(by_key)
    dots = warpgroup_mma_wait(0, deps=(dots,))
    arrive(empty.index(0))
    stage = 0
    phase = 0
    for step in range(steps):
        dots = dots + column[None, :]
        weights, shrink, peak, total = step_sums(dots, factor, factor, peak, total)
        put_weights(p, shrinks, p_empty, weights, shrink, step)
        next_stage, next_phase = next_of(stage, phase, STAGES)
        arrive(p_full.index(step & 1))
        if step + 1 < steps:
            mbarrier.wait(full.index(next_stage), next_phase)
            fence_async_shared()
        dots = _dots(q, keys, next_stage)
        column = columns.index(next_stage).load(by_key)
        dots = warpgroup_mma_wait(0, deps=(dots,))
        arrive(empty.index(next_stage))
        stage = next_stage
        phase = next_phase
    end_sums(peak, total, sums, sums_full, sinks_ptr, lse_ptr, lse_at, head_of_tile, heads_left)


@gluon.jit
def _values(
    out_ptr, heads_left, steps, keys, p, shrinks, sums, bars, WHICH: gl.constexpr, STAGES: gl.constexpr
):
    full, empty, p_full, p_empty, sums_full = bars
    layout: gl.constexpr = _accumulator(128)
    by_head: gl.constexpr = gl.SliceLayout(1, layout)
    low = gl.zeros([64, 128], gl.float32, layout)
    high = gl.zeros([64, 128], gl.float32, layout)
    stage = 0
    phase = 0
    for step in range(steps):
        buffer = step & 1
        mbarrier.wait(full.index(stage), phase)
        mbarrier.wait(p_full.index(buffer), (step >> 1) & 1)
        fence_async_shared()
        shrink = shrinks.index(buffer).load(by_head)
        if gl.min(shrink, 0) < 1.0:
            low = low * shrink[:, None]
            high = high * shrink[:, None]
        low = warpgroup_mma(p.index(buffer), keys[2 * WHICH].index(stage), low, is_async=True)
        high = warpgroup_mma(p.index(buffer), keys[2 * WHICH + 1].index(stage), high, is_async=True)
        low, high = warpgroup_mma_wait(0, deps=(low, high))
        arrive(empty.index(stage))
        arrive(p_empty.index(buffer))
        stage, phase = next_of(stage, phase, STAGES)
    mbarrier.wait(sums_full, 0)
    inverse = sums.load(by_head)[:, None]
    keys[2 * WHICH].index(0).store((low * inverse).to(gl.bfloat16))
    keys[2 * WHICH + 1].index(0).store((high * inverse).to(gl.bfloat16))
    gl.thread_barrier()
    wide: gl.constexpr = _copy_layout()
    head = gl.arange(0, 64, gl.SliceLayout(1, wide))[:, None]
    column = gl.arange(0, 128, gl.SliceLayout(0, wide))[None, :]
    for part in gl.static_range(2):
        at = out_ptr + head * 512 + (2 * WHICH + part) * 128 + column
        gl.store(at, keys[2 * WHICH + part].index(0).load(wide), mask=head < heads_left)


@gluon.jit
def _producer(keys_ptr, idx_ptr, num_keys, steps, keys, columns, bars, STAGES: gl.constexpr):
    full, empty, _p_full, _p_empty, _sums_full = bars
    wide: gl.constexpr = _copy_layout()
    line: gl.constexpr = line_layout()
    row = gl.arange(0, 64, gl.SliceLayout(1, wide))[:, None]
    word = gl.arange(0, 128, gl.SliceLayout(0, wide))[None, :]
    key_line = gl.arange(0, 64, line)
    stage = 0
    phase = 1
    for step in range(steps):
        slot = gl.load(idx_ptr + step * 64 + key_line, mask=step * 64 + key_line < num_keys, other=-1)
        left = num_keys - step * 64
        source = keys_ptr + step * (64 * 512) + row * 512 + word
        mbarrier.wait(empty.index(stage), phase)
        for part in gl.static_range(4):
            async_copy.async_copy_global_to_shared(keys[part].index(stage), source + part * 128, row < left)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        columns.index(stage).store(gl.where(slot >= 0, 0.0, MASKED))
        arrive(full.index(stage))
        stage, phase = next_of(stage, phase, STAGES)


@gluon.jit
def attend_gathered_hopper_kernel(
    q_ptr,
    keys_ptr,
    idx_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    q_stride,
    heads,
    num_keys,
    factor,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid (T * head tiles, splits), 4 warps."""
    if PDL:
        gdc_launch_dependents()
    tile: gl.constexpr = tile_layout()
    line: gl.constexpr = column_layout()
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    row, head_of_tile, low, steps, written = block_of(heads, num_keys)
    k0 = allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], tile)
    k1 = allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], tile)
    k2 = allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], tile)
    k3 = allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], tile)
    keys = (k0, k1, k2, k3)
    q0 = allocate_shared_memory(gl.bfloat16, [64, 128], tile)
    q1 = allocate_shared_memory(gl.bfloat16, [64, 128], tile)
    q2 = allocate_shared_memory(gl.bfloat16, [64, 128], tile)
    q3 = allocate_shared_memory(gl.bfloat16, [64, 128], tile)
    q = (q0, q1, q2, q3)
    p = allocate_shared_memory(gl.bfloat16, [2, 64, 64], tile)
    shrinks = allocate_shared_memory(gl.float32, [2, 64], line)
    sums = allocate_shared_memory(gl.float32, [64], line)
    columns = allocate_shared_memory(gl.float32, [STAGES, 64], line)
    full = allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    p_full = allocate_shared_memory(gl.int64, [2, 1], barrier)
    p_empty = allocate_shared_memory(gl.int64, [2, 1], barrier)
    sums_full = allocate_shared_memory(gl.int64, [1], barrier)
    start_barriers(full, empty, p_full, p_empty, sums_full, STAGES, True)
    fence_async_shared()
    gl.thread_barrier()
    if PDL:
        gdc_wait()
    bars = (full, empty, p_full, p_empty, sums_full)
    heads_left = heads - head_of_tile
    idx = idx_ptr + row * num_keys + low * 64
    gathered = keys_ptr + (row * num_keys + low * 64) * 512
    out = out_ptr + written * 512
    q_rows = q_ptr + row * q_stride + head_of_tile * 512
    given = (q_rows, sinks_ptr, lse_ptr, written, heads_left, head_of_tile, factor, steps)
    shared = (keys, q, p, shrinks, sums, columns, bars)
    gl.warp_specialize(
        [
            (_scores, given + shared + (STAGES,)),  # in a variable a constexpr is none
            (_values, (out, heads_left, steps, keys, p, shrinks, sums, bars, 0, STAGES)),
            (_values, (out, heads_left, steps, keys, p, shrinks, sums, bars, 1, STAGES)),
            (_producer, (gathered, idx, num_keys - low * 64, steps, keys, columns, bars, STAGES)),
        ],
        [4, 4, 4],
        [160, 160, 56],
    )


def launch(
    q: Tensor,
    keys: Tensor,
    idx: Tensor,
    sinks: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    splits: int,
) -> None:
    """Write ``out`` and ``lse`` (parts if splits > 1); arguments as of ``sparse_attn_gathered`` in kernel.py.

    Raises
    ------
    ValueError
        More splits than 64-key tiles, no keys, an ``out`` that is not BF16, a q that is not aligned.
    """
    rows, heads, _ = q.shape
    num_keys = idx.shape[1]
    check_hopper("sparse_attn_gathered", out, splits, num_keys)
    if q.data_ptr() % 16 or q.stride(0) % 8 or keys.data_ptr() % 16:
        raise ValueError("sparse_attn_gathered: rows of q, or keys, do not start at multiples of 16 bytes")
    attend_gathered_hopper_kernel[(rows * triton.cdiv(heads, BLOCK), splits)](
        q,
        keys,
        idx,
        sinks,
        out,
        lse,
        q.stride(0),
        heads,
        num_keys,
        scale * float(LOG2E.value),
        STAGES=2,
        num_warps=4,
        **overlap(q.device),
    )
