"""Weighted-ReLU MQA logits on E4M3 codes, Triton. The contract is kernels/index_logits/ref.py; only the limits differ.

A tile is BLOCK_N keys by all heads of one query: ``keys [BLOCK_N, D] @ q^T [D, H]`` on FP8 tensor cores, ReLU, head
weights and the sum over heads in registers. An entry's score is summed in one fixed order whatever else is in the
launch. Prefill keeps its keys and streams queries; decode keeps its query and streams keys by page.
"""

import triton
import triton.language as tl

from kernels.build_spec import Build, Sizes
from kernels.index_logits.paged_kernel import (
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
from kernels.overlap import OVERLAPPED, follow

# One warpgroup a program and four programs a multiprocessor: one program's epilogue hides another's products.
PREFILL = Tile(keys=128, warps=4, stages=3)
ROWS = 64  # of prefill's programs
# 6 programs a multiprocessor with 3 stages of 64 keys each: one's products hide behind the others' copies. H200,
# 2026-11-30, us at (B, entries) = (1, 32K), (64, 8K), (64, 32K), (256, 8K), (256, 32K): 3.7 20.5 73.9 74.3 285
# (DeepGEMM 4.5 22.0 75.0 75.3 282); a page id for each key 4.4 22.7 81.1 80.7 326; 4 stages, 660 places 4.2 22.4 76.5
# 78.3 298; 1584 places 4.1 22.6 74.3 74.6 284; keys by TMA 4.0 21.0 74.4 74.9 285; all rows' tiles shared evenly, so
# that a program walks over the end of a row, 4.3 21.7 74.4 74.7 282. More: docs/evidence/indexer.md.
DECODE = Tile(keys=64, warps=4, stages=3)
PLACES = 792  # of decode's programs on an H200


@triton.jit
def load_query(ptr, H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr):
    """Codes of one query: [BLOCK_H, D], rows past H zero."""
    heads, dims = tl.arange(0, BLOCK_H), tl.arange(0, D)
    at = heads[:, None] * D + dims[None, :]
    if H == BLOCK_H:
        return tl.load(ptr + at)
    return tl.load(ptr + at, (heads < H)[:, None], other=0.0)


@triton.jit
def prefill_kernel(
    q_ptr,
    key_ptr,
    key_scale_ptr,
    weight_ptr,
    limit_ptr,
    out_ptr,
    T,
    C,
    out_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """BLOCK_N contiguous keys by BLOCK_T queries."""
    # key blocks are the fast axis: the programs that run together share their queries through the L2 cache
    start = tl.program_id(0) * BLOCK_N
    entries = start + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * BLOCK_T
    stop = tl.minimum(first + BLOCK_T, T)
    rows = first + tl.arange(0, BLOCK_T)
    first_row = first.to(tl.int64)  # row * out_stride outgrows int32 on a long prompt
    furthest = tl.max(tl.load(limit_ptr + rows, rows < T, other=0))
    if start < furthest:
        dims = tl.arange(0, D)
        at = tl.arange(0, BLOCK_N)[:, None] * D + dims[None, :]
        keys = tl.load(key_ptr + start.to(tl.int64) * D + at, (entries < C)[:, None], other=0.0)
        scale = tl.load(key_scale_ptr + entries, entries < C, other=0.0)
        for step in range(stop - first):
            row = first_row + step
            limit = tl.minimum(tl.load(limit_ptr + row), C)
            weights = load_weights(weight_ptr + row * H, H, BLOCK_H)
            q = load_query(q_ptr + row * (H * D), H, D, BLOCK_H)
            scores = weighted_relu(tl.dot(keys, tl.trans(q)), weights) * scale
            store_scores(out_ptr + row * out_stride, entries, scores, limit, C, FILL)
    elif FILL:
        hidden = tl.full((BLOCK_N,), float("-inf"), tl.float32)
        for step in range(stop - first):
            tl.store(out_ptr + (first_row + step) * out_stride + entries, hidden, entries < C)


@triton.jit
def _page_keys(
    page_ptr, pages, tile, page_stride, limit, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Codes of a tile's entries: [BLOCK_N, D]; beyond the limit 0, or what is there if the tile is on one page."""
    entries = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    at = pages.to(tl.int64) * page_stride + (entries % PAGE) * D
    at = at[:, None] + tl.arange(0, D)[None, :]
    if PAGE % BLOCK_N == 0:
        return tl.load(page_ptr + at)
    else:
        return tl.load(page_ptr + at, (entries < limit)[:, None], other=0.0)


@triton.jit
def _page_scales(
    scale_ptr, pages, tile, page_stride, limit, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Scales of a tile's entries, behind the pages' codes: [BLOCK_N] FP32; beyond the limit as the codes."""
    entries = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    at = pages.to(tl.int64) * (page_stride // 4) + (PAGE * D // 4) + entries % PAGE
    if PAGE % BLOCK_N == 0:
        return tl.load(scale_ptr + at, tile * BLOCK_N < limit, other=0.0)
    else:
        return tl.load(scale_ptr + at, entries < limit, other=0.0)


@triton.jit
def paged_kernel(
    q_ptr,
    page_ptr,
    scale_ptr,
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
    PDL: tl.constexpr,
):
    """One query by some tiles of BLOCK_N keys, found through the page table."""
    # queries of one sequence are the fast axis: they share its keys through the L2 cache
    sequence = tl.program_id(2).to(tl.int64)
    row = sequence * N + tl.program_id(0)
    follow(PDL)
    limit, first, seen = scored_tiles(limit_ptr, row, tiles, C, BLOCK_N)
    q = load_query(q_ptr + row * (H * D), H, D, BLOCK_H)
    weights = load_weights(weight_ptr + row * H, H, BLOCK_H)
    table_ptr += sequence * table_stride
    out_ptr += row * out_stride
    lanes = tl.arange(0, BLOCK_N)

    # page ids and scales are read one tile early: keys need not wait for the one, nor scores for the other
    pages = page_ids(table_ptr, first, limit, PAGE, BLOCK_N)
    scale = _page_scales(scale_ptr, pages, first, page_stride, limit, D, PAGE, BLOCK_N)
    for tile in range(first, seen):
        entries = tile * BLOCK_N + lanes
        keys = _page_keys(page_ptr, pages, tile, page_stride, limit, D, PAGE, BLOCK_N)
        pages = page_ids(table_ptr, tile + 1, limit, PAGE, BLOCK_N)
        next_scale = _page_scales(scale_ptr, pages, tile + 1, page_stride, limit, D, PAGE, BLOCK_N)
        scores = weighted_relu(tl.dot(keys, tl.trans(q)), weights) * scale
        store_scores(out_ptr, entries, scores, limit, C, FILL)
        scale = next_scale
    if FILL:
        hide_tiles(out_ptr, tl.maximum(first, seen), first + tiles, C, BLOCK_N)


def builds(sizes: Sizes) -> list[Build]:
    """Prefill and decode at one model's shapes."""
    constants = {"H": sizes.index_n_heads, "D": sizes.index_head_dim, "FILL": False}
    constants["BLOCK_H"] = max(MIN_HEADS, triton.next_power_of_2(sizes.index_n_heads))
    prefill = Build(
        name=f"index_logits/prefill/{sizes.name}",
        kernel=prefill_kernel,
        signature={
            "q_ptr": "*fp8e4nv",
            "key_ptr": "*fp8e4nv",
            "key_scale_ptr": "*fp32",
            "weight_ptr": "*fp32",
            "limit_ptr": "*i32",
            "out_ptr": "*fp32",
            "T": "i32",
            "C": "i32",
            "out_stride": "i32",
        },
        constants=constants | {"BLOCK_N": PREFILL.keys, "BLOCK_T": ROWS},
        aligned=("q_ptr", "key_ptr", "key_scale_ptr", "weight_ptr", "limit_ptr", "out_ptr", "out_stride"),
        options={"num_warps": PREFILL.warps, "num_stages": PREFILL.stages},
        native=("fp8",),
    )
    decode = paged_build(
        f"index_logits/decode/{sizes.name}",
        paged_kernel,
        {"q_ptr": "*fp8e4nv", "page_ptr": "*fp8e4nv", "scale_ptr": "*fp32"},
        DECODE,
        {"H": constants["H"], "BLOCK_H": constants["BLOCK_H"], "PDL": True},
        options=OVERLAPPED,
        native=("fp8",),
    )
    return [prefill, decode]
