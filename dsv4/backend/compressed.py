"""Compressor and indexer on kernels: stages of :class:`dsv4.backend.stages.KernelLayerStages`."""

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4.backend.attention import record_taps, write_rows
from dsv4.backend.fixed import OpenWindow
from dsv4.backend.layer import Env, KernelLayer, Written
from dsv4.backend.pool import PagePool, put_bytes, stored_bytes
from dsv4.backend.scores import scores_by_einsum, scores_by_kernel
from dsv4.backend.values import Pending
from dsv4.backend.weights import NativeCompressor
from dsv4.model.cache import Batch, Segment, Tail
from dsv4.model.memory import Closed, first_tail
from dsv4.model.records import Fp4Key
from kernels.compress.kernel import compress as pool_windows
from kernels.hadamard.ref import hadamard
from kernels.index_key.kernel import store_index_keys
from kernels.index_topk.kernel import index_topk
from kernels.page_slots.kernel import row_slots
from kernels.rmsnorm.kernel import rmsnorm
from kernels.rope.kernel import rope

BF16, FP32 = torch.bfloat16, torch.float32


def compress(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """attn_in (T, D) to the compressed rows that the batch closes: comp (E, K), FP32."""
    assert at.native.compressor is not None
    pooled, closed, cos, sin = _close_windows(at, env, batch, "compressor", at.native.compressor)
    normed = rmsnorm(pooled, at.native.compressor.norm, eps=at.eps, dtype=FP32)
    # cast: exempt(the compressor's boundary: FP32 until the store narrows it, the architecture's memory budget)
    return {"comp_closed": closed, "comp": rope(normed, cos, sin, dtype=FP32)}


def comp_store(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """Comp (E, K) to record bytes in each sequence's pages, in one launch."""
    slots, pool = _entry_slots(at, env["comp_closed"], "entries")
    write_rows(pool, env["comp"], slots)
    values, raw = record_taps(pool, slots)
    return {"comp_store": values, "comp_bytes": raw}


def index_k(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """attn_in (T, D) to the index keys that the batch closes, (E, D_I), kept in registers until they are stored."""
    weights, eps = at.native.index_compressor, at.eps
    assert weights is not None
    pooled, closed, cos, sin = _close_windows(at, env, batch, "indexer", weights)

    def make(pooled: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rope(rmsnorm(pooled, weights.norm, eps=eps, dtype=FP32), cos, sin, dtype=FP32)

    pending = Pending(make, pooled, cos, sin)
    at.fused.keep("index_k", pending, (pooled, weights.norm, cos, sin))
    return {"index_closed": closed, "index_k": pending}


def index_k_store(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """index_k (E, D_I) to key bytes in each sequence's pages; the tap is in the unrotated basis."""
    slots, pool = _entry_slots(at, env["index_closed"], "index")
    fp4 = isinstance(pool.record, Fp4Key)
    parts = at.fused.take("index_k", env["index_k"])
    if parts is None:  # another value than index_k's: by the formats' own torch functions on the device
        value = env["index_k"]
        put_bytes(
            pool, slots, *pool.record.encode(value if isinstance(value, Tensor) else value.dequantised())
        )
    else:
        pooled, weight, cos, sin = parts
        page, form = pool.page_size, "fp4" if fp4 else "fp8"
        store_index_keys(pooled, weight, cos, sin, slots, pool.pages, eps=at.eps, page_size=page, form=form)

    def values(slots: Tensor) -> Tensor:
        keys, scale = pool.record.decode(*stored_bytes(pool, slots))
        return hadamard(keys) if fp4 else keys if scale is None else keys * scale

    return {"index_k_store": Pending(values, slots)}


def index_q(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """Qr and attn_in to the indexer's query (T, H_I, D_I) and head weights (T, H_I) FP32."""
    config, native = at.config, at.native
    assert native.index_q_b is not None
    assert native.index_weights is not None
    # cast: exempt(the FP32 copy is the tap's, as the quantiser saw it; the BF16 weight takes BF16 rows)
    q = native.index_q_b(env["qr"].to(BF16), BF16).unflatten(-1, (config.index_n_heads, -1))
    weights = native.index_weights(at.in_bf16(env["attn_in"]), BF16)
    scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    cos, sin = at.cos_sin(batch.positions)
    # cast: fixed(B2)
    scaled = Pending(lambda weights: (weights.double() * scale).float(), weights)
    if at.plan.index_score == "einsum_fp32":
        return {"index_q": rope(q, cos, sin), "index_w": scaled.dequantised()}
    pending = Pending(rope, q, cos, sin)
    at.fused.keep("index_q", pending, (q, cos, sin, weights, scale))
    at.fused.keep("index_w", scaled, True)
    return {"index_q": pending, "index_w": scaled}


def index_score(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """Scores of every row against its sequence's keys: (T, C) FP32, -inf where not visible."""
    fused, own = at.fused.take("index_q", env["index_q"]), at.fused.take("index_w", env["index_w"])
    if at.plan.index_score == "einsum_fp32":
        # cast: fixed(B2)
        return {"index_scores": scores_by_einsum(at, env["index_q"].float(), env["index_w"], batch)}
    given = fused if own else None
    q, weights = env["index_q"], env["index_w"]
    if given is None:
        q, weights = (x if isinstance(x, Tensor) else x.dequantised() for x in (q, weights))
    return {"index_scores": scores_by_kernel(at, q, weights, given, batch)}


def topk(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """index_scores (T, C) to the entries that each row attends to: topk (T, index_topk) int32."""
    return {"topk": index_topk(env["index_scores"], at.visible(batch.positions), at.config.index_topk)}


def _close_windows(
    at: KernelLayer, env: Env, batch: Batch, name: str, weights: NativeCompressor
) -> tuple[Tensor, tuple[Closed, ...], Tensor, Tensor]:
    """Pooled windows that are now whole (E, C) FP32, whose they are, and the rotation at position w * ratio."""
    x = at.in_bf16(env["attn_in"])
    kv, gate = weights.kv(x, FP32), weights.gate(x, FP32)
    window = batch.segments[0].cache.layers[at.layer].tails.get(name)
    if isinstance(window, OpenWindow):
        rows, closed, starts = window.add(batch.segments, batch.positions, kv, gate, weights.position_bias)
        return rows, closed, *at.cos_sin(starts)
    ratio = at.config.compress_ratios[at.layer]
    pooled, runs = [], []
    for segment in batch.segments:
        rows, run = _pool(at, segment, name, weights, kv[segment.rows], gate[segment.rows])
        pooled.append(rows)
        runs.append(run)
    return torch.cat(pooled), tuple(runs), *at.cos_sin(torch.cat([run.entries for run in runs]) * ratio)


def _pool(
    at: KernelLayer, segment: Segment, name: str, weights: NativeCompressor, kv: Tensor, gate: Tensor
) -> tuple[Tensor, Closed]:
    """Pooled entries of one sequence's newly whole windows, and which they are."""
    ratio, overlap = at.config.compress_ratios[at.layer], at.config.kind(at.layer) == "csa"
    tails = segment.cache.layers[at.layer].tails
    before = ratio if overlap else 0
    tail = tails.get(name) or first_tail(kv, before)
    kv, gate = torch.cat((tail.kv, kv)), torch.cat((tail.gate, gate))
    whole = (len(kv) - before) // ratio
    used = whole * ratio + before
    bias = weights.position_bias
    pooled = pool_windows(kv[:used], gate[:used], bias, ratio=ratio, overlap=overlap)
    kept = whole * ratio
    tails[name] = Tail(kv=kv[kept:].clone(), gate=gate[kept:].clone(), closed=tail.closed + whole)
    return pooled, Closed(segment, tail.closed, len(pooled))


def _entry_slots(at: KernelLayer, closed: tuple[Closed, ...], which: str) -> tuple[Tensor, PagePool]:
    """Slots (E,) int64 of the entries that each segment closed, with pages for them, and their pool."""
    stores = [getattr(run.segment.cache.layers[at.layer], which) for run in closed]
    for store, run in zip(stores, closed, strict=True):
        store.reserve(run.first + run.count)
    first, entries = stores[0], closed[0].entries
    if len(closed) > 1:
        entries = torch.cat([run.entries for run in closed])
    owners = first.owners([run.count for run in closed])
    return row_slots(entries, first.tables(stores), owners, first.pool.page_size), first.pool


STAGES: dict[str, Callable[[KernelLayer, Env, Batch], Written]] = {
    "compress": compress,
    "comp_store": comp_store,
    "index_k": index_k,
    "index_k_store": index_k_store,
    "index_q": index_q,
    "index_score": index_score,
    "index_topk": topk,
}
