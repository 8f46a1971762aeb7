"""Queries, the KV row, its cache and attention on kernels: stages of :class:`dsv4.backend.stages.KernelLayerStages`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.backend.layer import Env, KernelLayer, Written
from dsv4.backend.pool import PagePool, stored_bytes
from dsv4.backend.values import Pending
from dsv4.model.cache import Batch, Segment
from dsv4.model.records import Nvfp4Record
from kernels.gather_dequantise.kernel import gather_dequantise
from kernels.kv_norm_rope_store.kernel import kv_norm_rope_store, kv_norm_rope_store_aligned
from kernels.kv_store.kernel import store, store_aligned, store_nvfp4
from kernels.page_slots.kernel import key_slots, row_slots
from kernels.q_norm_rope_quantise.kernel import norm_rope
from kernels.q_norm_rope_quantise.ref import QuantisedQ
from kernels.q_norm_rope_quantise.ref import quantise as quantise_q
from kernels.rmsnorm.kernel import rmsnorm
from kernels.rope.kernel import rope
from kernels.sparse_attn.kernel import (
    room,
    sparse_attn_fp8,
    sparse_attn_gathered,
    sparse_attn_widened,
)
from kernels.sparse_attn.product import sparse_attn_product

BF16, FP32 = torch.bfloat16, torch.float32
GATHERED = 1 << 27  # values of the BF16 buffer at once: 256 MiB


def q_b(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """qr_q to q (T, H, K): BF16, or for FP8 attention what it makes its codes of, and BF16 when a tap asks."""
    q = at.linear(env["qr_q"], at.native.q_b).unflatten(-1, (at.config.num_attention_heads, -1))
    cos, sin = at.cos_sin(batch.positions)
    eps = at.eps
    if at.plan.q_format == "bf16":
        return {"q": norm_rope(q, cos, sin, eps=eps)}
    pending = Pending(lambda q, cos, sin: norm_rope(q, cos, sin, eps=eps), q, cos, sin)
    at.fused.keep("q", pending, (q, cos, sin))
    return {"q": pending}


def kv(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """attn_in_q to the KV vector (T, K): BF16, or kept in registers until it is stored."""
    raw = at.linear(at.read_also(env, "attn_in", at.native.q_a, at.native.kv), at.native.kv)
    weight, eps = at.native.kv_norm, at.eps
    cos, sin = at.cos_sin(batch.positions)
    if at.plan.kv_norm == "unfused":
        return {"kv": rope(rmsnorm(raw, weight, eps=eps), cos, sin)}

    def make(raw: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rope(rmsnorm(raw, weight, eps=eps, dtype=FP32), cos, sin, dtype=FP32)

    pending = Pending(make, raw, cos, sin)
    at.fused.keep("kv", pending, (raw, weight, cos, sin))
    return {"kv": pending}


def kv_store(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """Kv (T, K) into the window pages of each sequence, in one launch; its taps are read back from there."""
    stores, counts = _stores(at, batch, "window"), _counts(batch)
    for segment, window, count in zip(batch.segments, stores, counts, strict=True):
        window.reserve(segment.start + count)
    slots = row_slots(
        batch.positions, stores[0].tables(stores), stores[0].owners(counts), stores[0].pool.page_size
    )
    pool = _pool(batch.segments[0], at.layer)
    parts = at.fused.take("kv", env["kv"])
    if parts is None:
        value = env["kv"]
        write_rows(pool, value if isinstance(value, Tensor) else value.dequantised(), slots)
    else:
        raw_kv, weight, cos, sin = parts
        if pool.token_scale is None:
            kv_norm_rope_store(raw_kv, weight, cos, sin, pool.pages, slots, eps=at.eps)
        else:
            place = pool.data, pool.token_scale
            kv_norm_rope_store_aligned(raw_kv, weight, cos, sin, *place, slots, eps=at.eps)
    values, raw = record_taps(pool, slots)
    return {"kv_store": values, "kv_bytes": raw}


def _pool(segment: Segment, layer: int) -> PagePool:
    window: Any = segment.cache.layers[layer].window
    return window.pool


def write_rows(pool: PagePool, rows: Tensor, slots: Tensor) -> None:
    """Encode rows (T, K) BF16 or FP32 as the pool's record and write them at ``slots`` (T,) int64."""
    if pool.token_scale is not None:
        store_aligned(rows, pool.data, pool.token_scale, slots)
    elif isinstance(pool.record, Nvfp4Record):
        store_nvfp4(rows, pool.pages, slots)
    else:
        store(rows, pool.pages, slots)


def record_taps(pool: PagePool, slots: Tensor) -> tuple[Pending, Pending]:
    """What lies at ``slots``: values (T, K) FP32 and bytes (T, record) uint8, read when a tap asks."""

    def values(slots: Tensor) -> Tensor:
        return pool.record.decode(*stored_bytes(pool, slots))[0]

    def raw(slots: Tensor) -> Tensor:
        return torch.cat(stored_bytes(pool, slots), dim=-1)

    return Pending(values, slots), Pending(raw, slots)


