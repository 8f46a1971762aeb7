"""Tiles of the portable kernels, and room for what a call writes."""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
from torch import Tensor

from kernels.arguments import FLOATS, Wanted
from kernels.sparse_attn.combine_kernel import launch as combine
from kernels.sparse_attn.combine_kernel import num_splits, parts_of

BLOCK = 64  # heads and keys of a tile, as splits are counted, on every path
ROOM = ("out", "lse", "part", "part_lse")
Family = Literal["hopper", "blackwell", "small"]  # 227 KB of shared memory; that and tensor memory; 99 KB
FAMILIES: dict[tuple[int, int], Family] = {(9, 0): "hopper", (10, 0): "blackwell", (10, 3): "blackwell"}


@dataclass(frozen=True)
class Tile:
    """Heads and keys of one step, warps, and tiles of keys in flight."""

    heads: int
    keys: int
    warps: int
    stages: int


# By head_dim over 256 and family. Gathered keys: q and K tiles of 64 x 512 BF16 are 64 KB each, so two K tiles fit
# beside q in Hopper's 227 KB, and no more heads or keys do; with 4 warps the 64 x 512 FP32 sums spill 1.7 KB. On
# Blackwell the compiler keeps one tile more. 99 KB hold 16 x 512 of q and 32 of K twice.
_GATHERED = {
    (True, "hopper"): Tile(64, 64, 8, 2),
    (True, "blackwell"): Tile(64, 32, 8, 2),
    (True, "small"): Tile(16, 32, 4, 2),
    (False, "hopper"): Tile(64, 64, 4, 2),
    (False, "blackwell"): Tile(64, 64, 4, 2),
    (False, "small"): Tile(32, 32, 4, 2),
}
# Keys read in place pass through registers on their way: 64 x 512 of them beside the sums spill 1.6 KB.
_IN_PLACE = {
    (True, "hopper"): Tile(64, 32, 8, 1),
    (True, "blackwell"): Tile(64, 32, 8, 1),
    (True, "small"): Tile(16, 32, 4, 1),
    (False, "hopper"): Tile(64, 32, 4, 1),
    (False, "blackwell"): Tile(64, 32, 4, 1),
    (False, "small"): Tile(32, 32, 4, 1),
}


@dataclass(frozen=True)
class Room:
    """Where a call writes: results, and parts of rows whose keys are split.

    Attributes
    ----------
    out : (T, H, K) BF16 or FP32
    lse : (T, H) FP32
    part, part_lse : (N, T, H, K) BF16 and (N, T, H) FP32, or None for one split
    """

    out: Tensor
    lse: Tensor
    part: Tensor | None
    part_lse: Tensor | None

    def __post_init__(self) -> None:
        """Refuse parts without their LSE, or the other way round."""
        if (self.part is None) != (self.part_lse is None):
            raise ValueError("Room: part and part_lse come together")

    @property
    def splits(self) -> int:
        """Splits of each row's keys."""
        return 1 if self.part is None else len(self.part)

    @property
    def written(self) -> tuple[Tensor, Tensor]:
        """What the attention kernel itself writes."""
        if self.part is None or self.part_lse is None:
            return self.out, self.lse
        return self.part, self.part_lse


def room(
    rows: int,
    heads: int,
    num_keys: int,
    width: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    splits: int | None = None,
) -> Room:
    """Allocate a call's results; ``splits`` None: by :func:`kernels.sparse_attn.combine_kernel.num_splits`."""
    count = splits or num_splits(rows, triton.cdiv(heads, BLOCK), num_keys, BLOCK)
    out = torch.empty(rows, heads, width, dtype=dtype, device=device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=device)
    parts = parts_of(count, rows, heads, width, device) if count > 1 else (None, None)
    return Room(out, lse, *parts)


def check_hopper(op: str, out: Tensor, splits: int, num_keys: int) -> None:
    """Refuse what no Hopper kernel writes.

    Parameters
    ----------
    out : (T, H, 512), or with ``splits`` in front.
    num_keys : keys of a row.

    Raises
    ------
    ValueError
        More splits than 64-key tiles, no keys, or an ``out`` that is not BF16.
    """
    if not 1 <= splits <= triton.cdiv(num_keys, BLOCK) or out.dtype != torch.bfloat16:
        raise ValueError(
            f"{op}: the Hopper kernel writes BF16 with at least 64 keys a split; asked for {out.dtype},"
            f" {splits} splits of {num_keys} keys"
        )


def joined(into: Room, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """A call's results, of parts if keys were split."""
    if into.part is not None and into.part_lse is not None:
        combine(into.part, into.part_lse, sinks, into.out, into.lse)
    return into.out, into.lse


def of_room(into: Room | None, width: str) -> dict[str, Wanted]:
    """What :func:`kernels.arguments.check` is to find of a room for T rows of H heads; all of it is dense."""
    out, lse, part, part_lse = (None,) * 4 if into is None else (getattr(into, name) for name in ROOM)
    return {
        "out": (out, f"T H {width}", FLOATS),
        "lse": (lse, "T H", torch.float32),
        "part": (part, f"N T H {width}", FLOATS),
        "part_lse": (part_lse, "N T H", torch.float32),
    }


def tile_of(heads: int, width: int, device: torch.device, *, gathered: bool, terms: int = 1) -> Tile:
    """Tile of the portable kernels on a device; under the interpreter Hopper's."""
    cuda = device.type == "cuda"
    family = FAMILIES.get(torch.cuda.get_device_capability(device), "small") if cuda else "hopper"
    return tile_for(heads, width, gathered=gathered, family=family, terms=terms)


def tile_for(heads: int, width: int, *, gathered: bool, family: Family, terms: int = 1) -> Tile:
    """Tile of a family: fewer heads than a tile's make it smaller, down to 16.

    Triton gives each of a step's products tensor memory of its own: with two terms of q, 17 products of 32 keys
    beside the sums take 528 columns of Blackwell's 512.
    """
    tile = (_GATHERED if gathered else _IN_PLACE)[width > 256, family]
    keys = tile.keys // 2 if family == "blackwell" and terms == 2 else tile.keys
    return Tile(min(tile.heads, max(16, triton.next_power_of_2(heads))), keys, tile.warps, tile.stages)
