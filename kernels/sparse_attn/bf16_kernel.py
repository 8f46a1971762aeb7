"""Attention with BF16 operands, Triton: B0 over a gathered buffer, B1a over the FP8 pages in place.

One program owns a tile of heads of one row and one split of its keys, in the list's order, with an online softmax
in base 2. Both paths run the same dots on the same values, so they differ by nothing but where K comes from.
"""

import triton
import triton.language as tl

from kernels.overlap import follow
from kernels.sparse_attn.keys_kernel import LOG2E, finish_row, key_slots, own_keys, own_rows, running, widened


@triton.jit
def attend_bf16_kernel(
    q_ptr,
    keys_ptr,
    pages_ptr,
    rope_ptr,
    q_stride,
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
    PDL: tl.constexpr,
):
    """Grid (T * head tiles, splits); with more than one split each writes a part.

    ``keys_ptr`` None: K from pages; else from the buffer, -1 masked by idx.
    """
    follow(PDL)
    row, head, at_out = own_rows(heads, BLOCK_H)
    width: tl.constexpr = NOPE + 64
    column = tl.arange(0, width)
    own = (head < heads)[:, None]
    q = tl.load(q_ptr + row * q_stride + head[:, None] * width + column[None, :], mask=own, other=0.0)

    first, last = own_keys(num_keys, BLOCK_S)
    peak = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    weighted = tl.zeros((BLOCK_H, width), tl.float32)
    for start in tl.range(first, last, BLOCK_S):
        key = start + tl.arange(0, BLOCK_S)
        slot = key_slots(idx_ptr, table_ptr, sequence_ptr, row, key, num_keys, table_stride, PAGE)
        if keys_ptr is None:
            k = widened(pages_ptr, rope_ptr, slot, page_stride, PAGE, NOPE, True, True)
        else:
            at = (row * num_keys + key)[:, None] * width + column[None, :]
            k = tl.load(keys_ptr + at, mask=(key < num_keys)[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * (scale * LOG2E)
        scores = tl.where((slot >= 0)[None, :], scores, float("-inf"))
        highest, against = running(peak, scores)
        shrink = tl.exp2(peak - against)
        p = tl.exp2(scores - against[:, None])  # [BLOCK_H, BLOCK_S]
        total = total * shrink + tl.sum(p, 1)
        weighted = tl.dot(p.to(tl.bfloat16), k, weighted * shrink[:, None])
        peak = highest

    inverse = finish_row(peak, total, sinks_ptr, lse_ptr + at_out, head, heads)
    result = (weighted * inverse[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at_out[:, None] * width + column[None, :], result, mask=own)
