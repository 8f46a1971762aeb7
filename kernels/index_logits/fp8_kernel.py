"""Weighted-ReLU MQA logits on E4M3 codes, Triton. The contract is kernels/index_logits/ref.py; only the limits differ.

A tile is BLOCK_N keys by all heads of one query: ``keys [BLOCK_N, D] @ q^T [D, H]`` on FP8 tensor cores, ReLU, head
weights and the sum over heads in registers. An entry's score is summed in one fixed order whatever else is in the
launch. Prefill keeps its keys and streams queries; decode keeps its query and streams keys by page.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build, Sizes
from kernels.overlap import OVERLAPPED, follow


class Tile(NamedTuple):
    """How a launch is cut: keys a tile, warps, stages."""

    keys: int
    warps: int
    stages: int


# One warpgroup a program and four programs a multiprocessor: one program's epilogue hides another's products.
PREFILL = Tile(keys=128, warps=4, stages=3)
ROWS = 64  # of prefill's programs
# 6 programs a multiprocessor with 3 stages of 64 keys each: one's products hide behind the others' copies. H200,
# 2026-11-30, before launches overlapped, us at (B, entries) = (1, 32K), (64, 8K), (64, 32K), (256, 8K), (256, 32K):
# 64 keys, 3 stages, 792 places 4.8 23.1 75.2 74.9 286; 64, 4, 528 4.8 23.8 78.8 78.8 298; 128, 4, 396 5.2 24.4 78.1
# 86.5 329; more programs than places 4.8 24.1 76.2 76.3 284. A Gluon kernel of one block a multiprocessor, three warp
# groups of products and one of copies, took 6.0 24.3 79.8 80.6 300.
DECODE = Tile(keys=64, warps=4, stages=3)
PLACES = 792  # of decode's programs on an H200
MIN_HEADS = 16  # narrowest second operand of a product
HEAD_DIM = 128
FILL = float("-inf")


@triton.jit
def weighted_relu(dots, weights):
    """``sum_h w[h] relu(dots[s, h])``: [S, H] FP32 and [H] FP32 -> [S] FP32; NaN passes the ReLU."""
    return tl.sum(tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :], 1)


@triton.jit
def load_query(ptr, H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr):
    """Codes of one query: [BLOCK_H, D], rows past H zero."""
    heads, dims = tl.arange(0, BLOCK_H), tl.arange(0, D)
    at = heads[:, None] * D + dims[None, :]
    if H == BLOCK_H:
        return tl.load(ptr + at)
    return tl.load(ptr + at, (heads < H)[:, None], other=0.0)


@triton.jit
def load_weights(ptr, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Weights of one query's heads: [BLOCK_H] FP32, zero past H."""
    heads = tl.arange(0, BLOCK_H)
    if H == BLOCK_H:
        return tl.load(ptr + heads)
    return tl.load(ptr + heads, heads < H, other=0.0)


