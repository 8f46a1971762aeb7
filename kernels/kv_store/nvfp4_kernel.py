"""Cache write of kv as NVFP4 records, a row a program: the body of :func:`kernels.kv_store.kernel.store_nvfp4`."""

import triton
import triton.language as tl

from kernels.formats.device import bf16_bits
from kernels.formats.nvfp4_kernel import nvfp4_row
from kernels.rmsnorm.row_kernel import group_max, load_row, row_top


@triton.jit
def kv_store_nvfp4_kernel(
    kv_ptr,
    slot_ptr,
    pages_ptr,
    kv_stride,
    page_stride,
    PAGE: tl.constexpr,
    NOPE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Row of kv to its slot's codes, rope, scale bytes and gsa; nothing is written for a negative slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    at = kv_ptr + row * kv_stride
    x = load_row(at, NOPE, GROUPS)
    amax = group_max(x, GROUPS)
    word, scale, gsa = nvfp4_row(x, amax, row_top(amax), GROUPS)
    lane = tl.arange(0, 64)
    rope = tl.load(at + NOPE + lane).to(tl.float32)

    group = tl.arange(0, GROUPS)
    own = (slot >= 0) & (group < NOPE // 16)
    page, offset = slot // PAGE, slot % PAGE  # int64: page * stride passes 2^31
    start = pages_ptr + page * page_stride + offset * (NOPE // 2 + 128)
    word_at = start.to(tl.pointer_type(tl.int32)) + group[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(word_at, word.to(tl.int32, bitcast=True), own[:, None])
    rope_at = (start + NOPE // 2).to(tl.pointer_type(tl.uint16)) + lane
    tl.store(rope_at, bf16_bits(rope), slot >= 0)
    scales = pages_ptr + page * page_stride + PAGE * (NOPE // 2 + 128) + offset * (NOPE // 16 + 4)
    tl.store(scales + group, scale, own)
    gsa_bits = tl.where(gsa == gsa, gsa.to(tl.int32, bitcast=True), 0x7FC00000)  # one NaN, as in the ref
    tl.store((scales + NOPE // 16).to(tl.pointer_type(tl.int32)), gsa_bits, slot >= 0)
