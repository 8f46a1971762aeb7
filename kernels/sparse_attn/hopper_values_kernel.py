"""Values groups of the Hopper attention kernel: O^T += V^T P^T; see hopper_kernel.py for what orders them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.sparse_attn.hopper_layouts_kernel import (
    SHIFT,
    UNSHIFT,
    WIDEN,
    WIDEN_SCALED,
    accumulator,
    copy_layout,
    half_layout,
    output_layout,
    pairs_layout,
    tile_layout,
)
from kernels.sparse_attn.hopper_query_kernel import make_q
from kernels.sparse_attn.hopper_softmax_kernel import arrive, next_of


@gluon.jit
def _values_raw(keys, stage, group: gl.constexpr):
    """V^T of 64 nope values as stored: [32 pairs of d, 64 keys] int16."""
    if group == 6:
        tile = keys[4].index(stage)._reinterpret(gl.int16, [64, 32], half_layout())
        return tile.permute((1, 0)).load(pairs_layout())
    else:
        tile = keys[group // 2].index(stage)._reinterpret(gl.int16, [64, 64], tile_layout())
        return tile.slice(32 * (group % 2), 32, 1).permute((1, 0)).load(pairs_layout())


@gluon.jit
def _values_wide(raw, scales, stage, group: gl.constexpr, operand: gl.constexpr, SEVEN: gl.constexpr):
    """-> [64 d, 64 keys] BF16 in operand A's registers; no data moves: row 16 w + 8 e + g is d = 2 (8 w + g) + e."""
    if SEVEN:
        scale = scales[group].index(stage).load(gl.SliceLayout(0, pairs_layout()))
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
def _put(tile, product, ROPE: gl.constexpr):
    """Store O^T as [head, d] BF16 in shared memory, undoing the order of rows of :func:`_values_wide`."""
    if ROPE:
        tile.permute((1, 0)).store(product.to(gl.bfloat16))
    else:
        pairs = product.reshape([4, 2, 8, 64]).permute(0, 2, 3, 1).reshape([32, 64, 2])
        pairs = gl.convert_layout(pairs, output_layout()).to(gl.bfloat16)
        tile.store(pairs.permute(1, 0, 2).reshape([64, 64]))


@gluon.jit
def _products_in_turn(keys, stage, scales, weights, wide, sums, operand: gl.constexpr, WHICH: gl.constexpr):
    """O^T += V^T P^T of a step under seven scales, one product in flight; the last is not waited for.

    V^T is turned when the product before it is complete, so that 176 registers hold a group and the producer has 40.
    With 24, its scales and addresses went through local memory, whose loads queue behind the copies of keys.
    """
    a0, a1, a2, a3 = sums
    first: gl.constexpr = 4 * WHICH
    if WHICH == 1:
        a3 = warpgroup_mma(keys[3].index(stage).permute((1, 0)), weights, a3, is_async=True)
    a0 = warpgroup_mma(wide, weights, a0, is_async=True)
    raw = _values_raw(keys, stage, first + 1)
    if WHICH == 1:
        a3, a0 = warpgroup_mma_wait(0, deps=(a3, a0))
    else:
        a0 = warpgroup_mma_wait(0, deps=(a0,))
    wide = _values_wide(raw, scales, stage, first + 1, operand, True)
    a1 = warpgroup_mma(wide, weights, a1, is_async=True)
    raw = _values_raw(keys, stage, first + 2)
    a1 = warpgroup_mma_wait(0, deps=(a1,))
    wide = _values_wide(raw, scales, stage, first + 2, operand, True)
    a2 = warpgroup_mma(wide, weights, a2, is_async=True)
    if WHICH == 0:
        raw = _values_raw(keys, stage, first + 3)
        a2 = warpgroup_mma_wait(0, deps=(a2,))
        wide = _values_wide(raw, scales, stage, first + 3, operand, True)
        a3 = warpgroup_mma(wide, weights, a3, is_async=True)
    return a0, a1, a2, a3


