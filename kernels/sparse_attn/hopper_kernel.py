"""Attention with FP8 operands for Hopper, Gluon: B1 on sm_90, four warp groups of one block a multiprocessor.

The same meaning as fp8_kernel.py at head_dim 512, for slots in BF16-rope, BF16-PV calls; that file is the fallback.
Written for Triton 3.6 (Gluon changes between versions) and built for sm_90 only; the interpreter does not run it.

A block owns 64 heads of one row and one split of its keys, 64 keys a step:

==========  ==============================================================================================
group       work
==========  ==============================================================================================
scores      S = q_rope k_rope (BF16), then 14 e4m3 products; softmax in base 2; P (BF16) to shared memory
values 1,2  O^T += V^T P^T for nope groups 0-3, and for groups 4-6 and rope: V^T is read from the FP8 tile by a
            transposing load and turned into BF16 in the registers of operand A, value * 2^-120, by moving bits
producer    16-byte asynchronous copies of keys (zeros for no key) and scales into ``stages`` tiles
==========  ==============================================================================================

Two records. Aligned: a token's scale times 2^60 multiplies its scores and joins P. Seven scales: each group's dots
are added under the keys' scales, and V^T is multiplied, in BF16 and exactly, by scale * 2^60 as it is turned.

Who may touch what in shared memory, and the barrier that orders it (arrivals in brackets):

* key tiles, scales: producer -> all by ``full`` [128 of the copies; seven scales: 1 more, after a barrier of the
  producer's warps, for scales written by ordinary stores]; back by ``empty`` [3: each group after its last read,
  products complete]. wgmma reads what the generic proxy wrote: each reader fences after its wait.
* P, shrink: scores -> values by ``p_full`` [1: after a fence by every writing thread and a barrier of the group];
  back by ``p_empty`` [2: after all products of the step are complete]. Two buffers.
* q: copied and read by the scores group alone: wait for the copies, fence, barrier of the group.
* reciprocal sums: scores -> values by ``sums_full`` [1], sent after the last S is complete, so no product of that
  group still reads a key tile. That last S (one step past the end) reads a tile that nobody writes; it is dropped.
* key tiles as output tiles: a values group arrives at ``done`` [2] after its own last product and transposing load
  and after ``sums_full``; past ``done`` nobody reads keys, and the producer's last copy was waited for by all. Each
  group then writes and reads tiles of its own stage (0 or 1) only, with its own barrier between.
"""

import torch
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

TRITON = "3.6."
BLOCK = 64  # heads, and keys a step
WORDS = gl.constexpr(288)  # BF16-sized words of a record's data: 224 of nope, 64 of rope
NOPE_WORDS = gl.constexpr(224)
SHIFT = gl.constexpr(1.152921504606847e18)  # 2^60: keeps value * 2^-120 * scale far from FP32's ends
UNSHIFT = gl.constexpr(8.673617379884035e-19)  # 2^-60
MASKED = gl.constexpr(-1e35)  # dwarfs scores times 2^60, and is finite after any head's factor
FLOOR = gl.constexpr(
    -1e4
)  # where the running maximum starts: a sane number, so that masked - it rounds to masked
LAZY = gl.constexpr(8.0)  # the sums are rescaled only when a maximum grows by more than 2^8
TINY = gl.constexpr(1e-37)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

# int16 = e4m3 of (d even, d odd) of one key; a 32-bit register = two keys -> two pairs of BF16, value * 2^-120
WIDEN = gl.constexpr("""{ .reg .b32 a, t, u, v;
 shl.b32 t, $2, 4; shl.b32 a, $2, 8; and.b32 a, a, 0x80008000;
 shr.b32 u, $2, 4; and.b32 v, $2, 0x80008000;
 lop3.b32 $0, t, 0x07f007f0, a, 0xEA; lop3.b32 $1, u, 0x07f007f0, v, 0xEA; }""")
# the same, times the two keys' scales: BF16 powers of two, exact
WIDEN_SCALED = gl.constexpr("""{ .reg .b32 a, t, u, v;
 shl.b32 t, $2, 4; shl.b32 a, $2, 8; and.b32 a, a, 0x80008000;
 shr.b32 u, $2, 4; and.b32 v, $2, 0x80008000;
 lop3.b32 t, t, 0x07f007f0, a, 0xEA; lop3.b32 u, u, 0x07f007f0, v, 0xEA;
 mul.rn.bf16x2 $0, t, $3; mul.rn.bf16x2 $1, u, $3; }""")


@gluon.constexpr_function
def _tile_layout():
    return gl.NVMMASharedLayout(128, 16, 2)


@gluon.constexpr_function
def _half_layout():
    return gl.NVMMASharedLayout(64, 16, 2)


