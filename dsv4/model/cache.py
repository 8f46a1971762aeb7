"""What a sequence keeps between calls: window ring, compressed entries, index keys, compressor tails."""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4.model.config import ModelConfig
from dsv4.model.numerics import Numerics
from dsv4.model.paged import PagedStore


@dataclass
class Tail:
    """Projected tokens that a compressor still needs: the open window, and with overlap the one before.

    kv, gate : (n, C) FP32; ``closed`` windows have been emitted.
    """

    kv: Tensor
    gate: Tensor
    closed: int = 0


@dataclass
class LayerCache:
    """One layer of one sequence."""

    window: PagedStore
    entries: PagedStore | None = None
    index: PagedStore | None = None
    tails: dict[str, Tail] = field(default_factory=dict)

    def copy(self) -> "LayerCache":
        """The same rows in pages of their own; tails are replaced and never written to, so both may hold one."""
        stores = {name: store and store.copy() for name, store in vars(self).items() if name != "tails"}
        return LayerCache(**stores, tails=dict(self.tails))


class SequenceCache:
    """All layers of one sequence.

    Parameters
    ----------
    config : ModelConfig
    numerics : Numerics
        Its records set the byte formats.
    page_size : int
    window_capacity : int or None
        Rows that the window store keeps; None: ``sliding_window``, a ring.
    device : of the pages.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        *,
        page_size: int = 64,
        window_capacity: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.length, self.device = 0, torch.device(device)
        self.layers = [
            LayerCache(
                window=PagedStore(
                    numerics.record, page_size, window_capacity or config.sliding_window, device
                ),
                entries=PagedStore(numerics.record, page_size, device=device) if ratio else None,
                index=PagedStore(numerics.index_record, page_size, device=device)
                if config.kind(layer) == "csa"
                else None,
            )
            for layer, ratio in enumerate(config.compress_ratios)
        ]

    def copy(self) -> "SequenceCache":
        """The same tokens in pages of their own, so that a pass over one can be thrown away."""
        other = copy.copy(self)
        other.layers = [layer.copy() for layer in self.layers]
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of all pages in use."""
        stores = [store for layer in self.layers for store in (layer.window, layer.entries, layer.index)]
        return sum(store.nbytes for store in stores if store is not None)


@dataclass
class Segment:
    """The rows of one sequence inside a batch, and what attention reads for them.

    Attributes
    ----------
    cache : SequenceCache
    rows : the batch's rows that belong to it.
    start : position of its first row.
    pools : layer -> (values (N, K) FP32, position of the first): window rows that its rows may see.
    """

    cache: SequenceCache
    rows: slice
    start: int
    pools: dict[int, tuple[Tensor, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """Rows of several sequences, one after the other, never padded.

    positions, tokens : (T,) int64
    """

    positions: Tensor
    tokens: Tensor
    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.positions)


def next_batch(caches: list[SequenceCache], chunks: list[Tensor]) -> Batch:
    """Batch of each sequence's next tokens (a chunk of any length, 0 allowed) after its cached ones."""
    segments, positions, row = [], [], 0
    for cache, chunk in zip(caches, chunks, strict=True):
        segments.append(Segment(cache=cache, rows=slice(row, row + len(chunk)), start=cache.length))
        positions.append(torch.arange(cache.length, cache.length + len(chunk), device=chunk.device))
        row += len(chunk)
    return Batch(positions=torch.cat(positions), tokens=torch.cat(chunks).long(), segments=tuple(segments))
