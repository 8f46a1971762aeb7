"""Scores of the indexer on kernels: FP8 and FP4 over paged keys, and the FP32 einsum that they replace."""

from typing import Any

import torch
from torch import Tensor

from dsv4.backend.layer import KernelLayer
from dsv4.backend.pool import stored_bytes
from dsv4.model.cache import Batch, Segment
from dsv4.model.config import CSA_RATIO
from kernels.index_logits.kernel import paged_index_logits, paged_index_logits_fp4
from kernels.index_query.kernel import Form, index_query
from kernels.linear.wide_kernel import fp32_linear

Parts = tuple[Tensor, Tensor, Tensor, Tensor, float]
MIN_FP4_HEADS = 16


def _count(segment: Segment, layer: int) -> int:
    store: Any = segment.cache.layers[layer].index
    return store.rows


def scores_by_einsum(at: KernelLayer, q: Tensor, weights: Tensor, batch: Batch) -> Tensor:
    """FP32 products of the codes' values, ReLU, weighted sum: what B2 replaces. (T, C) FP32.

    Heads are added one after the other: a library's sum may take another order for another number of rows.
    """
    width = max((_count(segment, at.layer) for segment in batch.segments), default=0)
    scores = torch.full((batch.rows, width), -torch.inf, device=at.device)
    for segment in batch.segments:
        count, store = _count(segment, at.layer), segment.cache.layers[at.layer].index
        rows = segment.rows
        entries = torch.arange(count, device=at.device)
        if not count or rows.start == rows.stop:
            continue
        slots = store.slots(entries)  # type: ignore[union-attr]
        pool: Any = store.pool  # type: ignore[union-attr]
        keys, scale = pool.record.decode(*stored_bytes(pool, slots))
        dots = fp32_linear(q[rows].flatten(0, 1).contiguous(), keys.contiguous()).unflatten(
            0, (-1, q.shape[1])
        )
        total = torch.zeros(len(dots), count, device=at.device)
        for head in range(q.shape[1]):
            total = total + dots[:, head].relu() * weights[rows][:, head, None]
        total = total if scale is None else total * scale.squeeze(-1)
        visible = (batch.positions[rows] + 1) // CSA_RATIO
        scores[rows, :count] = total.masked_fill(entries >= visible[:, None], -torch.inf)
    return scores


def scores_by_kernel(
    at: KernelLayer, q: Tensor | Any, weights: Tensor, fused: Parts | None, batch: Batch
) -> Tensor:
    """Scores over paged keys; sequences with equally many rows in one launch. (T, C) FP32, -inf where not visible.

    Parameters
    ----------
    q : (T, H, D) floating
        Read where ``fused`` is None; it is quantised as it is.
    weights : (T, H) FP32
    fused : query before RoPE, cos, sin, weights before their scale, scale; or None.
    """
    codes, scales, scaled = _query(at, q, weights, fused)
    counts = [_count(segment, at.layer) for segment in batch.segments]
    width = max(counts, default=0)
    lengths = {segment.rows.stop - segment.rows.start for segment in batch.segments}
    if width == 0 or batch.rows == 0:
        return torch.full((batch.rows, width), -torch.inf, device=at.device)
    limits = at.visible(batch.positions)
    groups = [batch.segments] if len(lengths) == 1 else [(segment,) for segment in batch.segments]
    found = []
    for group in groups:
        rows = slice(group[0].rows.start, group[-1].rows.stop)
        if rows.start == rows.stop:
            continue
        shape = len(group), -1
        parts = [None if part is None else part[rows].unflatten(0, shape) for part in (codes, scales, scaled)]
        scores = _paged(at, parts, limits[rows].unflatten(0, shape), group)
        scores = scores.flatten(0, 1)[:, :width]
        if len(groups) == 1:
            return scores
        found.append(torch.nn.functional.pad(scores, (0, width - scores.shape[1]), value=-torch.inf))
    return torch.cat(found)


def _form(at: KernelLayer) -> Form:
    """FP8; or FP4, folded into E4M3 where the device or the number of heads has no FP4 products."""
    if at.plan.index_score == "fp8":
        return "fp8"
    heads = at.config.index_n_heads
    native = at.device.type == "cuda" and torch.cuda.get_device_capability(at.device)[0] >= 10
    return "fp4" if native and heads >= MIN_FP4_HEADS and not heads & (heads - 1) else "fp4_folded"


def _query(
    at: KernelLayer, q: Tensor | Any, weights: Tensor, fused: Parts | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Codes, scales (FP4 alone) and head weights times the query's own scale."""
    form = _form(at)
    if fused is not None:
        raw, cos, sin, head_weights, scale = fused
        done = index_query(raw, cos, sin, head_weights, scale=scale, form=form)
    else:  # the same kernel without a turn, its weights those of the query's scale alone
        still = torch.ones(len(q), 32, device=at.device)
        ones = torch.ones(q.shape[:2], dtype=torch.bfloat16, device=at.device)
        # cast: exempt(only of a query that isolated mode put in index_q's place; a step never comes here)
        done = index_query(q.float().contiguous(), still, 0 * still, ones, scale=1.0, form=form)
        done = (*done[:-1], weights * done[-1])
    return (done[0], done[1], done[2]) if len(done) == 3 else (done[0], None, done[1])


def _paged(at: KernelLayer, query: list[Any], limits: Tensor, group: tuple[Segment, ...]) -> Tensor:
    q, scales, weights = query
    stores: list[Any] = [segment.cache.layers[at.layer].index for segment in group]
    table, pool = stores[0].tables(stores), stores[0].pool
    if at.plan.index_score == "fp8":
        return paged_index_logits(q, pool.pages, table, weights, limits, page_size=pool.page_size)
    return paged_index_logits_fp4(
        q, pool.pages, table, weights, limits, page_size=pool.page_size, q_scales=scales
    )