@gluon.constexpr_function
def _column_layout():
    """Values of 64 keys, so that a thread's columns 8 i + 2 q + {0, 1} are one conflict-free 16-byte load a four."""
    return gl.SharedLinearLayout([[1], [8], [2], [4], [16], [32]], [], 16)


@gluon.constexpr_function
def _copy_layout():
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def _half_copy_layout():
    return gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])


@gluon.constexpr_function
def _line_layout():
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.constexpr_function
def _accumulator(depth):
    """Layout of a 64 x 64 product; wgmma's depth (16 for BF16, 32 for e4m3) is part of it."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, depth])


@gluon.constexpr_function
def _half_accumulator(depth):
    """The same of a 64 x 32 product."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, depth])


@gluon.constexpr_function
def _pairs_layout():
    """[32 pairs of d, 64 keys] as a transposing load of 16-bit units leaves them."""
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32]], lanes, [[8, 0], [16, 0]], [], [32, 64]
    )


@gluon.constexpr_function
def _output_layout():
    """The same of a product's rows: [32 pairs of d, 64 heads, 2]."""
    registers = [[0, 0, 1], [0, 1, 0], [0, 8, 0], [0, 16, 0], [0, 32, 0]]
    lanes = [[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0, 0], [16, 0, 0]], [], [32, 64, 2])