@triton.jit
def store_scores(out_ptr, entries, scores, limit, C, FILL: tl.constexpr):
    """Scores [S] of entries [S] under the limit; with FILL, -inf from there to C."""
    if FILL:
        tl.store(out_ptr + entries, tl.where(entries < limit, scores, float("-inf")), entries < C)
    else:
        tl.store(out_ptr + entries, scores, entries < limit)


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
def _page_scales(scale_ptr, pages, entries, page_stride, limit, D: tl.constexpr, PAGE: tl.constexpr):
    """Scales of entries on their pages, behind the pages' codes: [S] FP32, 0 beyond the limit."""
    at = pages.to(tl.int64) * (page_stride // 4) + (PAGE * D // 4) + entries % PAGE
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
    limit = tl.minimum(tl.load(limit_ptr + row), C)
    first = tl.program_id(1) * tiles
    seen = tl.minimum(first + tiles, tl.cdiv(limit, BLOCK_N))
    q = load_query(q_ptr + row * (H * D), H, D, BLOCK_H)
    weights = load_weights(weight_ptr + row * H, H, BLOCK_H)
    table_ptr += sequence * table_stride
    out_ptr += row * out_stride
    dims, lanes = tl.arange(0, D), tl.arange(0, BLOCK_N)

    # page ids and scales are read one tile early: keys need not wait for the one, nor scores for the other
    entries = first * BLOCK_N + lanes
    pages = tl.load(table_ptr + entries // PAGE, entries < limit, other=0)
    scale = _page_scales(scale_ptr, pages, entries, page_stride, limit, D, PAGE)
    for tile in range(first, seen):
        entries = tile * BLOCK_N + lanes
        # page * page_stride outgrows int32 in a large pool
        at = pages.to(tl.int64) * page_stride + (entries % PAGE) * D
        keys = tl.load(page_ptr + at[:, None] + dims[None, :], (entries < limit)[:, None], other=0.0)
        ahead = entries + BLOCK_N
        pages = tl.load(table_ptr + ahead // PAGE, ahead < limit, other=0)
        next_scale = _page_scales(scale_ptr, pages, ahead, page_stride, limit, D, PAGE)
        scores = weighted_relu(tl.dot(keys, tl.trans(q)), weights) * scale
        store_scores(out_ptr, entries, scores, limit, C, FILL)
        scale = next_scale
    if FILL:
        hidden = tl.full((BLOCK_N,), float("-inf"), tl.float32)
        for tile in range(tl.maximum(first, seen), first + tiles):
            entries = tile * BLOCK_N + lanes
            tl.store(out_ptr + entries, hidden, entries < C)


def check_pages(op: str, pages: Tensor, page_size: int, entry_bytes: int) -> None:
    """Refuse pages that do not hold ``page_size`` entries, or whose rows 16-byte loads cannot start at."""
    found = f"{op}: pages of shape {tuple(pages.shape)} and strides {pages.stride()}"
    if page_size < 1 or pages.shape[1] < page_size * entry_bytes:
        raise ValueError(f"{found} do not hold page_size = {page_size} entries of {entry_bytes} bytes")
    if pages.stride(0) % 16 or pages.data_ptr() % 16:
        raise ValueError(f"{found} must start, and follow each other, at multiples of 16 bytes")


def paged_out(out: Tensor | None, B: int, N: int, width: int, device: torch.device) -> Tensor:
    """The scores' tensor (B, N, width): a new one, or the caller's where its rows are evenly spaced."""
    if out is None:
        return torch.empty(B, N, width, dtype=torch.float32, device=device)
    check("paged_index_logits", out=(out, f"{B} {N} {width}", torch.float32))
    if B > 1 and out.stride(0) != N * out.stride(1):
        raise ValueError(
            f"paged_index_logits: out of strides {out.stride()}: rows must be {out.stride(1)} apart"
        )
    return out


def tiles_a_program(rows: int, width: int, keys: int, places: int) -> int:
    """Tiles of so many keys that one program walks: as many programs as there are places, so that none waits."""
    return triton.cdiv(triton.cdiv(width, keys), max(1, places // rows))


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
    decode = Build(
        name=f"index_logits/decode/{sizes.name}",
        kernel=paged_kernel,
        signature={
            "q_ptr": "*fp8e4nv",
            "page_ptr": "*fp8e4nv",
            "scale_ptr": "*fp32",
            "table_ptr": "*i32",
            "weight_ptr": "*fp32",
            "limit_ptr": "*i32",
            "out_ptr": "*fp32",
            "N": "i32",
            "C": "i32",
            "page_stride": "i32",
            "table_stride": "i32",
            "out_stride": "i32",
            "tiles": "i32",
        },
        constants=constants | {"PAGE": 64, "BLOCK_N": DECODE.keys, "PDL": True},
        aligned=(
            "q_ptr",
            "page_ptr",
            "scale_ptr",
            "table_ptr",
            "weight_ptr",
            "limit_ptr",
            "out_ptr",
            "C",
            "page_stride",
            "out_stride",
        ),
        options={"num_warps": DECODE.warps, "num_stages": DECODE.stages, **OVERLAPPED},
        native=("fp8",),
    )
    return [prefill, decode]
