"""Gather of NVFP4 records into a BF16 buffer: a body of ``kernel.py``'s :func:`gather_dequantise`."""

import triton
import triton.language as tl

from kernels.formats.device import e2m1_value, e4m3_value
from kernels.gather_dequantise.row_kernel import copy_rope, own_slots
from kernels.overlap import follow
from kernels.sparse_attn.keys_kernel import data_offset


@triton.jit
def gather_nvfp4_kernel(
    pages_ptr,
    word_ptr,
    gsa_ptr,
    rope_ptr,
    idx_ptr,
    table_ptr,
    sequence_ptr,
    out_ptr,
    page_stride,
    table_stride,
    num_keys,
    NOPE: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Values of a few keys of a row, eight codes a load; the pages as bytes, and as words, gsa and rope read them."""
    follow(PDL)
    row, key, slot = own_slots(idx_ptr, table_ptr, sequence_ptr, num_keys, table_stride, PAGE, KEYS)
    data: tl.constexpr = NOPE // 2 + 128
    start = data_offset(slot, page_stride, PAGE, data)
    held = tl.maximum(slot, 0)
    scales_at = held // PAGE * page_stride + PAGE * data + held % PAGE * (NOPE // 16 + 4)

    eight = tl.arange(0, NOPE // 8 + 8)[None, :]  # the last 64 values are rope's: a power of two with them
    read = (slot >= 0)[:, None] & (eight < NOPE // 8)
    words = tl.load(word_ptr + (start // 4)[:, None] + eight, mask=read, other=0)
    scale = tl.load(pages_ptr + scales_at[:, None] + eight // 2, mask=read, other=0)
    gsa = tl.load(gsa_ptr + (scales_at + NOPE // 16) // 4, mask=slot >= 0, other=0.0)
    lane = tl.arange(0, 8)[None, None, :]
    codes = (words[:, :, None] >> (4 * lane)) & 15
    values = e2m1_value(codes) * e4m3_value(scale.to(tl.int32))[:, :, None] * gsa[:, None, None]

    at = out_ptr + (row * num_keys + key) * (NOPE + 64)
    here = key < num_keys
    nope_at = at[:, None, None] + eight[:, :, None] * 8 + lane
    tl.store(nope_at, values.to(tl.bfloat16), mask=here[:, None, None] & (eight < NOPE // 8)[:, :, None])
    copy_rope(rope_ptr + (start // 2 + NOPE // 4), at, slot, here, NOPE)
