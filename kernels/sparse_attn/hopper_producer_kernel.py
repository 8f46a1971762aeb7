"""Producer group of the Hopper attention kernel: gathers keys and scales; see hopper_kernel.py for what orders it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.sparse_attn.hopper_layouts_kernel import (
    MASKED,
    NOPE_WORDS,
    WORDS,
    copy_layout,
    half_copy_layout,
    line_layout,
)
from kernels.sparse_attn.hopper_softmax_kernel import arrive, next_of


@gluon.jit
def _row_words(slot, page_units, PAGE: gl.constexpr):
    """BF16-sized words from the first page to a slot's data, int64; anything for -1, whose copies are masked."""
    # units of 16 bytes: whatever the stride, the compiler sees that a copy of 16 bytes is aligned
    return (slot // PAGE).to(gl.int64) * page_units * 8 + (slot % PAGE) * WORDS


@gluon.jit
def _scale_bytes(scale_ptr, slot, page_units, PAGE: gl.constexpr):
    """Issue the load of the seven scales of each token, a byte each; zeros for -1."""
    after = (slot // PAGE).to(gl.int64) * page_units * 2 + PAGE * 72 + slot % PAGE
    return gl.load(scale_ptr + after, mask=slot >= 0, other=0)


@gluon.jit
def producer_group(
    pointers,
    num_keys,
    page_units,
    steps,
    tiles,
    bars,
    STAGES: gl.constexpr,
    PAGE: gl.constexpr,
    SEVEN: gl.constexpr,
):
    """Gather the split's keys and scales, ``STAGES`` tiles ahead of whoever reads them."""
    data_ptr, scale_ptr, idx_ptr = pointers
    keys, factors, dot_scales, value_scales = tiles
    full, empty, _p_full, _p_empty, _sums_full, _done = bars
    wide: gl.constexpr = copy_layout()
    half: gl.constexpr = half_copy_layout()
    line: gl.constexpr = line_layout()
    key = gl.arange(0, 64, gl.SliceLayout(1, wide))
    key_half = gl.arange(0, 64, gl.SliceLayout(1, half))
    key_line = gl.arange(0, 64, line)
    word = gl.arange(0, 64, gl.SliceLayout(0, wide))[None, :]
    word_half = gl.arange(0, 32, gl.SliceLayout(0, half))[None, :] + 192
    slot = gl.load(idx_ptr + key, mask=key < num_keys, other=-1)
    slot_half = gl.load(idx_ptr + key_half, mask=key_half < num_keys, other=-1)
    slot_line = gl.load(idx_ptr + key_line, mask=key_line < num_keys, other=-1)
    if SEVEN:
        bytes8 = _scale_bytes(scale_ptr, slot_line, page_units, PAGE)
        line_ahead = gl.load(idx_ptr + 64 + key_line, mask=64 + key_line < num_keys, other=-1)
    stage = 0
    phase = 1
    for step in range(steps):
        rows = data_ptr + _row_words(slot, page_units, PAGE)[:, None] + word
        rows_half = data_ptr + _row_words(slot_half, page_units, PAGE)[:, None] + word_half
        held = (slot >= 0)[:, None]
        held_half = (slot_half >= 0)[:, None]
        held_line = slot_line >= 0
        if SEVEN:  # a step ahead: waited for here, their way from memory would be in every step
            bytes8_ahead = _scale_bytes(scale_ptr, line_ahead, page_units, PAGE)
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
            arrive(full.index(stage))
        ahead = gl.minimum(step + 1, steps - 1) * 64
        slot = gl.load(idx_ptr + ahead + key, mask=ahead + key < num_keys, other=-1)
        slot_half = gl.load(idx_ptr + ahead + key_half, mask=ahead + key_half < num_keys, other=-1)
        if SEVEN:
            bytes8 = bytes8_ahead
            slot_line = line_ahead
            after = (step + 2) * 64 + key_line
            line_ahead = gl.load(idx_ptr + after, mask=after < num_keys, other=-1)
        else:
            slot_line = gl.load(idx_ptr + ahead + key_line, mask=ahead + key_line < num_keys, other=-1)
        stage, phase = next_of(stage, phase, STAGES)
