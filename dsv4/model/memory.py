"""Stages that read or write a cache: window rows, compressor, indexer, attention.

A batch is the rows of several sequences. These stages go segment by segment; everything else
in a layer is row by row. Compressed entries that a batch closes are one tensor, with the
segment and the index of each run of entries beside it (:class:`Closed`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.model.cache import Batch, Segment, Tail
from dsv4.model.config import CSA_RATIO
from dsv4.model.layer import Env, LayerBase, Written
from dsv4.model.records import Fp4Key
from dsv4.model.weights import CompressorWeights
from kernels.hadamard.ref import hadamard
from kernels.linear.ref import Activation


@dataclass(frozen=True)
class Closed:
    """Run of entries that one segment closed: entry ``first`` and the ``count - 1`` after it."""

    segment: Segment
    first: int
    count: int

    @property
    def entries(self) -> Tensor:
        """Their indices in the sequence, (count,) int64."""
        return torch.arange(self.first, self.first + self.count, device=self.segment.cache.device)


def store_window(at: LayerBase, env: Env, batch: Batch) -> Written:
    """Kv (T, K) to record bytes in each window ring; a segment's pool is what its rows may see."""
    data, scales = at.numerics.record.encode(env["kv"])
    values, _ = at.numerics.record.decode(data, scales)
    for segment in batch.segments:
        store = segment.cache.layers[at.layer].window
        first = max(segment.start - at.config.sliding_window + 1, 0)
        before, _ = store.read(torch.arange(first, segment.start, device=values.device))
        segment.pools[at.layer] = (torch.cat((before, values[segment.rows])), first)
        kept = slice(max(segment.rows.start, segment.rows.stop - store.slots), segment.rows.stop)
        positions = (
            segment.start - segment.rows.start + torch.arange(kept.start, kept.stop, device=values.device)
        )
        store.write(positions, data[kept], scales[kept])
    return {"kv_store": values, "kv_bytes": torch.cat((data, scales), dim=-1)}


def compress(at: LayerBase, env: Env, batch: Batch) -> Written:
    """attn_in (T, D) to the compressed rows that the batch closes: comp (E, K), FP32."""
    assert at.weights.compressor is not None
    comp, closed = _close_windows(at, env, batch, "compressor", at.weights.compressor)
    return {"comp_closed": closed, "comp": comp}


def index_keys(at: LayerBase, env: Env, batch: Batch) -> Written:
    """attn_in (T, D) to the index keys that the batch closes: index_k (E, D_I), FP32."""
    assert at.weights.indexer is not None
    keys, closed = _close_windows(at, env, batch, "indexer", at.weights.indexer.compressor)
    return {"index_closed": closed, "index_k": keys}


def _close_windows(
    at: LayerBase, env: Env, batch: Batch, name: str, weights: CompressorWeights
) -> tuple[Tensor, tuple[Closed, ...]]:
    """Project every row, pool the windows that are now whole; norm and RoPE at position w * ratio."""
    x = Activation(values=at.numerics.side(env["attn_in"]), narrow=at.numerics.activations)
    kv, gate = at.ops.linear(x, weights.kv), at.ops.linear(x, weights.gate)
    ratio = at.config.compress_ratios[at.layer]
    entries, closed = [], []
    for segment in batch.segments:
        pooled, first = _pool_segment(at, segment, name, weights, kv[segment.rows], gate[segment.rows])
        closed.append(Closed(segment, first, len(pooled)))
        positions = torch.arange(first, first + len(pooled), device=pooled.device) * ratio
        normed = at.ops.rmsnorm(pooled, weights.norm, eps=at.config.rms_norm_eps)
        entries.append(at.ops.rope(normed, *at.cos_sin(positions)))
    return torch.cat(entries), tuple(closed)


def _pool_segment(
    at: LayerBase, segment: Segment, name: str, weights: CompressorWeights, kv: Tensor, gate: Tensor
) -> tuple[Tensor, int]:
    """Pooled entries of one sequence's newly whole windows, and the index of the first."""
    ratio, overlap = at.config.compress_ratios[at.layer], at.config.kind(at.layer) == "csa"
    tails = segment.cache.layers[at.layer].tails
    tail = tails.get(name) or first_tail(kv, ratio if overlap else 0)
    kv, gate = torch.cat((tail.kv, kv)), torch.cat((tail.gate, gate))
    whole = (len(kv) - (ratio if overlap else 0)) // ratio
    used = whole * ratio + (ratio if overlap else 0)
    biased = (gate[:used].unflatten(0, (-1, ratio)).double() + weights.position_bias.double()).flatten(0, 1)
    slots = at.ops.compress_windows(kv[:used], biased, ratio, overlap=overlap)
    kept = whole * ratio
    tails[name] = Tail(kv=kv[kept:].clone(), gate=gate[kept:].clone(), closed=tail.closed + whole)
    return at.ops.compress_pool(*slots), tail.closed


