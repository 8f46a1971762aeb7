"""How far two arrays are apart: pure functions, FP64 sums, no silent special case.

Everything that is a sum is kept as a sum per row (:class:`Sums`), so that parts of a tensor
(nope, rope, heads) are measured once and merged, and a batch of layers is measured at once.

Stated for every metric:

* Zero vectors: 0 against 0 is equal (cosine 1, gain 1, norm ratio 1, relative L2 0); anything
  else against 0 has cosine 0, norm ratio and relative L2 inf, and no gain (NaN).
* Non-finite values are counted before any reduction. Where there is one, the count stands and
  every metric of that row is NaN: no number is made from part of a row.
* No rows at all: metrics are NaN, counts 0.
"""

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4.logits import kl_nats, log_softmax

Array = NDArray[Any]
Columns = dict[str, Array]

COSINE = ("cos", "cos_min", "cos_p01", "cos_median", "worst_index")
SIZE = ("gain", "gain_worst", "norm_ratio", "rel_l2", "rel_l2_worst", "max_abs", "nonfinite", "changed")
VALUES = (*COSINE, *SIZE)
CHOICES = ("overlap", "overlap_min", "invalid", "duplicates", "mass_lost", "margin_min", "margin_flipped")
LOGITS = ("kl_nats", "kl_worst", "top1")


@dataclass(frozen=True)
class Sums:
    """Sufficient sums of rows; arrays of one shape, FP64.

    Attributes
    ----------
    xx, yy, xy : inner products of the tested row, of the reference's, of both.
    dd : sum of squared differences.
    biggest : largest absolute difference.
    changed : number of elements that differ; a NaN differs from everything.
    nonfinite : number of elements that are NaN or Inf on either side.
    count : number of elements.
    """

    xx: Array
    yy: Array
    xy: Array
    dd: Array
    biggest: Array
    changed: Array
    nonfinite: Array
    count: Array

    def merge(self, other: "Sums") -> "Sums":
        """Rows made of this part and the other."""
        return Sums(
            *(getattr(self, name) + getattr(other, name) for name in ("xx", "yy", "xy", "dd")),
            biggest=np.maximum(self.biggest, other.biggest),
            changed=self.changed + other.changed,
            nonfinite=self.nonfinite + other.nonfinite,
            count=self.count + other.count,
        )

    def over(self, axis: int) -> "Sums":
        """Merge along an axis."""
        parts = {
            name: getattr(self, name).sum(axis) for name in self.__dataclass_fields__ if name != "biggest"
        }
        return Sums(biggest=self.biggest.max(axis, initial=0.0), **parts)

    def reshape(self, *shape: int) -> "Sums":
        """Regroup the rows."""
        return Sums(**{name: getattr(self, name).reshape(shape) for name in self.__dataclass_fields__})


def sums(test: Array, reference: Array) -> Sums:
    """Reduce the last axis of two arrays of one shape ``[..., D]`` to ``[...]``.

    Raises
    ------
    ValueError
        The shapes differ.
    """
    if test.shape != reference.shape:
        raise ValueError(f"shapes differ: tested {test.shape}, reference {reference.shape}")
    x, y = test.astype(np.float64), reference.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        d = x - y
        xx, yy, xy, dd = (np.einsum("...d,...d->...", a, b) for a, b in ((x, x), (y, y), (x, y), (d, d)))
        biggest = np.abs(d).max(-1, initial=0.0)
    bad = np.zeros(xx.shape)
    if not (np.isfinite(xx).all() and np.isfinite(yy).all()):  # FP64 squares of FP32 cannot overflow
        bad += (~np.isfinite(x) | ~np.isfinite(y)).sum(-1)
        for part in (xx, yy, xy, dd, biggest):
            part[bad > 0] = np.nan
    changed = np.count_nonzero(test != reference, axis=-1).astype(np.float64)
    return Sums(xx, yy, xy, dd, biggest, changed, bad, np.full(xx.shape, float(test.shape[-1])))


def cosine(s: Sums) -> Array:
    """Cosine of each row, in [-1, 1]; zero vectors as stated above."""
    norms = np.sqrt(s.xx * s.yy)  # in FP64's range for every FP32 vector
    both, either = (s.xx == 0) & (s.yy == 0), (s.xx == 0) | (s.yy == 0)
    value = np.clip(s.xy / np.where(either, 1.0, norms), -1.0, 1.0)
    return _blank(np.where(both, 1.0, np.where(either, 0.0, value)), s)


def gain(s: Sums) -> Array:
    """Factor g that makes ``g * reference`` closest to the tested row in least squares."""
    zero = s.yy == 0
    value = s.xy / np.where(zero, 1.0, s.yy)
    return _blank(np.where(zero, np.where(s.xx == 0, 1.0, np.nan), value), s)


