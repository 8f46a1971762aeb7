"""What a sequence keeps, in tensors of one shape: a step that reads only these is the same launches at every position.

Host values of :mod:`dsv4.backend.cache` are on the device here. Pages for all coming rows are taken beforehand, so
that page tables do not change; counts of entries become the number that there is room for, and what is not visible
yet is no key; a compressor's open window is a ring whose pooled row is stored only where the window is whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from dsv4.backend.cache import PooledCache, PooledLayer
from dsv4.backend.pool import PooledStore, slots_of
from dsv4.model.cache import Segment, Tail
from dsv4.model.memory import Closed
from kernels.compress.step_kernel import compress_step


@dataclass(frozen=True)
class MaybeClosed(Closed):
    """One window of a sequence: its entry's index (1,) int64 on the device, or -1 where it is not whole yet."""

    entry: Tensor

    @property
    def entries(self) -> Tensor:
        """As of a run of closed windows."""
        return self.entry


class OpenWindow:
    """Projected tokens that a compressor still needs, in a ring; takes one token a step.

    Parameters
    ----------
    tail : the same before the first step.
    ratio : tokens a window.
    before : tokens of the window before that an entry reads: ``ratio`` with overlap, else 0.
    length : tokens of the sequence.
    """

    def __init__(self, tail: Tail, ratio: int, before: int, length: int) -> None:
        self.ratio, self.before = ratio, before
        size, width = ratio + before, tail.kv.shape[1]
        self.kv, self.gate = tail.kv.new_zeros(size, width), tail.gate.new_full((size, width), -torch.inf)
        rows = torch.arange(length - len(tail.kv), length, device=tail.kv.device) % size
        self.kv[rows], self.gate[rows] = tail.kv, tail.gate
        self.rings: tuple[Tensor, Tensor] | None = None

    def add(
        self, segments: tuple[Segment, ...], positions: Tensor, kv: Tensor, gate: Tensor, bias: Tensor
    ) -> tuple[Tensor, tuple[Closed, ...], Tensor]:
        """One token of each sequence of a batch whose windows are :meth:`beside` each other.

        Returns
        -------
        the pooled windows (B, D), which of them are whole, and the positions of their first tokens (B,)
        """
        assert self.rings is not None
        made = compress_step(
            kv, gate, *self.rings, bias, positions, ratio=self.ratio, overlap_windows=self.before > 0
        )
        closed = [
            MaybeClosed(segment, 0, 1, made.entries[row : row + 1]) for row, segment in enumerate(segments)
        ]
        return made.rows, tuple(closed), made.starts

    @staticmethod
    def beside(windows: "Sequence[OpenWindow]") -> None:
        """Have the rings of a batch's windows in one tensor each, (B, size, C)."""
        rings = (
            torch.stack([window.kv for window in windows]),
            torch.stack([window.gate for window in windows]),
        )
        for row, window in enumerate(windows):
            window.rings, window.kv, window.gate = rings, rings[0][row], rings[1][row]

    def tail(self, length: int) -> Tail:
        """What :class:`~dsv4.model.cache.Tail` keeps of a sequence of ``length`` tokens."""
        closed = length // self.ratio
        first = closed * self.ratio - self.before
        rows = self._rows(torch.tensor([first], device=self.kv.device), length - first)
        return Tail(kv=self.kv[rows], gate=self.gate[rows], closed=closed)

    def _rows(self, first: Tensor, count: int) -> Tensor:
        return (first + torch.arange(count, device=first.device)) % len(self.kv)


class FixedStore:
    """A :class:`~dsv4.backend.pool.PooledStore` with pages for ``rows`` rows, its table on the device."""

    def __init__(self, store: PooledStore, rows: int) -> None:
        store.have_pages(max(rows, 1))
        self.pool, self.rows = store.pool, rows
        # a page that was given back holds rows that no later token sees
        pages = [max(page, 0) for page in store.table]
        self.table = torch.tensor(pages, dtype=torch.int64, device=store.pool.device)
        self.together = self.table.int()[None]
        self.every = torch.zeros(1, dtype=torch.int32, device=store.pool.device)

    def reserve(self, rows: int) -> None:
        """Nothing: there are pages."""

    def slots(self, rows: Tensor) -> Tensor:
        """Slots of rows of any shape, int64; negative rows stay -1."""
        return slots_of(rows, self.table, self.pool.page_size)

    def tables(self, stores: "Sequence[FixedStore]") -> Tensor:
        """Page tables of the stores of :func:`joined` caches: (B, M) int32."""
        return self.together

    def owners(self, counts: Sequence[int]) -> Tensor:
        """Whose each of a step's rows is, one of each sequence: (B,) int32."""
        return self.every


class FixedCache:
    """A sequence's cache up to ``rows`` tokens, in tensors of one shape.

    Parameters
    ----------
    cache : PooledCache
    ratios : ``compress_ratios``.
    rows : tokens that there is room for.
    """

    def __init__(self, cache: PooledCache, ratios: Sequence[int], rows: int) -> None:
        self.cache, self.device = cache, cache.device
        self.layers = [
            _fixed(layer, ratio, cache.length, rows)
            for layer, ratio in zip(cache.layers, ratios, strict=True)
        ]

    def hand_back(self, steps: int) -> None:
        """Let the cache be as if it had taken ``steps`` tokens more."""
        length = self.cache.length + steps
        for layer, fixed in zip(self.cache.layers, self.layers, strict=True):
            layer.window.rows = length
            for name, window in fixed.tails.items():
                layer.tails[name] = window.tail(length)
                store = layer.entries if name == "compressor" else layer.index
                store.rows = length // window.ratio
        self.cache.advance(steps)


def joined(caches: Sequence[FixedCache]) -> Sequence[FixedCache]:
    """Caches of one batch: their stores have each other's page tables, and their windows one ring."""
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        for name in ("window", "entries", "index"):
            stores = [store for layer in layers if (store := getattr(layer, name)) is not None]
            if stores:
                together = torch.nn.utils.rnn.pad_sequence([store.table for store in stores], True).int()
                every = torch.arange(len(stores), dtype=torch.int32, device=together.device)
                for store in stores:
                    store.together, store.every = together, every
        for name in layers[0].tails:
            OpenWindow.beside([layer.tails[name] for layer in layers])
    return caches


def _fixed(layer: PooledLayer, ratio: int, length: int, rows: int) -> SimpleNamespace:
    before = ratio if layer.index is not None else 0  # CSA's windows overlap
    return SimpleNamespace(
        window=FixedStore(layer.window, rows),
        entries=FixedStore(layer.entries, rows // ratio) if ratio else None,
        index=FixedStore(layer.index, rows // ratio) if layer.index is not None else None,
        tails={name: OpenWindow(tail, ratio, before, length) for name, tail in layer.tails.items()},
    )
