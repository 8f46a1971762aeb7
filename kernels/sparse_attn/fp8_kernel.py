"""Attention with FP8 operands, Triton: B1 on any architecture. The Hopper kernel is in hopper_kernel.py.

K nope is read as FP8 in place and goes to the tensor cores as it is stored; the record's scales multiply the dots:
seven scales of 64 values, or one of a token (aligned record). V is the same K, widened in registers to BF16
exactly; no copy of K is written to memory. Two choices follow the plans (dsv4/model/numerics.py): a rope dot in
FP8, and probabilities rounded to E4M3 of 256 p. The latter keeps BF16 operands in PV: wgmma takes an FP8 B operand
in K-major only, and V is not; the rounding is the plan's, the rate is BF16's.
"""

import triton
import triton.language as tl

from kernels.formats.device import AMAX_FLOOR, abs_max, e4m3, floored, power_of_two_scale, ue8m0_value
from kernels.sparse_attn.keys_kernel import (
    GROUP,
    LOG2E,
    data_offset,
    finish_row,
    key_slots,
    own_keys,
    own_rows,
    running,
    scale_offset,
    widened,
)


@triton.jit
def rope_fp8(values, unit):
    """E4M3 [ROWS, 64] and FP32 scale [ROWS] of ``values * unit`` (BF16 [ROWS, 64], powers of two FP32 [ROWS])."""
    wide = values.to(tl.float32)
    scale = power_of_two_scale(floored(abs_max(wide, 1) * unit, AMAX_FLOOR), 448.0)
    return e4m3(wide * tl.div_rn(unit, scale)[:, None]), scale


@triton.jit
def rope_dots(q_rope_ptr, at_q, own, q_unit, k_rope, k_unit, FP8: tl.constexpr):
    """Rope part of the scores over q_unit * k_unit: FP32 [BLOCK_H, BLOCK_S]."""
    q_rope = tl.load(q_rope_ptr + at_q, mask=own, other=0.0)
    if FP8:
        q8, q_scale = rope_fp8(q_rope, q_unit)
        k8, k_scale = rope_fp8(k_rope, k_unit)
        ratio = tl.div_rn(q_scale, q_unit)[:, None] * tl.div_rn(k_scale, k_unit)[None, :]
        return tl.dot(q8, tl.trans(k8)) * ratio
    else:
        return tl.dot(q_rope, tl.trans(k_rope))


