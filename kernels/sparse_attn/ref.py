"""Sparse MQA with a sink: see :func:`sparse_attn`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.matmul.ref import MAX_K, Slices, exact_sum, product, slices
from kernels.rounding import Round, exact

ROWS = 32  # query rows at once: neighbours share most of their keys


@dataclass(frozen=True, kw_only=True)
class AttnRounding:
    """Rounding points of one attention call; the defaults are the equations.

    Attributes
    ----------
    q_nope, q_rope, k_nope, k_rope : operands of QK by part.
    peak : the row's maximum logit, FP64, as probabilities are taken relative to it.
    p_nope, p_rope : probabilities (relative to ``peak``) as PV reads them, by V's part.
    out : the store of the result.
    """

    q_nope: Round = exact
    q_rope: Round = exact
    k_nope: Round = exact
    k_rope: Round = exact
    peak: Round = exact
    p_nope: Round = exact
    p_rope: Round = exact
    out: Round = exact


EQUATIONS = AttnRounding()


def sparse_attn(
    q: Tensor,
    pool: Tensor,
    idx: Tensor,
    sinks: Tensor,
    *,
    n_rope: int,
    scale: float,
    at: AttnRounding = EQUATIONS,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each row over the pool rows that its index list names.

    ``out = sum_s e^(l_s - m) v_s / (sum_s e^(l_s - m) + e^(sink - m))`` with
    ``l_s = scale * q . k_s`` and K = V; ``lse = log(sum_s e^(l_s))`` without the sink. ``l_s`` and
    ``e^(l_s - m)`` are rounded to FP32, before their rounding points; the denominator sums the
    latter as they are before ``p_nope`` and ``p_rope``. No result depends on the order of a
    row's keys, on other rows, or on a pool row that it does not name.

    Parameters
    ----------
    q : (T, H, K) FP32
    pool : (N, K) FP32
        Rows as read from storage: [nope | rope].
    idx : (T, S) int64
        Rows of the pool, -1: no key. A row named twice counts twice.
    sinks : (H,) FP32
    n_rope : int
        Rope dims, the last of K.
    scale : float
        ``head_dim ** -0.5``.
    at : AttnRounding

    Returns
    -------
    out : (T, H, K) FP32
        Zero for a row with no key.
    lse : (T, H) FP32
        -inf for a row with no key.

    Raises
    ------
    ValueError
        An index is under -1 or past the pool.
    """
    low, high = (int(idx.min()), int(idx.max())) if idx.numel() else (-1, -1)
    if low < -1 or high >= len(pool):
        raise ValueError(f"sparse_attn: idx spans {low} to {high}, the pool has {len(pool)} rows")
    if len(pool) > idx.numel():
        pool, idx = _only_named(pool, idx)
    nope = slice(0, q.shape[-1] - n_rope)
    rope = slice(q.shape[-1] - n_rope, q.shape[-1])
    queries = torch.cat((at.q_nope(q[..., nope]), at.q_rope(q[..., rope])), dim=-1)
    keys = pool
    if at.k_nope is not exact or at.k_rope is not exact:
        keys = torch.cat((at.k_nope(pool[:, nope]), at.k_rope(pool[:, rope])), dim=-1)
    cut_values = slices(pool, dim=-1)
    cut_keys = cut_values if keys is pool or torch.equal(keys, pool) else slices(keys, dim=-1)
    # a sum keeps every NaN and infinity
    finite = math.isfinite(pool.sum()) and (keys is pool or math.isfinite(keys.sum()))
    # a NaN in a key must not reach a neighbour that does not name it; sums are exact up to MAX_K keys
    step = max(min(ROWS, MAX_K // max(idx.shape[1], 1)), 1) if finite else 1
    outs, lses = [], []
    for rows, chosen in zip(queries.split(step), idx.split(step), strict=True):
        named, count = _named_rows(chosen, len(pool))
        values = _take(cut_values, named)
        named_keys = values if cut_keys is cut_values else _take(cut_keys, named)
        logits = _logits(rows, named_keys).mul_(scale).float().double()  # [t, H, U]
        logits.masked_fill_((count == 0)[:, None, :], -torch.inf)
        repeats = count if (count > 1).any() else None
        peak = (
            logits.amax(-1, keepdim=True) if len(named) else logits.new_full((*rows.shape[:2], 1), -torch.inf)
        )
        peak = at.peak(peak.masked_fill(peak == -torch.inf, 0.0))
        p = logits.sub_(peak).exp_().float()
        total = exact_sum(_counted(p, repeats), dim=-1)[..., None]
        denominator = total + (sinks.double()[None, :, None] - peak).exp()
        weighted = _weighted_values(p, repeats, values, nope, at)
        outs.append(weighted.div_(denominator).float())
        lses.append((total.log() + peak).squeeze(-1).float())
    if not outs:
        return torch.empty_like(q), q.new_empty(q.shape[:2])
    return at.out(torch.cat(outs)), torch.cat(lses)


def _named_rows(chosen: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Pool rows that any of these queries names, ascending (U,), and how often each does (t, U) FP32."""
    count = torch.zeros(len(chosen), size + 1, device=chosen.device)
    slots = torch.where(chosen < 0, size, chosen)
    count.scatter_add_(1, slots, torch.ones_like(slots, dtype=torch.float32))
    named = torch.nonzero(count[:, :size].any(0)).squeeze(-1)
    return named, count[:, named]


def _only_named(pool: Tensor, idx: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the pool (N, K) that a list (T, S) int64 names, in their order (U, K), and the lists as rows of those."""
    named, place = torch.unique(idx, return_inverse=True)  # ascending: -1 is the first
    absent = int((named[:1] < 0).sum())
    return pool[named[absent:]], place - absent


def _take(cut: Slices, rows: Tensor) -> Slices:
    if len(rows) == len(cut.unit):  # ascending, so that they are all rows as they lie
        return cut
    return Slices(cut.high[rows], cut.low[rows], cut.unit[rows])


def _logits(rows: Tensor, keys: Slices) -> Tensor:
    """Dots of every head with every key: (t, H, K), (U, K) -> (t, H, U) FP64."""
    left = slices(rows.flatten(0, 1), dim=-1)
    dots = product(left, Slices(keys.high.T, keys.low.T, keys.unit.T)).mul_(left.unit).mul_(keys.unit.T)
    return dots.unflatten(0, rows.shape[:2])


def _counted(p: Tensor, repeats: Tensor | None) -> Tensor:
    """FP32 p (t, H, U), 0 where a row is not named, times ``repeats`` (t, U), None: once; (t, H, U) FP64, new."""
    return p.double() if repeats is None else p.double() * repeats[:, None, :]


def _weighted_values(
    p: Tensor, repeats: Tensor | None, values: Slices, nope: slice, at: AttnRounding
) -> Tensor:
    """``sum_u p_u v_u`` by part: (t, H, U) -> (t, H, K) FP64. The unit of each value row joins p."""
    heads = p.shape[:2]

    def part(stored: Tensor, columns: slice) -> Tensor:
        left = slices(_counted(stored, repeats).mul_(values.unit.T).flatten(0, 1), dim=-1)
        right = Slices(values.high[:, columns], values.low[:, columns], values.unit)
        return product(left, right).mul_(left.unit).unflatten(0, heads)

    if at.p_nope is at.p_rope:
        return part(at.p_nope(p), slice(None))
    return torch.cat((part(at.p_nope(p), nope), part(at.p_rope(p), slice(nope.stop, None))), dim=-1)
