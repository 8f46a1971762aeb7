"""Weighted-ReLU MQA logits on MXFP4, Triton. The contract is kernels/index_logits/ref.py on the dequantised values.

Without FP4 products (Hopper) a key's E2M1 codes become E4M3 by moving bits, exactly, and the query comes as E4M3 with
its groups' scales folded in (:func:`kernels.index_query.ref.folded`). A group of 32 is one step of the tensor core:
products of E2M1 are multiples of a quarter and their sum needs 13 bits, so it is exact even in the 14 bits of an FP8
accumulator; the groups meet in FP32 under the keys' scales. With FP4 products (Blackwell) one scaled product reads
both operands as stored.
"""

import triton
import triton.language as tl

from kernels.build_spec import Build, Sizes
from kernels.formats import device as fmt
from kernels.index_logits.paged_kernel import (
    HEAD_DIM,
    MIN_HEADS,
    Tile,
    hide_tiles,
    load_weights,
    page_ids,
    paged_build,
    scored_tiles,
    store_scores,
    weighted_relu,
)

GROUP = 32
GROUPS = HEAD_DIM // GROUP
ENTRY_BYTES = HEAD_DIM // 2 + GROUPS
TILE = Tile(keys=128, warps=4, stages=2)
PLACES = 396  # of programs on an H200


@triton.jit
def _load_group(q_ptr, group: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr):
    """E4M3 codes of one group of 32 of all heads: [BLOCK_H, 32], rows past H zero."""
    heads = tl.arange(0, BLOCK_H)
    at = heads[:, None] * D + group * 32 + tl.arange(0, 32)[None, :]
    if H == BLOCK_H:
        return tl.load(q_ptr + at)
    return tl.load(q_ptr + at, (heads < H)[:, None], other=0.0)