@triton.jit
def nope_dots(
    scores,
    q_ptr,
    residual_ptr,
    q_start,
    residual_start,
    own,
    pages_ptr,
    slot,
    page_stride,
    PAGE: tl.constexpr,
    NOPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Add the nope part to the scores [BLOCK_H, BLOCK_S], group by group, on FP8 operands."""
    data: tl.constexpr = NOPE + 2 * GROUP
    column = tl.arange(0, GROUP)
    held = slot >= 0
    start = data_offset(slot, page_stride, PAGE, data)
    scales = scale_offset(slot, page_stride, PAGE, data)
    for group in tl.static_range(NOPE // GROUP):
        at = group * GROUP + column[None, :]
        k = tl.load(pages_ptr + start[:, None] + at, mask=held[:, None], other=0)
        k = tl.trans(k.to(tl.float8e4nv, bitcast=True))
        q = tl.load(q_ptr + q_start + at, mask=own, other=0).to(tl.float8e4nv, bitcast=True)
        if ALIGNED:
            scores = tl.dot(q, k, scores)
        else:
            byte = tl.load(pages_ptr + scales + group, mask=held, other=0)
            scores += tl.dot(q, k) * ue8m0_value(byte)[None, :]
        if residual_ptr is not None:
            low = tl.load(residual_ptr + residual_start + at, mask=own, other=0)
            low = low.to(tl.float8e4nv, bitcast=True)
            if ALIGNED:
                scores = tl.dot(low, k, scores)
            else:
                scores += tl.dot(low, k) * ue8m0_value(byte)[None, :]
    return scores


@triton.jit
def attend_fp8_kernel(
    q_ptr,
    q_rope_ptr,
    residual_ptr,
    q_scale_ptr,
    pages_ptr,
    rope_ptr,
    token_scale_ptr,
    idx_ptr,
    table_ptr,
    sequence_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    page_stride,
    table_stride,
    heads,
    num_keys,
    scale,
    NOPE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROPE_FP8: tl.constexpr,
    PV_FP8: tl.constexpr,
):
    """Grid (T * head tiles, splits); with more than one split each writes a part.

    ``token_scale_ptr`` None: seven scales in the pages; else the aligned record.
    """
    row, head, at = own_rows(heads, BLOCK_H)
    width: tl.constexpr = NOPE + GROUP
    data: tl.constexpr = NOPE + 2 * GROUP
    aligned: tl.constexpr = token_scale_ptr is not None
    own = (head < heads)[:, None]
    q_head = row * heads + head
    q_unit = tl.load(q_scale_ptr + q_head, mask=head < heads, other=1.0)
    part = tl.arange(0, GROUP)
    q_rope_at = (q_head * data + NOPE)[:, None] // 2 + part[None, :]

    first, last = own_keys(num_keys, BLOCK_S)
    peak = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    weighted = tl.zeros((BLOCK_H, width), tl.float32)
    turned = tl.zeros((BLOCK_H, GROUP), tl.float32)  # rope columns, apart where their p is another
    for begin in tl.range(first, last, BLOCK_S):
        key = begin + tl.arange(0, BLOCK_S)
        slot = key_slots(idx_ptr, table_ptr, sequence_ptr, row, key, num_keys, table_stride, PAGE)
        held = slot >= 0
        start = data_offset(slot, page_stride, PAGE, data)
        k_rope = tl.load(
            rope_ptr + (start + NOPE)[:, None] // 2 + part[None, :], mask=held[:, None], other=0.0
        )
        if aligned:
            k_unit = tl.load(token_scale_ptr + slot, mask=held, other=1.0)
        else:
            k_unit = tl.full((BLOCK_S,), 1.0, tl.float32)
        scores = rope_dots(q_rope_ptr, q_rope_at, own, q_unit, k_rope, k_unit, ROPE_FP8)
        scores = nope_dots(
            scores,
            q_ptr,
            residual_ptr,
            q_head[:, None] * data,
            q_head[:, None] * NOPE,
            own,
            pages_ptr,
            slot,
            page_stride,
            PAGE,
            NOPE,
            aligned,
        )
        if aligned:
            scores = scores * k_unit[None, :]
        scores = scores * (q_unit * (scale * LOG2E))[:, None]
        scores = tl.where(held[None, :], scores, float("-inf"))
        highest, against = running(peak, scores)
        shrink = tl.exp2(peak - against)
        p = tl.exp2(scores - against[:, None])
        total = total * shrink + tl.sum(p, 1)
        values = widened(pages_ptr, rope_ptr, slot, page_stride, PAGE, NOPE, not aligned, not PV_FP8)
        p_rope = p
        if PV_FP8:
            p = e4m3(p * 256.0).to(tl.float32) * 0.00390625  # 2^-8
        # the token's scale joins p after its rounding: a power of two, exact
        weighted = tl.dot((p * k_unit[None, :]).to(tl.bfloat16), values, weighted * shrink[:, None])
        if PV_FP8:
            turned = tl.dot((p_rope * k_unit[None, :]).to(tl.bfloat16), k_rope, turned * shrink[:, None])
        peak = highest

    inverse = finish_row(peak, total, sinks_ptr, lse_ptr + at, head, heads)
    column = tl.arange(0, width)
    narrow = out_ptr.dtype.element_ty
    stored = own & (column < NOPE)[None, :] if PV_FP8 else own
    result = (weighted * inverse[:, None]).to(narrow)
    tl.store(out_ptr + at[:, None] * width + column[None, :], result, mask=stored)
    if PV_FP8:
        result = (turned * inverse[:, None]).to(narrow)
        tl.store(out_ptr + at[:, None] * width + NOPE + part[None, :], result, mask=own)
