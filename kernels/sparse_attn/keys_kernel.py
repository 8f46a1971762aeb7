"""What the portable attention kernels share: where a key lies, its values, and how a row is finished.

A slot is page * page_size + offset of a token in the pages of :mod:`kernels.formats.kv_record` or of the aligned
record. An index list holds slots, or, with a page table, the sequence's own row numbers; -1 is no key.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.formats.device import ue8m0_value
from kernels.formats.kv_record import ROPE, RecordLayout
from kernels.page_slots.kernel import paged_slot

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GROUP = tl.constexpr(64)  # nope values under one scale
SCALE_BYTES = tl.constexpr(8)  # of a token: one a group, padded


@triton.jit
def own_rows(heads, BLOCK_H: tl.constexpr):
    """Row of this program, its heads [BLOCK_H], and their place among the results (or parts), both int64.

    A row's head tiles are neighbours: they run at once, and the later one finds the keys in L2.
    """
    head_tiles = tl.cdiv(heads, BLOCK_H)
    row = (tl.program_id(0) // head_tiles).to(tl.int64)  # slots and row * num_keys * K outgrow int32
    head = tl.program_id(0) % head_tiles * BLOCK_H + tl.arange(0, BLOCK_H)
    rows = tl.num_programs(0) // head_tiles
    return row, head, (tl.program_id(1) * rows + row) * heads + head


@triton.jit
def own_keys(num_keys, BLOCK_S: tl.constexpr):
    """First key of this program's split, and the end of it."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    tiles = tl.cdiv(num_keys, BLOCK_S)
    first = split * tiles // splits * BLOCK_S
    return first, tl.minimum((split + 1) * tiles // splits * BLOCK_S, num_keys)


@triton.jit
def key_slots(idx_ptr, table_ptr, sequence_ptr, row, key, num_keys, table_stride, PAGE: tl.constexpr):
    """Slots of a row's keys, int64 [BLOCK_S]; -1 where there is none or the list has ended."""
    index = tl.load(idx_ptr + row * num_keys + key, mask=key < num_keys, other=-1)
    if table_ptr is None:
        return index.to(tl.int64)
    else:
        table = table_ptr + tl.load(sequence_ptr + row).to(tl.int64) * table_stride
        return paged_slot(table, index, PAGE)


@triton.jit
def data_offset(slot, page_stride, PAGE: tl.constexpr, DATA: tl.constexpr):
    """Bytes from the first page to a slot's data, int64; of slot 0 for -1, whose loads are masked."""
    held = tl.maximum(slot, 0)
    return held // PAGE * page_stride + held % PAGE * DATA


@triton.jit
def scale_offset(slot, page_stride, PAGE: tl.constexpr, DATA: tl.constexpr):
    """Bytes from the first page to a slot's scale bytes, int64; of slot 0 for -1."""
    held = tl.maximum(slot, 0)
    return held // PAGE * page_stride + PAGE * DATA + held % PAGE * SCALE_BYTES


@triton.jit
def widened_nope(
    pages_ptr,
    slot,
    page_stride,
    PAGE: tl.constexpr,
    NOPE: tl.constexpr,
    SCALED: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Nope values [BLOCK_S, NOPE / 64 + 1, 64] BF16 of :func:`widened`; the last group is zeros.

    Without KEEP the codes leave the caches first: nothing near will read them again.
    """
    groups: tl.constexpr = NOPE // GROUP
    data: tl.constexpr = NOPE + 2 * GROUP
    group = tl.arange(0, groups + 1)[None, :, None]
    column = tl.arange(0, GROUP)[None, None, :]
    read = (slot >= 0)[:, None, None] & (group < groups)
    start = data_offset(slot, page_stride, PAGE, data)[:, None, None]
    policy: tl.constexpr = "" if KEEP else "evict_first"
    codes = tl.load(pages_ptr + start + group * GROUP + column, mask=read, other=0, eviction_policy=policy)
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if SCALED:
        scales = scale_offset(slot, page_stride, PAGE, data)[:, None, None] + group
        values = values * ue8m0_value(tl.load(pages_ptr + scales, mask=read, other=0))
    return values.to(tl.bfloat16)


@triton.jit
def widened(
    pages_ptr,
    rope_ptr,
    slot,
    page_stride,
    PAGE: tl.constexpr,
    NOPE: tl.constexpr,
    SCALED: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Values [BLOCK_S, NOPE + 64] BF16 of the keys at slots [BLOCK_S], exact; zeros where the slot is -1.

    ``rope_ptr`` is ``pages_ptr`` read as BF16. With SCALED the nope values are multiplied by the record's scale
    bytes, one a group; without (aligned record) the caller multiplies by the token's one scale. Without ROPE the
    last 64 columns are zeros.
    """
    rows: tl.constexpr = slot.shape[0]
    groups: tl.constexpr = NOPE // GROUP
    held = (slot >= 0)[:, None, None]
    group = tl.arange(0, groups + 1)[None, :, None]
    column = tl.arange(0, GROUP)[None, None, :]
    values = widened_nope(pages_ptr, slot, page_stride, PAGE, NOPE, SCALED, True)
    start = data_offset(slot, page_stride, PAGE, NOPE + 2 * GROUP)[:, None, None]
    if ROPE:
        rope = tl.load(
            rope_ptr + (start + NOPE) // 2 + column + group * 0, mask=held & (group == groups), other=0.0
        )
        values = tl.where(group < groups, values, rope)
    return tl.reshape(values, (rows, NOPE + GROUP))


@triton.jit
def running(peak, scores):
    """New running maximum [BLOCK_H], rounded up, and what exponents are taken against: 0 while no key was seen.

    An integer, so that a larger one changes p by a power of two: p rounds alike under any tile and any split.
    """
    highest = tl.maximum(peak, tl.ceil(tl.max(scores, 1)))
    return highest, tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def finish_row(peak, total, sinks_ptr, lse_at, head, heads):
    """Store the LSE of a row, or of its part, and give the reciprocal of its sum: FP32 [BLOCK_H].

    A whole row's sum has the sink in it and its LSE, natural, has not; a part's have no sink and the LSE is of base 2.
    Which it is, the grid says at run time: a constant would make every kernel two to compile. A row without keys
    (total 0) gets 0 and -inf; a NaN total stays NaN.
    """
    partial, own = tl.num_programs(1) > 1, head < heads
    against = tl.where(peak == float("-inf"), 0.0, peak)
    sink = tl.load(sinks_ptr + head, mask=own, other=0.0) * LOG2E
    denominator = total + tl.where(partial, 0.0, tl.exp2(sink - against))
    lse = log2_sum(peak, total) * tl.where(partial, 1.0, LN2)
    tl.store(lse_at, lse, mask=own)
    return tl.where(total == 0, 0.0, tl.div_rn(tl.full(total.shape, 1.0, tl.float32), denominator))


@triton.jit
def log2_sum(peak, total):
    """Base-2 logarithm of a sum kept as total * 2^peak; -inf for no key."""
    return tl.where(total == 0, float("-inf"), peak + tl.log2(total))


def check_keys(
    op: str,
    width: int,
    pages: Tensor,
    idx: Tensor,
    page_table: Tensor | None,
    sequence: Tensor | None,
    token_scale: Tensor | None = None,
    layout: type[RecordLayout] = RecordLayout,
) -> int:
    """Refuse pages, index list or page table that do not fit a head_dim of ``width``; else the page size.

    Pages are (P, page_bytes) uint8 of ``layout``'s records, or with ``token_scale`` (P, p) FP32 the aligned record's
    data (P, p, nope + 128). Pages start at multiples of 16 bytes.
    """
    shape = "P Z" if token_scale is None else f"P p {width - ROPE + 2 * ROPE}"
    check(
        op,
        dense=("idx", "sequence", "token_scale"),
        aligned={"pages": 16},
        pages=(pages, shape, torch.uint8),
        token_scale=(token_scale, "P p", torch.float32),
        idx=(idx, "T S", torch.int32),
        page_table=(page_table, "B M", torch.int32),
        sequence=(sequence, "T", torch.int32),
    )
    if width not in (256, 512):
        raise ValueError(f"{op}: head_dim must be 256 or 512, got {width}")
    if (page_table is None) != (sequence is None):
        raise ValueError(f"{op}: page_table and sequence come together")
    if token_scale is not None and pages.stride(1) != pages.shape[2]:
        raise ValueError(
            f"{op}: pages of shape {tuple(pages.shape)} and strides {pages.stride()}: a page is not dense"
        )
    return layout(width - ROPE).page_size(pages.shape[1]) if token_scale is None else pages.shape[1]