def norm_ratio(s: Sums) -> Array:
    """Norm of the tested row over the reference's."""
    return _blank(_ratio(s.xx, s.yy, equal=1.0), s)


def relative_l2(s: Sums) -> Array:
    """Norm of the difference over the reference's norm."""
    return _blank(_ratio(s.dd, s.yy, equal=0.0), s)


def _ratio(numerator: Array, denominator: Array, *, equal: float) -> Array:
    """Square root of a ratio of sums; ``equal`` for 0 over 0."""
    zero = denominator == 0
    value = np.sqrt(numerator / np.where(zero, 1.0, denominator))
    return np.where(zero, np.where(numerator == 0, equal, np.inf), value)


def _blank(value: Array, s: Sums) -> Array:
    return np.where(s.count == 0, np.nan, value)


def value_columns(s: Sums) -> Columns:
    """Measure tensors ``[B, R]`` of rows: one number a metric and tensor, :data:`VALUES`.

    ``worst_index`` is the row of lowest cosine, or the first with a non-finite value; -1 where
    there are no rows. ``changed`` is a share, ``nonfinite`` a count.
    """
    batch, rows = s.xx.shape
    if rows == 0:
        empty = {name: np.full(batch, np.nan) for name in VALUES}
        return empty | {"worst_index": np.full(batch, -1), "nonfinite": np.zeros(batch)}
    whole, by_row = s.over(1), cosine(s)
    gains, order = gain(s), np.sort(by_row, axis=1)  # NaN sorts last
    blank = np.isnan(by_row).any(1)
    far = np.argmax(np.abs(gains - 1.0), axis=1)
    cosines = {
        "cos": cosine(whole),
        "cos_min": np.where(blank, np.nan, order[:, 0]),
        "cos_p01": _quantile(order, 0.01),
        "cos_median": _quantile(order, 0.5),
        "worst_index": np.argmin(by_row, axis=1),  # the first NaN, if there is one
    }
    return cosines | {
        "gain": gain(whole),
        "gain_worst": np.take_along_axis(gains, far[:, None], 1)[:, 0],
        "norm_ratio": norm_ratio(whole),
        "rel_l2": relative_l2(whole),
        "rel_l2_worst": relative_l2(s).max(1),
        "max_abs": _blank(whole.biggest, whole),
        "nonfinite": whole.nonfinite,
        "changed": whole.changed / np.maximum(whole.count, 1.0),
    }


def _quantile(ordered: Array, q: float) -> Array:
    """Linear quantile of rows sorted in ascending order; NaN if the row holds one (they sort last)."""
    at = q * (ordered.shape[1] - 1)
    low = int(at)
    high = min(low + 1, ordered.shape[1] - 1)
    value = ordered[:, low] + (at - low) * (ordered[:, high] - ordered[:, low])
    return np.where(np.isnan(ordered[:, -1]), np.nan, value)


def equal_columns(batch: int, nonfinite: Array) -> Columns:
    """What :func:`value_columns` gives for tensors that are equal in every bit."""
    ones, zeros = np.ones(batch), np.zeros(batch)
    good = {
        name: ones for name in ("cos", "cos_min", "cos_p01", "cos_median", "gain", "gain_worst", "norm_ratio")
    }
    good |= {name: zeros for name in ("rel_l2", "rel_l2_worst", "max_abs", "changed")}
    blank = {name: np.where(nonfinite > 0, np.nan, value) for name, value in good.items()}
    return blank | {"worst_index": np.zeros(batch, int), "nonfinite": nonfinite, "changed": zeros}


def visible(scores: Array) -> Array:
    """Number of choices open to each row: scores that are not -inf, ``[..., N] -> [...]``."""
    return (scores > -np.inf).sum(-1)


def _counts(ids: Array, width: int) -> tuple[Array, Array]:
    """How often each id in ``[0, width)`` occurs per row ``[..., width]``, and ids outside it but -1."""
    rows = ids.reshape(math.prod(ids.shape[:-1]), ids.shape[-1]).astype(np.int64)
    good = (rows >= 0) & (rows < width)
    slots = np.where(good, rows, width) + np.arange(len(rows))[:, None] * (width + 1)
    counts = np.bincount(slots.ravel(), minlength=len(rows) * (width + 1)).reshape(len(rows), width + 1)
    outside = (~good & (rows != -1)).sum(1)
    return counts[:, :width].reshape(*ids.shape[:-1], width), outside.reshape(ids.shape[:-1])


