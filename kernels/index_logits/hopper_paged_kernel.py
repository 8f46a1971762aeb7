"""Decode's weighted-ReLU MQA logits over pages for Hopper, Gluon; the same meaning as fp8_kernel.py's, its fallback.

Written for Triton 3.6 (Gluon changes between versions) and built for sm_90 only; the interpreter does not run it.

One block a multiprocessor walks its share of the tiles of 64 keys that all rows see, row after row, so that no
multiprocessor waits for another whatever the rows' lengths are. One warp group copies: a row's query, then its tiles,
as many ahead as there are stages, which keeps the memory busy whatever the others do. Three warp groups take turns at
the tiles: product on the tensor cores, ReLU, weights, sum over heads, scales.

Who may touch a stage, and what orders it: every copying thread arrives at the stage's ``full`` when its copies have
landed (cp.async), 128 in all; the group whose turn it is waits there, fences what was copied for the tensor cores and
multiplies. Its warps meet when the product is done and the scales are read, and one thread arrives at ``empty``, where
the copying group waits before it fills the stage again. A query's two places are handed over in the same way, by all
three groups.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.build_spec import Build, Sizes
from kernels.index_logits import hopper_kernel

STAGES = 16  # of 64 keys: 132 KB
MOST_ROWS = 4096  # whose limits every block reads
TILE = 64
KEEP_NAN = gl.constexpr(triton.language.PropagateNan.ALL)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _share(limit_ptr, rows, C, ROWS: gl.constexpr):
    """Tiles [begin, end) of this block, of all rows' in a line; the row of the first, and its place in that row."""
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.arange(0, ROWS, line)
    limits = gl.minimum(gl.load(limit_ptr + row, row < rows, other=0), C)
    tiles = (gl.maximum(limits, 0) + 63) // 64
    upto = gl.associative_scan(tiles, 0, _plus)
    total = gl.sum(tiles, 0)
    share = (total + gl.num_programs(0) - 1) // gl.num_programs(0)
    begin = gl.minimum(gl.program_id(0) * share, total)
    before = upto <= begin
    return (
        begin,
        gl.minimum(begin + share, total),
        gl.sum(before.to(gl.int32), 0),
        begin - gl.sum(gl.where(before, tiles, 0), 0),
    )


@gluon.jit
def _ordered(score, present):
    """:func:`kernels.index_topk.order_kernel.ordered`, which Gluon cannot call."""
    bits = (score + 0.0).to(gl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) | -0x80000000)).to(gl.uint32, bitcast=True)
    key = gl.where(score == score, key, 0xFFFFFFFF)
    return gl.where(present, key, 0).to(gl.uint32)


