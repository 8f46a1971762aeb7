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
    half_copy_layout,
)
from kernels.sparse_attn.hopper_softmax_kernel import (
    arrive,
    end_sums,
    next_of,
    put_weights,
    start_sums,
    step_sums,
)


@gluon.jit
def _wait_tile(full, stage, phase, more):
    """Wait for a tile if there are more; past the end what is read is dropped."""
    if more:
        mbarrier.wait(full.index(stage), phase)
        fence_async_shared()


@gluon.jit
def _issue_rope(q_rope, keys, stage):
    """Issue the rope part of S; not waited for."""
    zeros = gl.zeros([64, 64], gl.float32, accumulator(16))
    return warpgroup_mma(q_rope, keys[3].index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _wait_rope(dots):
    """Rope part of S, complete, in the layout of e4m3 products."""
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
def _group_dots(dots, q, nope, scales, stage, never, zero, TERMS: gl.constexpr):
    """S += (q K^T of a group) * scale of (key, group), over the groups; complete.

    One product at a time: two of 64 x 64 beside S do not fit this group's registers, and in halves of 32 keys, two of
    which do, the tensor cores, which the values groups keep busy, are asked twice as often (H200, 2026-11-30, 64 rows
    of 64 heads and 640 keys, one term and two: 34.7 and 38.0 us against 36.0 and 42.0). ``never`` is false, which
    ptxas must not know: told that a product starts from zero, it gives each one registers of its own, runs out, and
    serialises the whole kernel's products.
    """
    layout: gl.constexpr = accumulator(32)
    part = gl.zeros([64, 64], gl.float32, layout)
    for group in gl.static_range(7):
        k = _nope_group(nope, stage, group).permute((1, 0))
        part = warpgroup_mma(_nope_group(q, zero, group), k, part, use_acc=never, is_async=True)
        if TERMS == 2:
            part = warpgroup_mma(_nope_group(q, zero + 1, group), k, part, is_async=True)
        scale = scales[group].index(stage).load(gl.SliceLayout(0, layout))
        part = warpgroup_mma_wait(0, deps=(part,))
        dots = dots + part * scale[None, :]
    # LLVM would move the adding into the softmax that follows both calls, and keep 7 products and 112 scales alive
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [dots], dtype=gl.float32, is_pure=False, pack=1
    )


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
    TERMS: gl.constexpr,
    SEVEN: gl.constexpr,
    PRODUCT: gl.constexpr,
):
    """Scores, running maximum and sum of 64 heads, P for the values groups; writes the LSE."""
    source, sinks_ptr, lse_ptr = pointers
    lse_at, first_head, head_of_tile, heads = place
    keys, nope, query, p, shrinks, sums, factors, dot_scales = tiles
    q_full, q, q_rope, q_scales = query
    full, empty, p_full, p_empty, sums_full, _done = bars
    layout: gl.constexpr = accumulator(32)
    by_key: gl.constexpr = gl.SliceLayout(0, layout)
    by_head: gl.constexpr = gl.SliceLayout(1, layout)
    peak, total = start_sums(layout)
    if PRODUCT:
        mbarrier.wait(q_full, 0)
        factor = q_scales.load(by_head) * score_scale
    else:
        q_ptr, residual_ptr, q_scale_ptr = source
        _load_q(q_ptr, residual_ptr, first_head, heads - head_of_tile, q, q_rope, TERMS)
        head = gl.arange(0, 64, by_head)
        scale = gl.load(q_scale_ptr + first_head + head, mask=head_of_tile + head < heads, other=0.0)
        factor = scale * score_scale
        async_copy.wait_group(0)
    mbarrier.wait(full.index(0), 0)
    fence_async_shared()
    gl.thread_barrier()
    dots = _wait_rope(_issue_rope(q_rope, keys, 0))
    if SEVEN:
        dots = _group_dots(dots, q, nope, dot_scales, 0, steps < 0, 0, TERMS)
    else:
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
        next_stage, next_phase = next_of(stage, phase, STAGES)
        if SEVEN:
            _wait_tile(full, next_stage, next_phase, step + 1 < steps)
            turned = _issue_rope(q_rope, keys, next_stage)  # in flight over the softmax
            dots = dots + column[None, :]  # 0 or MASKED
        else:  # the column holds the token's scale, 0 for no key
            column = column * SHIFT
            dots = dots * column[None, :] + gl.where(column == 0, MASKED, 0.0)[None, :]
        weights, shrink, peak, total = step_sums(dots, factor, factor[:, None], peak, total)
        if not SEVEN:
            weights = weights * column[None, :]
        put_weights(p, shrinks, p_empty, weights, shrink, step)
        if not SEVEN:
            _wait_tile(full, next_stage, next_phase, step + 1 < steps)
        if SEVEN:  # S has many short products with work between them: P is published first
            arrive(p_full.index(step & 1))
            dots = _group_dots(_wait_rope(turned), q, nope, dot_scales, next_stage, steps < 0, zero, TERMS)
        else:  # the next step's S enters the tensor pipe before P is published
            dots = _wait_rope(_issue_rope(q_rope, keys, next_stage))
            dots = _nope_dots(dots, q, nope, zero, next_stage)
            arrive(p_full.index(step & 1))
            if TERMS == 2:
                dots = _nope_dots(dots, q, nope, zero + 1, next_stage)
        column = factors.index(next_stage).load(by_key)
        if not SEVEN:
            dots = warpgroup_mma_wait(0, deps=(dots,))
        arrive(empty.index(stage))
        stage = next_stage
        phase = next_phase
    end_sums(peak, total, sums, sums_full, sinks_ptr, lse_ptr, lse_at, head_of_tile, heads - head_of_tile)