@gluon.jit
def _products_in_pairs(keys, stage, weights, wide, raw1, sums, operand: gl.constexpr, WHICH: gl.constexpr):
    """O^T += V^T P^T of a step under one scale, the next V^T turned beside a product; the last is not waited for."""
    a0, a1, a2, a3 = sums
    first: gl.constexpr = 4 * WHICH
    if WHICH == 1:
        a3 = warpgroup_mma(keys[3].index(stage).permute((1, 0)), weights, a3, is_async=True)
    a0 = warpgroup_mma(wide, weights, a0, is_async=True)
    raw2 = _values_raw(keys, stage, first + 2)  # a raw tile is fetched before the one ahead of it is turned
    wide = _values_wide(raw1, None, stage, first + 1, operand, False)
    a1 = warpgroup_mma(wide, weights, a1, is_async=True)
    if WHICH == 1:
        a3, a0 = warpgroup_mma_wait(1, deps=(a3, a0))
    else:
        a0 = warpgroup_mma_wait(1, deps=(a0,))
        raw3 = _values_raw(keys, stage, first + 3)
    wide = _values_wide(raw2, None, stage, first + 2, operand, False)
    a2 = warpgroup_mma(wide, weights, a2, is_async=True)
    a1 = warpgroup_mma_wait(1, deps=(a1,))
    if WHICH == 0:
        wide = _values_wide(raw3, None, stage, first + 3, operand, False)
        a3 = warpgroup_mma(wide, weights, a3, is_async=True)
        a2 = warpgroup_mma_wait(1, deps=(a2,))
    return a0, a1, a2, a3


@gluon.jit
def values_group(
    place,
    steps,
    tiles,
    bars,
    WHICH: gl.constexpr,
    STAGES: gl.constexpr,
    SEVEN: gl.constexpr,
    PRODUCT: gl.constexpr,
):
    """Groups 0-3 (WHICH 0), or 4-6 and rope (WHICH 1), of the output."""
    source, out_ptr, heads_left = place
    keys, query, p, shrinks, sums, scales = tiles
    full, empty, p_full, p_empty, sums_full, done = bars
    layout: gl.constexpr = accumulator(16)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    first: gl.constexpr = 4 * WHICH
    if PRODUCT:
        make_q(source, heads_left, query, WHICH)
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
        if SEVEN:
            wide = _values_wide(raw0, scales, stage, first, operand, True)
        else:
            raw1 = _values_raw(keys, stage, first + 1)
            wide = _values_wide(raw0, scales, stage, first, operand, False)
        mbarrier.wait(p_full.index(buffer), (step >> 1) & 1)
        weights = p.index(buffer).permute((1, 0))
        shrink = shrinks.index(buffer).load(gl.SliceLayout(0, layout))
        if gl.min(shrink, 0) < 1.0:
            by = shrink[None, :]
            a0 = a0 * by
            a1 = a1 * by
            a2 = a2 * by
            a3 = a3 * by
        if SEVEN:
            a0, a1, a2, a3 = _products_in_turn(
                keys, stage, scales, weights, wide, (a0, a1, a2, a3), operand, WHICH
            )
        else:
            a0, a1, a2, a3 = _products_in_pairs(
                keys, stage, weights, wide, raw1, (a0, a1, a2, a3), operand, WHICH
            )
        arrive(empty.index(stage))  # operand A is in registers and rope's product complete: keys are free
        stage, phase = next_of(stage, phase, STAGES)
        if step + 1 < steps:
            mbarrier.wait(full.index(stage), phase)
            if WHICH == 1:
                fence_async_shared()
        raw0 = _values_raw(keys, stage, first)  # past the end: read, never used
        if WHICH == 0:
            a3 = warpgroup_mma_wait(0, deps=(a3,))
        else:
            a2 = warpgroup_mma_wait(0, deps=(a2,))
        arrive(p_empty.index(buffer))
    mbarrier.wait(sums_full, 0)
    inverse = sums.load(gl.SliceLayout(0, layout))[None, :]
    arrive(done)
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
    wide_copy: gl.constexpr = copy_layout()
    head = gl.arange(0, 64, gl.SliceLayout(1, wide_copy))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, wide_copy))[None, :]
    for tile in gl.static_range(4):
        values = keys[tile].index(WHICH).load(wide_copy)
        at = out_ptr + head * 512 + (first + tile) * 64 + column
        gl.store(at, values, mask=head < heads_left)
