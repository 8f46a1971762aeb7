"""Test support: what forward passes wrote, by sequence and position, however they were batched and chunked."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.model.cache import SequenceCache
from dsv4.model.paged import PagedStore
from dsv4.model.transformer import Transformer
from dsv4.taps import BY_NAME, MODEL
from kernels.linear.ref import Activation

Key = tuple[int | str, str]


@dataclass
class Trace:
    """One sequence: its taps with axis 0 = position or entry, and the bytes that its cache holds."""

    taps: dict[Key, Tensor] = field(default_factory=dict)
    stored: dict[Key, Tensor] = field(default_factory=dict)


def trace(
    model: Transformer,
    sequences: list[Tensor],
    calls: list[list[int]] | None = None,
    caches: list[SequenceCache] | None = None,
) -> list[Trace]:
    """Run ``sequences``, in each call the next ``calls[i][s]`` tokens of sequence s; default: all at once."""
    calls = calls or [[len(tokens) for tokens in sequences]]
    caches = caches or [model.new_cache() for _ in sequences]
    traces = [Trace() for _ in sequences]
    done = [0] * len(sequences)
    for lengths in calls:
        starts = [cache.length for cache in caches]
        chunks = [s[at : at + n] for s, at, n in zip(sequences, done, lengths, strict=True)]
        done = [at + n for at, n in zip(done, lengths, strict=True)]
        pieces: dict[Key, Any] = {}

        def probe(layer: int | str, name: str, value: Any, pieces: dict[Key, Any] = pieces) -> Any:
            if not name.endswith("_closed"):
                pieces[layer, name] = value.dequantised() if isinstance(value, Activation) else value
            return value

        model.forward(caches, chunks, probe)
        for key, value in pieces.items():
            for seq, piece in enumerate(value.split(_counts(model, key, starts, lengths))):
                _append(traces[seq].taps, key, piece)
    assert done == [len(tokens) for tokens in sequences], "calls do not cover the sequences"
    for one, cache in zip(traces, caches, strict=True):
        one.stored = cache_bytes(cache)
    return traces


def _counts(model: Transformer, key: Key, starts: list[int], lengths: list[int]) -> list[int]:
    """Rows, or entries closed, that each sequence has in this call's tensor."""
    layer, name = key
    if layer == MODEL or BY_NAME[name].axis == "row":
        return lengths
    ratio = model.config.compress_ratios[int(layer)]
    return [(start + n) // ratio - start // ratio for start, n in zip(starts, lengths, strict=True)]


def _append(taps: dict[Key, Tensor], key: Key, piece: Tensor) -> None:
    if key not in taps:
        taps[key] = piece
        return
    before = taps[key]
    if key[1] == "index_scores":  # as wide as the entries of its call; what is beyond was not visible
        width = max(before.shape[1], piece.shape[1])
        before, piece = (pad(x, (0, width - x.shape[1]), value=-torch.inf) for x in (before, piece))
    taps[key] = torch.cat((before, piece))


def cache_bytes(cache: SequenceCache) -> dict[Key, Tensor]:
    """Bytes of every row that the cache still holds, and the compressors' tails."""
    held: dict[Key, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        slots = layer.window.slots
        assert slots is not None
        held[index, "window"] = raw_rows(layer.window, range(max(cache.length - slots, 0), cache.length))
        for name, store in (("compressor", layer.entries), ("indexer", layer.index)):
            if store is not None:
                held[index, name] = raw_rows(store, range(layer.tails[name].closed))
        for name, tail in layer.tails.items():
            held[index, f"{name} kv"], held[index, f"{name} gate"] = tail.kv, tail.gate
    return held


def raw_rows(store: PagedStore, rows: range) -> Tensor:
    """Data and scale bytes (n, bytes) at logical rows: a page is the data of its tokens, then their scales."""
    size, data, scale = store.page_size, store.record.data_bytes, store.record.scale_bytes
    found = []
    for row in rows:
        slot = row if store.slots is None else row % store.slots
        page, at = store.pages[store.table[slot // size]], slot % size
        scales = page[size * data :]
        found.append(torch.cat((page[at * data : (at + 1) * data], scales[at * scale : (at + 1) * scale])))
    return torch.stack(found) if found else torch.empty(0, data + scale, dtype=torch.uint8)


def bits(x: Tensor) -> Tensor:
    """The tensor's bits, so that -0 differs from 0 and NaN equals itself."""
    return x.contiguous().view(torch.int32) if x.dtype == torch.float32 else x


def differing(one: Trace, other: Trace) -> list[str]:
    """Taps and stored bytes of ``one`` that are not bitwise ``other``'s, in the order they were written.

    ``one`` may be shorter: then it is compared with the start of ``other``, without the caches.
    """
    assert one.taps.keys() == other.taps.keys()
    names = []
    for key, value in one.taps.items():
        pair = [value, other.taps[key][: len(value)]]
        if key[1] == "index_scores":
            width = max(x.shape[1] for x in pair)
            pair = [pad(x, (0, width - x.shape[1]), value=-torch.inf) for x in pair]
        if not torch.equal(bits(pair[0]), bits(pair[1])):
            names.append(f"{key[0]}.{key[1]}")
    if len(one.taps[MODEL, "logits"]) == len(other.taps[MODEL, "logits"]):
        for key, value in one.stored.items():
            if not torch.equal(bits(value), bits(other.stored[key])):
                names.append(f"cache {key[0]}.{key[1]}")
    return names