def first_tail(like: Tensor, rows: int) -> Tail:
    """Before the first window there is nothing: its gate is -inf."""
    return Tail(kv=like.new_zeros(rows, like.shape[1]), gate=like.new_full((rows, like.shape[1]), -torch.inf))


def store_entries(at: LayerBase, env: Env, batch: Batch) -> Written:
    """Comp (E, K) to record bytes in each sequence's pages."""
    record = at.numerics.record
    data, scales = record.encode(env["comp"])
    for closed, rows in runs(env["comp_closed"]):
        store = closed.segment.cache.layers[at.layer].entries
        assert store is not None
        store.write(closed.entries, data[rows], scales[rows])
    return {"comp_store": record.decode(data, scales)[0], "comp_bytes": torch.cat((data, scales), dim=-1)}


def store_index_keys(at: LayerBase, env: Env, batch: Batch) -> Written:
    """index_k (E, D_I) to key bytes in each sequence's pages; the tap is in the unrotated basis."""
    record = at.numerics.index_record
    data, scales = record.encode(env["index_k"])
    for closed, rows in runs(env["index_closed"]):
        store = closed.segment.cache.layers[at.layer].index
        assert store is not None
        store.write(closed.entries, data[rows], scales[rows])
    values, scale = record.decode(data, scales)
    values = values if scale is None else values * scale
    return {"index_k_store": hadamard(values) if isinstance(record, Fp4Key) else values}


def runs(closed: tuple[Closed, ...]) -> Iterator[tuple[Closed, slice]]:
    """Each segment's run of entries and its rows in the batch's tensor of them."""
    row = 0
    for run in closed:
        yield run, slice(row, row + run.count)
        row += run.count


def index_scores(at: LayerBase, env: Env, batch: Batch) -> Written:
    """Scores of every row against its sequence's keys: (T, C) FP32, -inf where not visible."""
    num = at.numerics
    scored = []
    for segment in batch.segments:
        cache = segment.cache.layers[at.layer]
        assert cache.index is not None
        keys, key_scale = cache.index.read(
            torch.arange(cache.tails["indexer"].closed, device=segment.cache.device)
        )
        q, weights = num.index_query(env["index_q"][segment.rows], env["index_w"][segment.rows])
        scores = at.ops.index_logits(
            q,
            keys,
            weights,
            key_scale=None if key_scale is None else key_scale.squeeze(-1),
            narrow=num.index_narrow,
        )
        visible = (batch.positions[segment.rows] + 1) // CSA_RATIO
        entries = torch.arange(len(keys), device=keys.device)
        scored.append(scores.masked_fill(entries >= visible[:, None], -torch.inf))
    width = max((scores.shape[1] for scores in scored), default=0)
    padded = [torch.nn.functional.pad(s, (0, width - s.shape[1]), value=-torch.inf) for s in scored]
    return {"index_scores": torch.cat(padded)}


def attend(at: LayerBase, env: Env, batch: Batch) -> Written:
    """Attention of every row over its window and its entries, then the inverse RoPE."""
    num = at.numerics
    outs, lses = [], []
    for segment in batch.segments:
        pool, idx = _visible_rows(at, env, batch, segment)
        out, lse = at.ops.sparse_attn(
            env["q"][segment.rows],
            num.read(pool),
            idx,
            at.weights.sinks,
            n_rope=at.config.qk_rope_head_dim,
            scale=at.config.head_dim**-0.5,
            at=num.attn,
        )
        outs.append(out)
        lses.append(lse)
    turned = at.ops.rope(torch.cat(outs), *at.cos_sin(batch.positions), inverse=True, out=num.attn_out)
    return {"attn_out": turned, "lse": torch.cat(lses)}


def _visible_rows(at: LayerBase, env: Env, batch: Batch, segment: Segment) -> tuple[Tensor, Tensor]:
    """Pool (N, K) of a segment and the rows of it that each of its queries attends to (T, S)."""
    positions = batch.positions[segment.rows]
    window, first = segment.pools[at.layer]
    span = torch.arange(at.config.sliding_window, device=positions.device)
    slots = positions[:, None] - at.config.sliding_window + 1 + span
    idx = torch.where(slots >= 0, slots - first, -1)
    cache = segment.cache.layers[at.layer]
    if cache.entries is None:
        return window, idx
    count = cache.tails["compressor"].closed
    all_entries = torch.arange(count, device=positions.device)
    entries, _ = cache.entries.read(all_entries)
    if at.config.kind(at.layer) == "csa":
        chosen = env["topk"][segment.rows]
    else:
        visible = (positions + 1) // at.config.compress_ratios[at.layer]
        chosen = torch.where(all_entries < visible[:, None], all_entries, -1)
    offset = torch.where(chosen >= 0, chosen + len(window), -1)
    return torch.cat((window, entries)), torch.cat((idx, offset), dim=-1)