def attend(at: KernelLayer, env: Env, batch: Batch) -> Written:
    """Attention of all rows of the batch, then the inverse RoPE: attn_out (T, H, K) BF16, lse (T, H) FP32."""
    slots = _slots(at, env, batch)
    pool = _pool(batch.segments[0], at.layer)
    q = env["q"]
    if at.plan.q_format == "bf16":
        read: Any = q.to(BF16)
    else:
        read = at.fused.take("q", q)
        if read is None:  # another value than q_b's: quantised by the ref, whose bits the fused kernel gives
            given = q if isinstance(q, Tensor) else q.dequantised()
            # cast: exempt(only of a query that isolated mode put in q_b's place; a step never comes here)
            read = quantise_q(given.float(), residual=at.plan.q_format == "fp8x2")
    step = len(slots)
    if at.plan.kv_read == "gather_bf16":
        step = max(GATHERED // max(slots.shape[1] * at.config.head_dim, 1), 1)
    outs, lses = [], []
    for first in range(0, len(slots), max(step, 1)):
        out, lse = _attend(at, pool, read, slots[first : first + step], slice(first, first + step))
        outs.append(out)
        lses.append(lse)
    if not outs:
        shape = 0, at.config.num_attention_heads
        empty = torch.empty(*shape, at.config.head_dim, dtype=BF16, device=at.device)
        return {"attn_out": empty, "lse": torch.empty(shape, device=at.device)}
    out, lse = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (outs, lses))
    return {"attn_out": rope(out, *at.cos_sin(batch.positions), inverse=True), "lse": lse}


def _attend(at: KernelLayer, pool: PagePool, q: Any, slots: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """One launch of the plan's attention. One split: a row's bits do not depend on the rows beside it."""
    plan, config = at.plan, at.config
    into = room(
        len(slots),
        config.num_attention_heads,
        slots.shape[1],
        config.head_dim,
        at.device,
        dtype=BF16 if plan.casts.attn_out == "bf16" else FP32,  # cast: fixed(B4_attn_out)
        splits=1,
    )
    sinks, scale = at.native.sinks, config.head_dim**-0.5
    if plan.q_format != "bf16":
        cache = pool.pages if pool.token_scale is None else pool.data
        on: dict[str, Any] = {
            "scale": scale,
            "token_scale": pool.token_scale,
            "rope_fp8": plan.rope_format == "fp8",
            "pv_fp8": plan.pv_format == "fp8",
            "into": into,
        }
        if isinstance(q, QuantisedQ):
            codes = QuantisedQ(
                q.record[rows], q.scale[rows], None if q.residual is None else q.residual[rows]
            )
            return sparse_attn_fp8(
                codes.record, codes.scale, cache, slots, sinks, residual=codes.residual, **on
            )
        product, cos, sin = (part[rows] for part in q)
        two_terms = plan.q_format == "fp8x2"
        return sparse_attn_product(
            product, cos, sin, cache, slots, sinks, eps=at.eps, residual=two_terms, **on
        )
    if plan.kv_read == "in_place":
        return sparse_attn_widened(q[rows], pool.pages, slots, sinks, scale=scale, into=into)
    keys = gather_dequantise(pool.pages, slots, nope=config.nope_head_dim, kv_format=plan.kv_format)
    return sparse_attn_gathered(q[rows], keys, slots, sinks, scale=scale, into=into)


def _stores(at: KernelLayer, batch: Batch, name: str) -> list[Any]:
    return [getattr(segment.cache.layers[at.layer], name) for segment in batch.segments]


def _counts(batch: Batch) -> list[int]:
    return [segment.rows.stop - segment.rows.start for segment in batch.segments]


def _slots(at: KernelLayer, env: Env, batch: Batch) -> Tensor:
    """Slots of the keys of each row, (T, S) int32: its window, then its entries; -1 is no key."""
    windows, entries = _stores(at, batch, "window"), _stores(at, batch, "entries")
    owners, tables = windows[0].owners(_counts(batch)), windows[0].tables(windows)
    on = {"window": at.config.sliding_window, "page_size": windows[0].pool.page_size}
    if entries[0] is None:
        return key_slots(batch.positions, owners, tables, **on)
    args = batch.positions, owners, tables, entries[0].tables(entries)
    if at.config.kind(at.layer) == "csa":
        return key_slots(*args, env["topk"], **on)
    count = max(store.rows for store in entries)
    return key_slots(*args, ratio=at.config.compress_ratios[at.layer], count=count, **on)


STAGES: dict[str, Callable[[KernelLayer, Env, Batch], Written]] = {
    "q_b": q_b,
    "kv": kv,
    "kv_store": kv_store,
    "attend": attend,
}
