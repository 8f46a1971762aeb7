"""What the kernels over a paged cache share: a program's tiles, entries that stay hidden, arguments and launch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import check
from kernels.build_spec import Build

MIN_HEADS = 16  # narrowest second operand of a product
HEAD_DIM = 128


class Tile(NamedTuple):
    """How a launch is cut: keys a tile, warps, stages."""

    keys: int
    warps: int
    stages: int


@triton.jit
def load_weights(ptr, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Weights of one query's heads: [BLOCK_H] FP32, zero past H."""
    heads = tl.arange(0, BLOCK_H)
    if H == BLOCK_H:
        return tl.load(ptr + heads)
    return tl.load(ptr + heads, heads < H, other=0.0)


@triton.jit
def weighted_relu(dots, weights):
    """``sum_h w[h] relu(dots[s, h])``: [S, H] FP32 and [H] FP32 -> [S] FP32; NaN passes the ReLU."""
    return tl.sum(tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :], 1)


@triton.jit
def store_scores(out_ptr, entries, scores, limit, C, FILL: tl.constexpr):
    """Scores [S] of entries [S] under the limit; with FILL, -inf from there to C."""
    if FILL:
        tl.store(out_ptr + entries, tl.where(entries < limit, scores, float("-inf")), entries < C)
    else:
        tl.store(out_ptr + entries, scores, entries < limit)


@triton.jit
def scored_tiles(limit_ptr, row, tiles, C, BLOCK_N: tl.constexpr):
    """Limit of the row, first tile of this program (of ``tiles``), and where the tiles under the limit end."""
    limit = tl.minimum(tl.load(limit_ptr + row), C)
    first = tl.program_id(1) * tiles
    return limit, first, tl.minimum(first + tiles, tl.cdiv(limit, BLOCK_N))


@triton.jit
def page_ids(table_ptr, tile, limit, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of a tile that lies within one: a scalar. Else the pages of its entries: [BLOCK_N]. 0 past the limit.

    int32, though page * page_stride outgrows it in a large pool.
    """
    entries = tile * BLOCK_N
    if PAGE % BLOCK_N != 0:
        entries += tl.arange(0, BLOCK_N)
    return tl.load(table_ptr + entries // PAGE, entries < limit, other=0)


@triton.jit
def hide_tiles(out_ptr, first, stop, C, BLOCK_N: tl.constexpr):
    """-inf to all entries of the tiles from ``first`` to ``stop``."""
    hidden = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    for tile in range(first, stop):
        entries = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(out_ptr + entries, hidden, entries < C)


def check_pages(op: str, pages: Tensor, page_size: int, entry_bytes: int) -> None:
    """Refuse pages that do not hold ``page_size`` entries."""
    if page_size < 1 or pages.shape[1] < page_size * entry_bytes:
        raise ValueError(
            f"{op}: pages of shape {tuple(pages.shape)} do not hold page_size = {page_size} entries of"
            f" {entry_bytes} bytes"
        )


def paged_out(op: str, out: Tensor | None, B: int, N: int, width: int, device: torch.device) -> Tensor:
    """The scores' tensor (B, N, width): a new one, or the caller's where its rows are evenly spaced."""
    if out is None:
        return torch.empty(B, N, width, dtype=torch.float32, device=device)
    check(op, out=(out, f"{B} {N} {width}", torch.float32))
    if B > 1 and out.stride(0) != N * out.stride(1):
        raise ValueError(f"{op}: out of strides {out.stride()}: rows must be {out.stride(1)} apart")
    return out


def tiles_a_program(rows: int, width: int, keys: int, places: int) -> int:
    """Tiles of so many keys that one program walks: as many programs as there are places, so that none waits."""
    return triton.cdiv(triton.cdiv(width, keys), max(1, places // rows))


def launch(
    kernel: Any,
    operands: tuple[Tensor, ...],
    rows: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    page_bytes: int,
    tile: Tile,
    places: int,
    constants: Mapping[str, Any],
) -> None:
    """Launch on checked arguments: ``operands`` are queries and keys, ``rows`` page table, weights and limits.

    ``constants`` hold launch options too; ``places`` is how many programs are to share the tiles.
    """
    B, N, width = out.shape
    if not out.numel():
        return
    tiles = tiles_a_program(B * N, width, tile.keys, places)
    kernel[(N, triton.cdiv(width, tiles * tile.keys), B)](
        *operands,
        *rows,
        out,
        N,
        width,
        page_bytes,
        rows[0].stride(0),
        out.stride(1),
        tiles,
        D=HEAD_DIM,
        BLOCK_N=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **constants,
    )


def paged_build(
    name: str,
    kernel: Any,
    operands: Mapping[str, str],
    tile: Tile,
    constants: Mapping[str, Any],
    *,
    options: Mapping[str, Any] | None = None,
    native: tuple[Any, ...] = (),
    only: tuple[str, ...] = (),
) -> Build:
    """Build of a kernel of :func:`launch`, pages of 64 entries, hidden entries left as they were."""
    pointers = {
        **operands,
        "table_ptr": "*i32",
        "weight_ptr": "*fp32",
        "limit_ptr": "*i32",
        "out_ptr": "*fp32",
    }
    integers = ("N", "C", "page_stride", "table_stride", "out_stride", "tiles")
    return Build(
        name=name,
        kernel=kernel,
        signature={**pointers, **dict.fromkeys(integers, "i32")},
        constants={"D": HEAD_DIM, "PAGE": 64, "FILL": False, "BLOCK_N": tile.keys, **constants},
        aligned=(*pointers, "C", "page_stride", "out_stride"),
        options={"num_warps": tile.warps, "num_stages": tile.stages, **(options or {})},
        native=native,
        only=only,
    )