@triton.jit
def _places(pages, entries, page_stride, D: tl.constexpr, PAGE: tl.constexpr):
    """Bytes at which the codes and the scales of entries on their pages start: int64 [S], twice."""
    start = pages.to(tl.int64) * page_stride
    inside = entries % PAGE
    return start + inside * (D // 2), start + PAGE * (D // 2) + inside * (D // 32)


@triton.jit
def _group_dots(page_ptr, at, at_scale, there, q, group: tl.constexpr, BLOCK_N: tl.constexpr):
    """Products of one group under the keys' scales, times 2^-6: [BLOCK_N, BLOCK_H] FP32."""
    packed = tl.load(page_ptr + at[:, None] + group * 16 + tl.arange(0, 16)[None, :], there[:, None], other=0)
    # the exponent and mantissa of E2M1 in the lowest such bits of E4M3, whose bias is 6 more: times 2^-6, subnormal too
    low = ((packed & 7) << 2) | ((packed & 8) << 4)
    high = ((packed & 0x70) >> 2) | (packed & 0x80)
    keys = tl.reshape(tl.join(low, high), (BLOCK_N, 32)).to(tl.float8e4nv, bitcast=True)
    scale = fmt.ue8m0_value(tl.load(page_ptr + at_scale + group, there, other=0))
    return tl.dot(keys, tl.trans(q)) * scale[:, None]


@triton.jit
def folded_kernel(
    q_ptr,
    page_ptr,
    table_ptr,
    weight_ptr,
    limit_ptr,
    out_ptr,
    N,
    C,
    page_stride,
    table_stride,
    out_stride,
    tiles,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One query, E4M3 with its scales folded in, by some tiles of MXFP4 keys."""
    sequence = tl.program_id(2).to(tl.int64)
    row = sequence * N + tl.program_id(0)
    limit, first, seen = scored_tiles(limit_ptr, row, tiles, C, BLOCK_N)
    q_ptr += row * (H * D)
    q0, q1 = _load_group(q_ptr, 0, H, D, BLOCK_H), _load_group(q_ptr, 1, H, D, BLOCK_H)
    q2, q3 = _load_group(q_ptr, 2, H, D, BLOCK_H), _load_group(q_ptr, 3, H, D, BLOCK_H)
    weights = load_weights(weight_ptr + row * H, H, BLOCK_H)
    table_ptr += sequence * table_stride
    out_ptr += row * out_stride
    lanes = tl.arange(0, BLOCK_N)

    pages = page_ids(table_ptr, first, limit, PAGE, BLOCK_N)
    for tile in range(first, seen):
        entries = tile * BLOCK_N + lanes
        there = entries < limit
        at, at_scale = _places(pages, entries, page_stride, D, PAGE)
        pages = page_ids(table_ptr, tile + 1, limit, PAGE, BLOCK_N)  # one tile early
        dots = _group_dots(page_ptr, at, at_scale, there, q0, 0, BLOCK_N)
        dots += _group_dots(page_ptr, at, at_scale, there, q1, 1, BLOCK_N)
        dots += _group_dots(page_ptr, at, at_scale, there, q2, 2, BLOCK_N)
        dots += _group_dots(page_ptr, at, at_scale, there, q3, 3, BLOCK_N)
        store_scores(out_ptr, entries, weighted_relu(dots, weights) * 64.0, limit, C, FILL)
    if FILL:
        hide_tiles(out_ptr, tl.maximum(first, seen), first + tiles, C, BLOCK_N)


@triton.jit
def native_kernel(
    q_ptr,
    q_scale_ptr,
    page_ptr,
    table_ptr,
    weight_ptr,
    limit_ptr,
    out_ptr,
    N,
    C,
    page_stride,
    table_stride,
    out_stride,
    tiles,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One MXFP4 query by some tiles of MXFP4 keys, scaled products of both."""
    sequence = tl.program_id(2).to(tl.int64)
    row = sequence * N + tl.program_id(0)
    limit, first, seen = scored_tiles(limit_ptr, row, tiles, C, BLOCK_N)
    heads, half, groups = tl.arange(0, H), tl.arange(0, D // 2), tl.arange(0, D // 32)
    q = tl.load(q_ptr + row * (H * D // 2) + heads[:, None] * (D // 2) + half[None, :])
    q_scale = tl.load(q_scale_ptr + row * (H * D // 32) + heads[:, None] * (D // 32) + groups[None, :])
    weights = tl.load(weight_ptr + row * H + heads)
    # zeros that the compiler cannot see through: Triton 3.6 fails to build a scaled product of sm_100 that starts anew
    zeros = tl.full((BLOCK_N, H), 0.0, tl.float32) + tl.minimum(first, 0).to(tl.float32)
    table_ptr += sequence * table_stride
    out_ptr += row * out_stride
    lanes = tl.arange(0, BLOCK_N)

    pages = page_ids(table_ptr, first, limit, PAGE, BLOCK_N)
    for tile in range(first, seen):
        entries = tile * BLOCK_N + lanes
        there = entries < limit
        at, at_scale = _places(pages, entries, page_stride, D, PAGE)
        keys = tl.load(page_ptr + at[:, None] + half[None, :], there[:, None], other=0)
        scale = tl.load(page_ptr + at_scale[:, None] + groups[None, :], there[:, None], other=0)
        pages = page_ids(table_ptr, tile + 1, limit, PAGE, BLOCK_N)
        dots = tl.dot_scaled(keys, scale, "e2m1", tl.trans(q), q_scale, "e2m1", acc=zeros)
        store_scores(out_ptr, entries, weighted_relu(dots, weights), limit, C, FILL)
    if FILL:
        hide_tiles(out_ptr, tl.maximum(first, seen), first + tiles, C, BLOCK_N)


def builds(sizes: Sizes) -> list[Build]:
    """Decode on hardware without FP4 products, and with them."""
    H = sizes.index_n_heads
    return [
        paged_build(
            f"index_logits/fp4_folded/{sizes.name}",
            folded_kernel,
            {"q_ptr": "*fp8e4nv", "page_ptr": "*u8"},
            TILE,
            {"H": H, "BLOCK_H": max(MIN_HEADS, triton.next_power_of_2(H))},
            native=("fp8",),
        ),
        paged_build(
            f"index_logits/fp4_native/{sizes.name}",
            native_kernel,
            {"q_ptr": "*u8", "q_scale_ptr": "*u8", "page_ptr": "*u8"},
            TILE,
            {"H": H},
            native=("mxfp4",),
            only=("sm_100a", "sm_103a", "sm_120a"),
        ),
    ]
