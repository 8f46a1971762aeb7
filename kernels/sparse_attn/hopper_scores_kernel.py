"""Scores group of the Hopper attention kernel: S, softmax, P; see hopper_kernel.py for what orders it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.sparse_attn.hopper_layouts_kernel import (
    MASKED,
    NOPE_WORDS,
    SHIFT,
    WORDS,
    accumulator,
    copy_layout,
    half_accumulator,
    half_copy_layout,
)
from kernels.sparse_attn.hopper_softmax_kernel import end_sums, next_of, put_weights, start_sums, step_sums


@gluon.jit
def _rope_dots(q_rope, keys, stage):
    """Rope part of S, complete, in the layout of e4m3 products."""
    zeros = gl.zeros([64, 64], gl.float32, accumulator(16))
    dots = warpgroup_mma(q_rope, keys[3].index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    # a product in flight cannot change between BF16 and e4m3: wgmma's depth is part of its layout
    dots = warpgroup_mma_wait(0, deps=(dots,))
    return gl.convert_layout(dots, accumulator(32), assert_trivial=True)


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
def _nope_dots(dots, q, nope, term, stage):
    """Issue S += q K^T over all nope values; not waited for."""
    for tile in gl.static_range(4):
        k = _nope_tile(nope, stage, tile).permute((1, 0))
        dots = warpgroup_mma(_nope_tile(q, term, tile), k, dots, is_async=True)
    return dots


@gluon.jit
def _group_dots(q_rope, q, keys, nope, scales, stage, never, zero, TERMS: gl.constexpr):
    """S = q_rope k_rope + sum over groups of (q K^T of the group) * scale of (key, group); complete.

    In halves of 32 keys, so that one half's product is in flight while the other's is added: two products of 64 x 64
    beside S do not fit this group's registers. ``never`` is false, which ptxas must not know: told that a product
    starts from zero, it gives each one registers of its own, runs out, and serialises the whole kernel's products.
    """
    layout: gl.constexpr = half_accumulator(32)
    low = _issue_rope(q_rope, keys, stage, 0)
    high = _issue_rope(q_rope, keys, stage, 1)
    even = _issue_group(q, nope, gl.zeros([64, 32], gl.float32, layout), stage, never, zero, 0, TERMS)
    odd = gl.zeros([64, 32], gl.float32, layout)
    for group in gl.static_range(7):
        odd = _issue_group(q, nope, odd, stage, never, zero, 2 * group + 1, TERMS)
        if group == 0:
            low, high = warpgroup_mma_wait(2 * TERMS, deps=(low, high))
            low = gl.convert_layout(low, layout, assert_trivial=True)
            high = gl.convert_layout(high, layout, assert_trivial=True)
        scale = scales[group].index(stage).slice(0, 32, 0).load(gl.SliceLayout(0, layout))
        even = warpgroup_mma_wait(TERMS, deps=(even,))
        low = low + even * scale[None, :]
        if group < 6:
            even = _issue_group(q, nope, even, stage, never, zero, 2 * group + 2, TERMS)
        scale = scales[group].index(stage).slice(32, 32, 0).load(gl.SliceLayout(0, layout))
        odd = warpgroup_mma_wait(TERMS if group < 6 else 0, deps=(odd,))
        high = high + odd * scale[None, :]
    whole = gl.join(low, high).permute(0, 2, 1).reshape([64, 64])
    whole = gl.convert_layout(whole, accumulator(32), assert_trivial=True)
    # LLVM would move the adding into the softmax that follows both calls, and keep 14 products and 112 scales alive
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [whole], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _issue_rope(q_rope, keys, stage, HALF: gl.constexpr):
    """Issue the rope part of S over half of the keys, [64, 32]; not waited for."""
    zeros = gl.zeros([64, 32], gl.float32, half_accumulator(16))
    k = keys[3].index(stage).slice(32 * HALF, 32, 0).permute((1, 0))
    return warpgroup_mma(q_rope, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _issue_group(q, nope, part, stage, never, zero, unit: gl.constexpr, TERMS: gl.constexpr):
    """Issue q K^T of group ``unit // 2`` over half ``unit % 2`` of the keys, [64, 32], into ``part``'s registers."""
    k = _nope_group(nope, stage, unit // 2).slice(32 * (unit % 2), 32, 0).permute((1, 0))
    part = warpgroup_mma(_nope_group(q, zero, unit // 2), k, part, use_acc=never, is_async=True)
    if TERMS == 2:
        part = warpgroup_mma(_nope_group(q, zero + 1, unit // 2), k, part, is_async=True)
    return part


@gluon.jit
def _load_q(q_ptr, residual_ptr, first_head, heads_left, q, q_rope, TERMS: gl.constexpr):
    """Issue the copies of 64 heads' q into shared memory; heads past the last are zeros."""
    wide: gl.constexpr = copy_layout()
    half: gl.constexpr = half_copy_layout()
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
def scores_group(
    pointers,
    place,
    score_scale,
    steps,
    tiles,
    bars,
    STAGES: gl.constexpr,
    PARTIAL: gl.constexpr,
    TERMS: gl.constexpr,
    SEVEN: gl.constexpr,
):
    """Scores, running maximum and sum of 64 heads, P for the values groups; writes the LSE."""
    q_ptr, residual_ptr, q_scale_ptr, sinks_ptr, lse_ptr = pointers
    lse_at, first_head, head_of_tile, heads = place
    keys, nope, q, q_rope, p, shrinks, sums, factors, dot_scales = tiles
    full, empty, p_full, p_empty, sums_full, _done = bars
    layout: gl.constexpr = accumulator(32)
    by_key: gl.constexpr = gl.SliceLayout(0, layout)
    _load_q(q_ptr, residual_ptr, first_head, heads - head_of_tile, q, q_rope, TERMS)
    head = gl.arange(0, 64, gl.SliceLayout(1, layout))
    factor = (
        gl.load(q_scale_ptr + first_head + head, mask=head_of_tile + head < heads, other=0.0) * score_scale
    )
    peak, total = start_sums(layout)
    async_copy.wait_group(0)
    mbarrier.wait(full.index(0), 0)
    fence_async_shared()
    gl.thread_barrier()
    if SEVEN:
        dots = _group_dots(q_rope, q, keys, nope, dot_scales, 0, steps < 0, 0, TERMS)
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
        # 0, which ptxas must not know: else it keeps the addresses of q's operands in registers and spills others, in
        # every group; two terms took 123.5 us instead of 101.4 (H200, 2026-11-30: 128 rows, 128 heads, 1152 keys)
        zero = step >> 30
        if SEVEN:  # the column holds 0 or MASKED
            dots = dots + column[None, :]
        else:  # the column holds the token's scale, 0 for no key
            column = column * SHIFT
            dots = dots * column[None, :] + gl.where(column == 0, MASKED, 0.0)[None, :]
        weights, shrink, peak, total = step_sums(dots, factor, factor[:, None], peak, total)
        if not SEVEN:
            weights = weights * column[None, :]
        put_weights(p, shrinks, p_empty, weights, shrink, step)
        next_stage, next_phase = next_of(stage, phase, STAGES)
        if step + 1 < steps:
            mbarrier.wait(full.index(next_stage), next_phase)
            fence_async_shared()
        if SEVEN:  # S has many short products with work between them: P is published first
            mbarrier.arrive(p_full.index(step & 1))
            dots = _group_dots(q_rope, q, keys, nope, dot_scales, next_stage, steps < 0, zero, TERMS)
        else:  # the next step's S enters the tensor pipe before P is published
            dots = _rope_dots(q_rope, keys, next_stage)
            dots = _nope_dots(dots, q, nope, zero, next_stage)
            mbarrier.arrive(p_full.index(step & 1))
            if TERMS == 2:
                dots = _nope_dots(dots, q, nope, zero + 1, next_stage)
        column = factors.index(next_stage).load(by_key)
        if not SEVEN:
            dots = warpgroup_mma_wait(0, deps=(dots,))
        mbarrier.arrive(empty.index(stage))
        stage = next_stage
        phase = next_phase
    end_sums(
        peak, total, sums, sums_full, sinks_ptr, lse_ptr, lse_at, head_of_tile, heads - head_of_tile, PARTIAL
    )