def choice_columns(test: Array, reference: Array, scores: Array | None, width: int) -> Columns:
    """Compare sets of ids ``[B, R, K]``, padded with -1, whatever their order.

    Parameters
    ----------
    scores : ``[B, R, N]`` of the reference, -inf where no choice was open; None if it has none.
    width : number of ids there are; an id outside ``[0, width)``, one that was not open, and
        a -1 where the reference chose something are all *invalid*.

    Returns
    -------
    :data:`CHOICES`, one number a tensor: share of the reference's ids that were found (mean and
    worst row); counts; ``mass_lost`` = mean over rows of (its scores' sum over its choice minus
    that over the tested choice) / sum of magnitudes, so that a swap between ties costs nothing;
    relative margin at the cut: smallest over rows, and largest over rows whose choice differs
    (NaN if none has a cut). Beside them ``changed`` and ``worst_index``.
    """
    tested, outside = _counts(test, width)
    wanted, _ = _counts(reference, width)
    has, should = tested > 0, wanted > 0
    number = should.sum(-1)
    found = (has & should).sum(-1)
    overlap = np.where(number == 0, np.where(has.any(-1), 0.0, 1.0), found / np.maximum(number, 1))
    closed = (has & (scores == -np.inf)).sum(-1) if scores is not None else 0
    short = np.maximum(number - tested.sum(-1) - outside, 0)
    lost, margins = _lost(has, should, scores), _margins(scores, number)
    flipped = np.where(overlap < 1, margins, np.nan)
    return {
        "overlap": _mean(overlap),
        "overlap_min": overlap.min(1) if overlap.shape[1] else np.full(len(overlap), np.nan),
        "invalid": (outside + closed + short).sum(1).astype(float),
        "duplicates": np.maximum(tested - 1, 0).sum((1, 2)).astype(float),
        "mass_lost": _mean(lost),
        "margin_min": _extreme(margins, np.fmin),
        "margin_flipped": _extreme(flipped, np.fmax),
        "changed": 1.0 - _mean(overlap),
        "worst_index": overlap.argmin(1) if overlap.shape[1] else np.full(len(overlap), -1),
    }


def _lost(has: Array, should: Array, scores: Array | None) -> Array:
    if scores is None:
        return np.full(has.shape[:-1], np.nan)
    weight = np.where(np.isfinite(scores), scores, 0.0).astype(np.float64)
    total = (np.abs(weight) * should).sum(-1)
    return (weight * should - weight * has).sum(-1) / np.where(total == 0, 1.0, total)


def _margins(scores: Array | None, number: Array) -> Array:
    """Relative distance of the last score chosen to the first one not chosen; NaN without a cut."""
    if scores is None or scores.shape[-1] < 2:
        return np.full(number.shape, np.nan)
    order = -np.sort(-scores.astype(np.float64), axis=-1)
    cut = (number > 0) & (visible(scores) > number)
    last = np.take_along_axis(order, np.clip(number - 1, 0, order.shape[-1] - 1)[..., None], -1)[..., 0]
    following = np.take_along_axis(order, np.clip(number, 0, order.shape[-1] - 1)[..., None], -1)[..., 0]
    with np.errstate(invalid="ignore"):
        size = np.maximum(np.abs(last), np.abs(following))
        return np.where(
            cut, np.where(size == 0, 0.0, (last - following) / np.where(size == 0, 1.0, size)), np.nan
        )


def _mean(rows: Array) -> Array:
    return rows.mean(1) if rows.shape[1] else np.full(len(rows), np.nan)


def _extreme(rows: Array, of: np.ufunc) -> Array:
    """Smallest or largest of a row without its NaN; NaN if there is nothing else."""
    return reduce(of, rows.T, np.full(len(rows), np.nan))


def top_k(scores: Array, k: Array) -> Array:
    """Ids of the ``k`` largest scores a row, ties to the smaller index, padded with -1: ``[..., max k]``."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., : int(k.max(initial=0))]
    return np.where(np.arange(order.shape[-1]) < k[..., None], order, -1)


def logit_columns(test: Array, reference: Array) -> Columns:
    """KL(reference || tested) in nats (mean and worst row) and top-1 agreement of ``[B, R, V]``."""
    if test.shape[1] == 0:
        return {name: np.full(len(test), np.nan) for name in LOGITS}
    with np.errstate(invalid="ignore"):
        kl = kl_nats(log_softmax(reference), log_softmax(test))  # [B, R]
    agree = (test.argmax(-1) == reference.argmax(-1)).mean(1)
    return {
        "kl_nats": kl.mean(1),
        "kl_worst": kl.max(1),
        "top1": np.where(np.isnan(kl).any(1), np.nan, agree),
    }