@gluon.jit
def _score(
    turn: gl.constexpr,
    shared,
    work,
    call,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    RUN: gl.constexpr,
):
    """Score every third tile of the share."""
    keys, scales, queries, full, empty, query_full, query_empty = shared
    weight_ptr, limit_ptr, out_ptr, best_ptr, C, out_stride, runs = call
    begin, end, row, first = work
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    lane = gl.arange(0, 64, gl.SliceLayout(1, accumulator))
    head = gl.arange(0, 64, gl.SliceLayout(0, accumulator))
    zeros = gl.zeros([64, 64], gl.float32, accumulator)
    at = begin
    met = 0  # rows with tiles so far: their queries alternate between two places
    while at < end:
        limit = gl.minimum(gl.load(limit_ptr + row), C)
        count = gl.minimum((limit + 63) // 64 - first, end - at)
        if count > 0:
            weights = gl.load(weight_ptr + row.to(gl.int64) * 64 + head)
            row_ptr = out_ptr + row.to(gl.int64) * out_stride
            done = at - begin
            mbarrier.wait(query_full.index(met & 1), (met >> 1) & 1)
            fence_async_shared()
            for step in range((turn - done % GROUPS + GROUPS) % GROUPS, count, GROUPS):
                stage = (done + step) % STAGES
                mbarrier.wait(full.index(stage), ((done + step) // STAGES) & 1)
                fence_async_shared()
                query = queries.index(met & 1).permute((1, 0))
                dots = warpgroup_mma(keys.index(stage), query, zeros, use_acc=False, is_async=True)
                scale = scales.index(stage).load(gl.SliceLayout(1, accumulator))
                dots = warpgroup_mma_wait(0, deps=(dots,))
                mbarrier.arrive(empty.index(stage))
                dots = gl.maximum(dots, 0.0, propagate_nan=KEEP_NAN)
                score = gl.sum(dots * weights[None, :], 1) * scale
                entry = (first + step) * 64 + lane
                gl.store(row_ptr + entry, score, entry < limit)
                if RUN:
                    best = gl.max(gl.reshape(_ordered(score, entry < limit), [64 // RUN, RUN]), 1)
                    run = (first + step) * (64 // RUN) + gl.arange(0, 64 // RUN, best.type.layout)
                    best_at = best_ptr + row.to(gl.int64) * runs + run
                    gl.store(best_at, best.to(gl.int32, bitcast=True), run < runs)
            mbarrier.arrive(query_empty.index(met & 1))
            met += 1
        at += gl.maximum(count, 0)
        row += 1
        first = first * 0


@gluon.jit
def _copy(
    shared,
    work,
    call,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy the share's queries and tiles, in order."""
    keys, scales, queries, full, empty, query_full, query_empty = shared
    q_ptr, page_ptr, scale_ptr, table_ptr, limit_ptr, C, N, page_stride, table_stride = call
    begin, end, row, first = work
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, wide))
    inside = rows[:, None] * 128 + gl.arange(0, 128, gl.SliceLayout(0, wide))[None, :]
    slot = gl.arange(0, 64, line)
    at = begin
    met = 0
    while at < end:
        limit = gl.minimum(gl.load(limit_ptr + row), C)
        count = gl.minimum((limit + 63) // 64 - first, end - at)
        if count > 0:
            mbarrier.wait(query_empty.index(met & 1), ((met >> 1) & 1) ^ 1)
            async_copy.async_copy_global_to_shared(
                queries.index(met & 1), q_ptr + row.to(gl.int64) * 8192 + inside
            )
            async_copy.mbarrier_arrive(query_full.index(met & 1), increment_count=False)
            row_table = table_ptr + (row // N).to(gl.int64) * table_stride
            page = gl.load(row_table + first * 64 // PAGE)
            for step in range(count):
                nth = at - begin + step
                stage = nth % STAGES
                start = page.to(gl.int64) * page_stride  # outgrows int32 in a large pool
                within = (first + step) * 64 % PAGE
                ahead = gl.minimum(first + step + 1, first + count - 1)
                page = gl.load(row_table + ahead * 64 // PAGE)  # the next tile's page, one tile early
                mbarrier.wait(empty.index(stage), ((nth // STAGES) & 1) ^ 1)
                async_copy.async_copy_global_to_shared(
                    keys.index(stage), page_ptr + start + within * 128 + inside
                )
                async_copy.async_copy_global_to_shared(
                    scales.index(stage), scale_ptr + start // 4 + PAGE * 32 + within + slot
                )
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            met += 1
        at += gl.maximum(count, 0)
        row += 1
        first = first * 0


@gluon.jit
def _paged_hopper_kernel(
    q_ptr,
    page_ptr,
    scale_ptr,
    table_ptr,
    weight_ptr,
    limit_ptr,
    out_ptr,
    best_ptr,
    rows,
    N,
    C,
    page_stride,
    table_stride,
    out_stride,
    runs,
    ROWS: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    RUN: gl.constexpr,
):
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    keys = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], shared)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 64], plain)
    queries = gl.allocate_shared_memory(gl.float8e4nv, [2, 64, 128], shared)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    query_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    query_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=128)  # every thread of the copying group
        mbarrier.init(empty.index(stage), count=1)  # the group whose turn it was
    for place in gl.static_range(2):
        mbarrier.init(query_full.index(place), count=128)
        mbarrier.init(query_empty.index(place), count=3)  # all groups
    fence_async_shared()
    gl.thread_barrier()
    work = _share(limit_ptr, rows, C, ROWS)
    kept = (keys, scales, queries, full, empty, query_full, query_empty)
    to = (weight_ptr, limit_ptr, out_ptr, best_ptr, C, out_stride, runs)
    source = (q_ptr, page_ptr, scale_ptr, table_ptr, limit_ptr, C, N, page_stride, table_stride)
    gl.warp_specialize(
        [
            (_score, (0, kept, work, to, 3, STAGES, RUN)),
            (_score, (1, kept, work, to, 3, STAGES, RUN)),
            (_score, (2, kept, work, to, 3, STAGES, RUN)),
            (_copy, (kept, work, source, PAGE, STAGES)),
        ],
        [4, 4, 4],
        [144, 144, 64],
    )


def why_not(q: Tensor, page_size: int, *, fill: bool) -> str | None:
    """Why this kernel cannot run on queries (B, N, H, 128) over such pages; None if it can."""
    B, N, H = q.shape[:3]
    if fill:
        return "hidden entries are to be filled"
    if page_size % TILE:
        return f"pages of {page_size} entries, no multiple of {TILE}"
    if B * N > MOST_ROWS:
        return f"{B * N} rows, over {MOST_ROWS}"
    return hopper_kernel.why_not(q.view(B * N, H, -1))


def launch(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    page_table: Tensor,
    weights: Tensor,
    limits: Tensor,
    out: Tensor,
    best: Tensor | None,
    *,
    page_size: int,
    run: int,
) -> None:
    """Launch on checked arguments of :func:`kernels.index_logits.kernel.paged_index_logits`.

    ``pages`` are seen as float8_e4m3fn and as FP32.
    """
    B, N, width = out.shape
    codes, scales = pages
    blocks = torch.cuda.get_device_properties(q.device).multi_processor_count
    _paged_hopper_kernel[(blocks,)](
        q,
        codes,
        scales,
        page_table,
        weights,
        limits,
        out,
        limits if best is None else best,
        B * N,
        N,
        width,
        codes.stride(0),
        page_table.stride(0),
        out.stride(1),
        0 if best is None else best.shape[1],
        ROWS=max(128, triton.next_power_of_2(B * N)),
        PAGE=page_size,
        STAGES=STAGES,
        RUN=0 if best is None else run,
        num_warps=4,
    )


def builds(sizes: Sizes) -> list[Build]:
    """Decode of a model with these heads, with and without the runs' best."""
    if (sizes.index_n_heads, sizes.index_head_dim) != (hopper_kernel.HEADS, hopper_kernel.HEAD_DIM):
        return []
    pointers = {
        "q_ptr": "*fp8e4nv",
        "page_ptr": "*fp8e4nv",
        "scale_ptr": "*fp32",
        "table_ptr": "*i32",
        "weight_ptr": "*fp32",
        "limit_ptr": "*i32",
        "out_ptr": "*fp32",
        "best_ptr": "*i32",
    }
    sizes_of = ("rows", "N", "C", "page_stride", "table_stride", "out_stride", "runs")
    return [
        Build(
            name=f"index_logits/decode_hopper_{'runs' if run else 'scores'}/{sizes.name}",
            kernel=_paged_hopper_kernel,
            signature={**pointers, **dict.fromkeys(sizes_of, "i32")},
            constants={"ROWS": 256, "PAGE": 64, "STAGES": STAGES, "RUN": run},
            aligned=(*pointers, "C", "page_stride", "table_stride", "out_stride", "runs"),
            options={"num_warps": 4},
            native=("fp8",),
            only=("sm_90a",),
        )
        for run in (0, 8)
    ]