@gluon.jit
def _values_raw(keys, stage, group: gl.constexpr):
    """V^T of 64 nope values as stored: [32 pairs of d, 64 keys] int16."""
    if group == 6:
        tile = keys[4].index(stage)._reinterpret(gl.int16, [64, 32], _half_layout())
        return tile.permute((1, 0)).load(_pairs_layout())
    else:
        tile = keys[group // 2].index(stage)._reinterpret(gl.int16, [64, 64], _tile_layout())
        return tile.slice(32 * (group % 2), 32, 1).permute((1, 0)).load(_pairs_layout())


@gluon.jit
def _values_wide(raw, scales, stage, group: gl.constexpr, operand: gl.constexpr, SEVEN: gl.constexpr):
    """-> [64 d, 64 keys] BF16 in operand A's registers; no data moves: row 16 w + 8 e + g is d = 2 (8 w + g) + e."""
    if SEVEN:
        scale = scales[group].index(stage).load(gl.SliceLayout(0, _pairs_layout()))
        scale, raw = gl.broadcast(scale[None, :], raw)
        even, odd = gl.inline_asm_elementwise(
            WIDEN_SCALED, "=r,=r,r,r", [raw, scale], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        even, odd = gl.inline_asm_elementwise(
            WIDEN, "=r,=r,r", [raw], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    rows = gl.join(even, odd).reshape([4, 8, 64, 2]).permute(0, 3, 1, 2).reshape([64, 64])
    return gl.convert_layout(rows, operand, assert_trivial=True)


@gluon.jit
def _rope_dots(q_rope, keys, stage):
    """Rope part of S, complete, in the layout of e4m3 products."""
    zeros = gl.zeros([64, 64], gl.float32, _accumulator(16))
    dots = warpgroup_mma(q_rope, keys[3].index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    # a product in flight cannot change between BF16 and e4m3: wgmma's depth is part of its layout
    dots = warpgroup_mma_wait(0, deps=(dots,))
    return gl.convert_layout(dots, _accumulator(32), assert_trivial=True)


@gluon.jit
def _nope_tile(tiles, at, tile: gl.constexpr):
    """Tile 0-2 (128 values) or 3 (the last 64) of q or K as e4m3."""
    if tile == 3:
        return tiles[3].index(at)._reinterpret(gl.float8e4nv, [64, 64], gl.NVMMASharedLayout(64, 8, 2))
    else:
        return tiles[tile].index(at)._reinterpret(gl.float8e4nv, [64, 128], gl.NVMMASharedLayout(128, 8, 2))


@gluon.jit
def _nope_group(tiles, at, group: gl.constexpr):
    """Nope group 0-6 (64 values) of q or K as e4m3."""
    if group == 6:
        return _nope_tile(tiles, at, 3)
    else:
        return _nope_tile(tiles, at, group // 2).slice(64 * (group % 2), 64, 1)


@gluon.jit
def _nope_dots(dots, q, nope, term: gl.constexpr, stage):
    """Issue S += q K^T over all nope values; not waited for."""
    for tile in gl.static_range(4):
        k = _nope_tile(nope, stage, tile).permute((1, 0))
        dots = warpgroup_mma(_nope_tile(q, term, tile), k, dots, is_async=True)
    return dots


@gluon.jit
def _group_dots(q_rope, q, keys, nope, scales, stage, never, TERMS: gl.constexpr):
    """S = q_rope k_rope + sum over groups of (q K^T of the group) * scale of (key, group); complete.

    In halves of 32 keys, so that one half's product is in flight while the other's is added: two products of 64 x 64
    beside S do not fit this group's registers. ``never`` is false, which ptxas must not know: told that a product
    starts from zero, it gives each one registers of its own, runs out, and serialises the whole kernel's products.
    """
    layout: gl.constexpr = _half_accumulator(32)
    low = _half_rope_dots(q_rope, keys, stage, 0)
    high = _half_rope_dots(q_rope, keys, stage, 1)
    even = _issue_group(q, nope, gl.zeros([64, 32], gl.float32, layout), stage, never, 0, TERMS)
    odd = gl.zeros([64, 32], gl.float32, layout)
    for group in gl.static_range(7):
        odd = _issue_group(q, nope, odd, stage, never, 2 * group + 1, TERMS)
        scale = scales[group].index(stage).slice(0, 32, 0).load(gl.SliceLayout(0, layout))
        even = warpgroup_mma_wait(TERMS, deps=(even,))
        low = low + even * scale[None, :]
        if group < 6:
            even = _issue_group(q, nope, even, stage, never, 2 * group + 2, TERMS)
        scale = scales[group].index(stage).slice(32, 32, 0).load(gl.SliceLayout(0, layout))
        odd = warpgroup_mma_wait(TERMS if group < 6 else 0, deps=(odd,))
        high = high + odd * scale[None, :]
    whole = gl.join(low, high).permute(0, 2, 1).reshape([64, 64])
    whole = gl.convert_layout(whole, _accumulator(32), assert_trivial=True)
    # LLVM would move the adding into the softmax that follows both calls, and keep 14 products and 112 scales alive
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [whole], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _half_rope_dots(q_rope, keys, stage, HALF: gl.constexpr):
    """Rope part of S over half of the keys, [64, 32], complete."""
    zeros = gl.zeros([64, 32], gl.float32, _half_accumulator(16))
    k = keys[3].index(stage).slice(32 * HALF, 32, 0).permute((1, 0))
    dots = warpgroup_mma(q_rope, k, zeros, use_acc=False, is_async=True)
    dots = warpgroup_mma_wait(0, deps=(dots,))
    return gl.convert_layout(dots, _half_accumulator(32), assert_trivial=True)


@gluon.jit
def _issue_group(q, nope, part, stage, never, unit: gl.constexpr, TERMS: gl.constexpr):
    """Issue q K^T of group ``unit // 2`` over half ``unit % 2`` of the keys, [64, 32], into ``part``'s registers."""
    k = _nope_group(nope, stage, unit // 2).slice(32 * (unit % 2), 32, 0).permute((1, 0))
    part = warpgroup_mma(_nope_group(q, 0, unit // 2), k, part, use_acc=never, is_async=True)
    if TERMS == 2:
        part = warpgroup_mma(_nope_group(q, 1, unit // 2), k, part, is_async=True)
    return part


@gluon.jit
def _load_q(q_ptr, residual_ptr, first_head, heads_left, q, q_rope, TERMS: gl.constexpr):
    """Issue the copies of 64 heads' q into shared memory; heads past the last are zeros."""
    wide: gl.constexpr = _copy_layout()
    half: gl.constexpr = _half_copy_layout()
    head = gl.arange(0, 64, gl.SliceLayout(1, wide))[:, None]
    head_half = gl.arange(0, 64, gl.SliceLayout(1, half))[:, None]
    word = gl.arange(0, 64, gl.SliceLayout(0, wide))[None, :]
    word_half = gl.arange(0, 32, gl.SliceLayout(0, half))[None, :] + 192
    for term in gl.static_range(TERMS):
        if term == 0:
            rows = q_ptr + first_head * WORDS + head * WORDS + word
            rows_half = q_ptr + first_head * WORDS + head_half * WORDS + word_half
            async_copy.async_copy_global_to_shared(q_rope, rows + NOPE_WORDS, head < heads_left)
        else:
            rows = residual_ptr + first_head * NOPE_WORDS + head * NOPE_WORDS + word
            rows_half = residual_ptr + first_head * NOPE_WORDS + head_half * NOPE_WORDS + word_half
        for tile in gl.static_range(3):
            async_copy.async_copy_global_to_shared(q[tile].index(term), rows + tile * 64, head < heads_left)
        async_copy.async_copy_global_to_shared(q[3].index(term), rows_half, head_half < heads_left)
    async_copy.commit_group()


@gluon.jit
def _scores(
    q_ptr,
    residual_ptr,
    q_scale_ptr,
    sinks_ptr,
    lse_ptr,
    lse_at,
    first_head,
    head_of_tile,
    heads,
    score_scale,
    steps,
    keys,
    nope,
    q,
    q_rope,
    p,
    shrinks,
    sums,
    factors,
    dot_scales,
    bars,
    STAGES: gl.constexpr,
    PARTIAL: gl.constexpr,
    TERMS: gl.constexpr,
    SEVEN: gl.constexpr,
):
    full, empty, p_full, p_empty, sums_full, _done = bars
    layout: gl.constexpr = _accumulator(32)
    by_head: gl.constexpr = gl.SliceLayout(1, layout)
    by_key: gl.constexpr = gl.SliceLayout(0, layout)
    _load_q(q_ptr, residual_ptr, first_head, heads - head_of_tile, q, q_rope, TERMS)
    head = gl.arange(0, 64, by_head)
    own = head_of_tile + head < heads
    factor = gl.load(q_scale_ptr + first_head + head, mask=own, other=0.0) * score_scale
    peak = gl.full([64], FLOOR, gl.float32, by_head)
    # a thread adds up its own columns and meets its neighbours at the end
    total = gl.sum(gl.sum(gl.zeros([64, 64], gl.float32, layout).reshape([64, 8, 4, 2]), 3), 1)
    of_total: gl.constexpr = total.type.layout
    async_copy.wait_group(0)
    mbarrier.wait(full.index(0), 0)
    fence_async_shared()
    gl.thread_barrier()
    if SEVEN:
        dots = _group_dots(q_rope, q, keys, nope, dot_scales, 0, steps < 0, TERMS)
    else:
        dots = _rope_dots(q_rope, keys, 0)
        dots = _nope_dots(dots, q, nope, 0, 0)
        if TERMS == 2:
            dots = _nope_dots(dots, q, nope, 1, 0)
    column = factors.index(0).load(by_key)
    if not SEVEN:
        dots = warpgroup_mma_wait(0, deps=(dots,))
    stage = 0
    phase = 0
    for step in range(steps):
        buffer = step & 1
        if SEVEN:  # the column holds 0 or MASKED
            dots = dots + column[None, :]
        else:  # the column holds the token's scale, 0 for no key
            column = column * SHIFT
            dots = dots * column[None, :] + gl.where(column == 0, MASKED, 0.0)[None, :]
        highest = gl.max(dots, 1) * factor
        highest = gl.where(highest > peak + LAZY, highest, peak)
        shrink = gl.exp2(peak - highest)
        weights = gl.exp2(dots * factor[:, None] - highest[:, None])
        peak = highest
        kept = total * gl.convert_layout(shrink, gl.SliceLayout(1, of_total), assert_trivial=True)[:, None]
        total = kept + gl.sum(gl.sum(weights.reshape([64, 8, 4, 2]), 3), 1)
        if not SEVEN:
            weights = weights * column[None, :]
        mbarrier.wait(p_empty.index(buffer), ((step >> 1) & 1) ^ 1)
        p.index(buffer).store(weights.to(gl.bfloat16))
        shrinks.index(buffer).store(shrink)
        fence_async_shared()
        next_stage = stage + 1
        next_phase = phase
        if next_stage == STAGES:
            next_stage = 0
            next_phase = phase ^ 1
        if step + 1 < steps:
            mbarrier.wait(full.index(next_stage), next_phase)
            fence_async_shared()
        if SEVEN:  # S has many short products with work between them: P is published first
            mbarrier.arrive(p_full.index(buffer))
            dots = _group_dots(q_rope, q, keys, nope, dot_scales, next_stage, steps < 0, TERMS)
        else:  # the next step's S enters the tensor pipe before P is published
            dots = _rope_dots(q_rope, keys, next_stage)
            dots = _nope_dots(dots, q, nope, 0, next_stage)
            mbarrier.arrive(p_full.index(buffer))
            if TERMS == 2:
                dots = _nope_dots(dots, q, nope, 1, next_stage)
        column = factors.index(next_stage).load(by_key)
        if not SEVEN:
            dots = warpgroup_mma_wait(0, deps=(dots,))
        mbarrier.arrive(empty.index(stage))
        stage = next_stage
        phase = next_phase
    total = gl.convert_layout(gl.sum(total, 1), by_head)
    some = gl.where(total < TINY, TINY, total)  # a NaN stays
    lse = gl.where(total == 0, float("-inf"), peak + gl.log2(some))
    if PARTIAL:
        inverse = 1.0 / some
    else:
        lse = lse * LN2
        sink = gl.load(sinks_ptr + head_of_tile + head, mask=own, other=0.0) * LOG2E
        inverse = 1.0 / (some + gl.exp2(sink - peak))
    gl.store(lse_ptr + lse_at + head, lse, mask=own)
    sums.store(inverse)
    mbarrier.arrive(sums_full)


@gluon.jit
def _put(tile, product, ROPE: gl.constexpr):
    """Store O^T as [head, d] BF16 in shared memory, undoing the order of rows of :func:`_values_wide`."""
    if ROPE:
        tile.permute((1, 0)).store(product.to(gl.bfloat16))
    else:
        pairs = product.reshape([4, 2, 8, 64]).permute(0, 2, 3, 1).reshape([32, 64, 2])
        pairs = gl.convert_layout(pairs, _output_layout()).to(gl.bfloat16)
        tile.store(pairs.permute(1, 0, 2).reshape([64, 64]))


@gluon.jit
def _values(
    out_ptr,
    heads_left,
    steps,
    keys,
    p,
    shrinks,
    sums,
    scales,
    bars,
    WHICH: gl.constexpr,
    STAGES: gl.constexpr,
    SEVEN: gl.constexpr,
):
    """Groups 0-3 (WHICH 0), or 4-6 and rope (WHICH 1), of the output."""
    full, empty, p_full, p_empty, sums_full, done = bars
    layout: gl.constexpr = _accumulator(16)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    first: gl.constexpr = 4 * WHICH
    a0 = gl.zeros([64, 64], gl.float32, layout)
    a1 = gl.zeros([64, 64], gl.float32, layout)
    a2 = gl.zeros([64, 64], gl.float32, layout)
    a3 = gl.zeros([64, 64], gl.float32, layout)
    stage = 0
    phase = 0
    mbarrier.wait(full.index(0), 0)
    if WHICH == 1:
        fence_async_shared()  # rope is an operand in shared memory
    raw0 = _values_raw(keys, 0, first)
    for step in range(steps):
        buffer = step & 1
        raw1 = _values_raw(keys, stage, first + 1)
        wide = _values_wide(raw0, scales, stage, first, operand, SEVEN)
        mbarrier.wait(p_full.index(buffer), (step >> 1) & 1)
        weights = p.index(buffer).permute((1, 0))
        shrink = shrinks.index(buffer).load(gl.SliceLayout(0, layout))
        if gl.min(shrink, 0) < 1.0:
            by = shrink[None, :]
            a0 = a0 * by
            a1 = a1 * by
            a2 = a2 * by
            a3 = a3 * by
        if WHICH == 1:
            d3 = warpgroup_mma(keys[3].index(stage).permute((1, 0)), weights, a3, is_async=True)
        d0 = warpgroup_mma(wide, weights, a0, is_async=True)
        raw2 = _values_raw(
            keys, stage, first + 2
        )  # a raw tile is fetched before the one ahead of it is turned
        d1 = warpgroup_mma(
            _values_wide(raw1, scales, stage, first + 1, operand, SEVEN), weights, a1, is_async=True
        )
        if WHICH == 1:
            a3, a0 = warpgroup_mma_wait(1, deps=(d3, d0))
        else:
            a0 = warpgroup_mma_wait(1, deps=(d0,))
            raw3 = _values_raw(keys, stage, first + 3)
        d2 = warpgroup_mma(
            _values_wide(raw2, scales, stage, first + 2, operand, SEVEN), weights, a2, is_async=True
        )
        a1 = warpgroup_mma_wait(1, deps=(d1,))
        if WHICH == 0:
            d3 = warpgroup_mma(
                _values_wide(raw3, scales, stage, first + 3, operand, SEVEN), weights, a3, is_async=True
            )
            a2 = warpgroup_mma_wait(1, deps=(d2,))
        mbarrier.arrive(
            empty.index(stage)
        )  # operand A is in registers and rope's product complete: keys are free
        stage = stage + 1
        if stage == STAGES:
            stage = 0
            phase = phase ^ 1
        if step + 1 < steps:
            mbarrier.wait(full.index(stage), phase)
            if WHICH == 1:
                fence_async_shared()
        raw0 = _values_raw(keys, stage, first)  # past the end: read, never used
        if WHICH == 0:
            a3 = warpgroup_mma_wait(0, deps=(d3,))
        else:
            a2 = warpgroup_mma_wait(0, deps=(d2,))
        mbarrier.arrive(p_empty.index(buffer))
    mbarrier.wait(sums_full, 0)
    inverse = sums.load(gl.SliceLayout(0, layout))[None, :]
    mbarrier.arrive(done)
    mbarrier.wait(done, 0)
    _put(keys[0].index(WHICH), a0 * SHIFT * inverse, False)
    _put(keys[1].index(WHICH), a1 * SHIFT * inverse, False)
    _put(keys[2].index(WHICH), a2 * SHIFT * inverse, False)
    if WHICH == 0:
        _put(keys[3].index(WHICH), a3 * SHIFT * inverse, False)
    elif SEVEN:
        _put(keys[3].index(WHICH), a3 * inverse, True)
    else:
        _put(keys[3].index(WHICH), a3 * UNSHIFT * inverse, True)  # P carried 2^60 for rope as it is
    gl.thread_barrier()
    wide_copy: gl.constexpr = _copy_layout()
    head = gl.arange(0, 64, gl.SliceLayout(1, wide_copy))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, wide_copy))[None, :]
    for tile in gl.static_range(4):
        values = keys[tile].index(WHICH).load(wide_copy)
        at = out_ptr + head * 512 + (first + tile) * 64 + column
        gl.store(at, values, mask=head < heads_left)


@gluon.jit
def _row_words(slot, page_units, PAGE: gl.constexpr):
    """BF16-sized words from the first page to a slot's data, int64; anything for -1, whose copies are masked."""
    # units of 16 bytes: whatever the stride, the compiler sees that a copy of 16 bytes is aligned
    return (slot // PAGE).to(gl.int64) * page_units * 8 + (slot % PAGE) * WORDS


@gluon.jit
def _producer(
    data_ptr,
    scale_ptr,
    idx_ptr,
    num_keys,
    page_units,
    steps,
    keys,
    factors,
    dot_scales,
    value_scales,
    bars,
    STAGES: gl.constexpr,
    PAGE: gl.constexpr,
    SEVEN: gl.constexpr,
):
    full, empty, _p_full, _p_empty, _sums_full, _done = bars
    wide: gl.constexpr = _copy_layout()
    half: gl.constexpr = _half_copy_layout()
    line: gl.constexpr = _line_layout()
    key = gl.arange(0, 64, gl.SliceLayout(1, wide))
    key_half = gl.arange(0, 64, gl.SliceLayout(1, half))
    key_line = gl.arange(0, 64, line)
    word = gl.arange(0, 64, gl.SliceLayout(0, wide))[None, :]
    word_half = gl.arange(0, 32, gl.SliceLayout(0, half))[None, :] + 192
    slot = gl.load(idx_ptr + key, mask=key < num_keys, other=-1)
    slot_half = gl.load(idx_ptr + key_half, mask=key_half < num_keys, other=-1)
    slot_line = gl.load(idx_ptr + key_line, mask=key_line < num_keys, other=-1)
    stage = 0
    phase = 1
    for step in range(steps):
        rows = data_ptr + _row_words(slot, page_units, PAGE)[:, None] + word
        rows_half = data_ptr + _row_words(slot_half, page_units, PAGE)[:, None] + word_half
        held = (slot >= 0)[:, None]
        held_half = (slot_half >= 0)[:, None]
        held_line = slot_line >= 0
        if SEVEN:  # eight bytes a token, in flight while the stage empties and the keys' copies are issued
            after = (slot_line // PAGE).to(gl.int64) * page_units * 2 + PAGE * 72 + slot_line % PAGE
            bytes8 = gl.load(scale_ptr + after, mask=held_line, other=0)
        mbarrier.wait(empty.index(stage), phase)
        async_copy.async_copy_global_to_shared(keys[3].index(stage), rows + NOPE_WORDS, held)
        for tile in gl.static_range(3):
            async_copy.async_copy_global_to_shared(keys[tile].index(stage), rows + tile * 64, held)
        async_copy.async_copy_global_to_shared(keys[4].index(stage), rows_half, held_half)
        if not SEVEN:
            async_copy.async_copy_global_to_shared(factors.index(stage), scale_ptr + slot_line, held_line)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        if SEVEN:
            factors.index(stage).store(gl.where(held_line, 0.0, MASKED))
            for group in gl.static_range(7):
                byte = ((bytes8 >> (8 * group)) & 0xFF).to(gl.int32)
                bits = gl.where(byte == 255, 0x7FC00000, gl.maximum(byte << 23, 0x400000))
                dot_scales[group].index(stage).store(bits.to(gl.float32, bitcast=True))
                high = gl.where(byte == 255, 0x7FC0, gl.minimum(byte + 60, 254) << 7)
                value_scales[group].index(stage).store(high.to(gl.int16))
            mbarrier.arrive(full.index(stage))
        ahead = gl.minimum(step + 1, steps - 1) * 64
        slot = gl.load(idx_ptr + ahead + key, mask=ahead + key < num_keys, other=-1)
        slot_half = gl.load(idx_ptr + ahead + key_half, mask=ahead + key_half < num_keys, other=-1)
        slot_line = gl.load(idx_ptr + ahead + key_line, mask=ahead + key_line < num_keys, other=-1)
        stage = stage + 1
        if stage == STAGES:
            stage = 0
            phase = phase ^ 1


@gluon.jit
def attend_hopper_kernel(
    q_ptr,
    residual_ptr,
    q_scale_ptr,
    data_ptr,
    scale_ptr,
    idx_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    page_units,
    heads,
    num_keys,
    score_scale,
    PAGE: gl.constexpr,
    PARTIAL: gl.constexpr,
    STAGES: gl.constexpr,
    TERMS: gl.constexpr,
    SEVEN: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid (T * head tiles, splits), 4 warps. ``scale_ptr``: FP32 a token, or with SEVEN the pages as int64."""
    if PDL:
        gdc_launch_dependents()
    tile: gl.constexpr = _tile_layout()
    half: gl.constexpr = _half_layout()
    line: gl.constexpr = _column_layout()
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    # a row's head tiles are neighbours: they run at once, and the later one finds the keys in L2
    head_tiles = (heads + 63) // 64
    row = (gl.program_id(0) // head_tiles).to(gl.int64)
    head_of_tile = gl.program_id(0) % head_tiles * 64
    split = gl.program_id(1)
    tiles = (num_keys + 63) // 64
    low = (split * tiles) // gl.num_programs(1)
    steps = ((split + 1) * tiles) // gl.num_programs(1) - low
    keys_left = num_keys - low * 64
    idx = idx_ptr + row * num_keys + low * 64
    # one allocation a tile: within one, the compiler puts barriers between copies into different stages
    k0 = allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)  # nope 0-127
    k1 = allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)  # 128-255
    k2 = allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)  # 256-383
    k_rope = allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], tile)
    k3 = allocate_shared_memory(gl.bfloat16, [STAGES, 64, 32], half)  # 384-447
    keys = (k0, k1, k2, k_rope, k3)
    nope = (k0, k1, k2, k3)
    q0 = allocate_shared_memory(gl.bfloat16, [TERMS, 64, 64], tile)
    q1 = allocate_shared_memory(gl.bfloat16, [TERMS, 64, 64], tile)
    q2 = allocate_shared_memory(gl.bfloat16, [TERMS, 64, 64], tile)
    q3 = allocate_shared_memory(gl.bfloat16, [TERMS, 64, 32], half)
    q = (q0, q1, q2, q3)
    q_rope = allocate_shared_memory(gl.bfloat16, [64, 64], tile)
    p = allocate_shared_memory(gl.bfloat16, [2, 64, 64], tile)
    shrinks = allocate_shared_memory(gl.float32, [2, 64], line)
    sums = allocate_shared_memory(gl.float32, [64], line)
    factors = allocate_shared_memory(gl.float32, [STAGES, 64], line)
    dot_scales = (factors,)
    value_scales = (factors,)
    if SEVEN:
        s0 = allocate_shared_memory(gl.float32, [STAGES, 64], line)
        s1 = allocate_shared_memory(gl.float32, [STAGES, 64], line)
        s2 = allocate_shared_memory(gl.float32, [STAGES, 64], line)
        s3 = allocate_shared_memory(gl.float32, [STAGES, 64], line)
        s4 = allocate_shared_memory(gl.float32, [STAGES, 64], line)
        s5 = allocate_shared_memory(gl.float32, [STAGES, 64], line)
        s6 = allocate_shared_memory(gl.float32, [STAGES, 64], line)
        dot_scales = (s0, s1, s2, s3, s4, s5, s6)
        v0 = allocate_shared_memory(gl.int16, [STAGES, 64], line)
        v1 = allocate_shared_memory(gl.int16, [STAGES, 64], line)
        v2 = allocate_shared_memory(gl.int16, [STAGES, 64], line)
        v3 = allocate_shared_memory(gl.int16, [STAGES, 64], line)
        v4 = allocate_shared_memory(gl.int16, [STAGES, 64], line)
        v5 = allocate_shared_memory(gl.int16, [STAGES, 64], line)
        v6 = allocate_shared_memory(gl.int16, [STAGES, 64], line)
        value_scales = (v0, v1, v2, v3, v4, v5, v6)
    full = allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    p_full = allocate_shared_memory(gl.int64, [2, 1], barrier)
    p_empty = allocate_shared_memory(gl.int64, [2, 1], barrier)
    sums_full = allocate_shared_memory(gl.int64, [1], barrier)
    done = allocate_shared_memory(gl.int64, [1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=129 if SEVEN else 128)
        mbarrier.init(empty.index(stage), count=3)
    for buffer in gl.static_range(2):
        mbarrier.init(p_full.index(buffer), count=1)
        mbarrier.init(p_empty.index(buffer), count=2)
    mbarrier.init(sums_full, count=1)
    mbarrier.init(done, count=2)
    fence_async_shared()
    gl.thread_barrier()
    if PDL:  # measured: waiting for q alone, behind the first copies of keys, gains nothing over this
        gdc_wait()
    ahead = idx + gl.minimum(gl.arange(0, 128, _line_layout()) * 32, keys_left - 1)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ahead], dtype=gl.int32, is_pure=False, pack=1
    )
    bars = (full, empty, p_full, p_empty, sums_full, done)
    first_head = row * heads + head_of_tile
    written = (split * (gl.num_programs(0) // head_tiles) + row) * heads + head_of_tile
    heads_left = heads - head_of_tile
    out = out_ptr + written * 512
    # registers by group: scores get what is left; with under 192 ptxas serialises the values groups' products
    gl.warp_specialize(
        [
            (
                _scores,
                (
                    q_ptr,
                    residual_ptr,
                    q_scale_ptr,
                    sinks_ptr,
                    lse_ptr,
                    written,
                    first_head,
                    head_of_tile,
                    heads,
                    score_scale,
                    steps,
                    keys,
                    nope,
                    q,
                    q_rope,
                    p,
                    shrinks,
                    sums,
                    factors,
                    dot_scales,
                    bars,
                    STAGES,
                    PARTIAL,
                    TERMS,
                    SEVEN,
                ),
            ),
            (_values, (out, heads_left, steps, keys, p, shrinks, sums, value_scales, bars, 0, STAGES, SEVEN)),
            (_values, (out, heads_left, steps, keys, p, shrinks, sums, value_scales, bars, 1, STAGES, SEVEN)),
            (
                _producer,
                (
                    data_ptr,
                    scale_ptr,
                    idx,
                    keys_left,
                    page_units,
                    steps,
                    keys,
                    factors,
                    dot_scales,
                    value_scales,
                    bars,
                    STAGES,
                    PAGE,
                    SEVEN,
                ),
            ),
        ],
        [4, 4, 4],
        [192, 192, 24],
    )


def why_not(device: torch.device) -> str | None:
    """Why this kernel cannot run on a device: None if it can."""
    if not triton.__version__.startswith(TRITON):
        return f"Triton is {triton.__version__}, not {TRITON}x"
    if device.type != "cuda":
        return f"the device is {device.type}"
    found = torch.cuda.get_device_capability(device)
    return None if found == (9, 0) else f"the device is sm_{found[0]}{found[1]}, not sm_90"


def launch(
    q: Tensor,
    q_scale: Tensor,
    residual: Tensor | None,
    pages: Tensor,
    page: int,
    token_scale: Tensor | None,
    idx: Tensor,
    sinks: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    splits: int,
) -> None:
    """Write ``out`` and ``lse`` (parts if splits > 1); arguments as :func:`kernels.sparse_attn.kernel.sparse_attn_fp8`.

    Raises
    ------
    ValueError
        More splits than 64-key tiles, no keys, an ``out`` that is not BF16, a q that is not aligned.
    """
    rows, heads = q_scale.shape
    num_keys = idx.shape[1]
    if not 1 <= splits <= triton.cdiv(num_keys, BLOCK) or out.dtype != torch.bfloat16:
        raise ValueError(
            f"sparse_attn_fp8: the Hopper kernel writes BF16 with at least 64 keys a split; asked for {out.dtype},"
            f" {splits} splits of {num_keys} keys"
        )
    for name, tensor in (("q", q), ("residual", residual)):
        if tensor is not None and tensor.data_ptr() % 16:
            raise ValueError(f"sparse_attn_fp8: {name} does not start at a multiple of 16 bytes")
    seven = token_scale is None
    units = pages.stride(0) // 16
    if not seven and pages.is_contiguous():
        page, units = 1, pages.shape[2] // 16  # slots are rows: nothing to divide
    shift = 1.0 if seven else float(UNSHIFT.value)
    attend_hopper_kernel[(rows * triton.cdiv(heads, BLOCK), splits)](
        q.view(torch.bfloat16),
        q.view(torch.bfloat16) if residual is None else residual.view(torch.bfloat16),
        q_scale,
        pages.view(torch.bfloat16),
        pages.view(torch.int64) if seven else token_scale,
        idx,
        sinks,
        out,
        lse,
        units,
        heads,
        num_keys,
        scale * float(LOG2E.value) * shift,
        PAGE=page,
        PARTIAL=splits > 1,
        STAGES=4 if residual is None else 3,
        TERMS=1 if residual is None else 2,
        SEVEN=seven,
        num_warps=4,
        **overlap(q.device),
    )
