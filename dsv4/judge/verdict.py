"""Fidelity: whether the code computes what its plan says, as far as the noise floor can tell.

The floor is an independent emulation of the plan, and draws of it in which every value is
moved by an FP32-accumulation error before it is rounded. A variant's isolated tap is compared
with the emulation, and its distance with what the draws explain:

``bit_equal``
    every bit is the emulation's.
``within``
    number of changed elements, distance and worst row are inside the bounds below.
``outside``
    one of them is not: another rounding point, another format, or a fault.
``not_exercised``
    the tap has no rows, or a choice with nothing to leave out.

Two kinds of taps need two tests. Where the draws change few elements (stores in a narrow
format), the *number* of changed elements is tested: codes near ties flip, and flips come as
single elements or as events (a scale, an inner code) that change at most one row. Where the
draws change most elements (unrounded FP32), the *distance* is tested. All bounds hold for a
family-wise false-alarm rate of :data:`FAMILY` over all tests of an audit.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dsv4.judge.metrics import Array
from dsv4.judge.tails import next_count, student, unseen
from dsv4.taps import BY_NAME

FAMILY = 1e-3  # chance that an audit of correct code reports "outside" anywhere
DENSE = 0.5  # mean share of changed elements in the draws from which on only distances are tested
FP32 = 2.0**-23  # both sides are rounded once to FP32, each by at most 2^-24 of a value
STEP = {"bf16": 2.0**-7, "e4m3": 2.0**-3, "e2m1": 2.0**-1}  # largest step of a code over the largest value
GROUP = {"e4m3": 64, "e2m1": 16}  # elements that share a scale
TESTS = 3  # a tensor: count, distance, worst row


@dataclass(frozen=True)
class Draws:
    """Dithered draws against the emulation, ``[J, D]`` for J tensors (NaN: none).

    Attributes
    ----------
    distance : relative L2 distance (lse: largest absolute difference).
    worst : worst row's relative L2 distance.
    changed : share of elements changed.
    """

    distance: Array
    worst: Array
    changed: Array


def codes(tap: str, plan: dict[str, str]) -> tuple[str, bool]:
    """Format whose steps a flip in this tap makes, and whether the tap holds its codes itself.

    Not itself: a code inside the stage flips and moves a whole row of the output.
    """
    stored = "e2m1" if plan.get("kv_format") == "nvfp4" else "e4m3"
    keys = "e2m1" if plan.get("index_score") == "fp4" else "e4m3"
    own = {
        "kv_store": stored,
        "kv_bytes": stored,
        "comp_store": stored,
        "comp_bytes": stored,
        "index_k_store": keys,
    }
    own |= dict.fromkeys(("attn_in_q", "qr_q", "moe_in_q"), "e2m1")
    if tap in own:
        return own[tap], True
    narrow_q = any(plan.get(name, "bf16") != "bf16" for name in ("q_format", "rope_format", "pv_format"))
    inner = dict.fromkeys(("attn_proj", "routed", "shared"), "e2m1") | {"index_scores": keys}
    inner |= dict.fromkeys(("attn_out", "lse"), "e4m3") if narrow_q else {}
    return inner.get(tap, "bf16"), False


def judge(
    rows: pd.DataFrame, draws: Draws, plan: dict[str, str], *, variants: int, reach: float
) -> pd.DataFrame:
    """Verdict and ``excess`` (largest statistic over its bound) of each row of a floor comparison.

    Parameters
    ----------
    rows : part "all" of the comparison with the floor, with compare.SCALE; one row a tensor.
    draws : in the order of ``rows``.
    plan : flattened plan of the variant.
    variants : number of variants in the audit, for the family-wise rate.
    reach : how much larger than the dither an FP32 accumulation in another order may be (>= 1).
    """
    out = pd.DataFrame({"verdict": "", "excess": np.nan}, index=rows.index)
    groups = len(rows) + rows.groupby("tap")["layer"].nunique().sum() + rows["tap"].nunique()
    alpha = FAMILY / (TESTS * max(groups, 1) * max(variants, 1))
    at = {tap: np.flatnonzero(rows["tap"] == tap) for tap in rows["tap"].unique()}
    for tap, where in at.items():
        mine = Draws(*(getattr(draws, name)[where] for name in ("distance", "worst", "changed")))
        excess = _excess(rows.iloc[where], mine, str(tap), plan, alpha, reach)
        part = rows.iloc[where]
        verdict = np.where(excess > 1.0, "outside", "within").astype(object)
        verdict[np.isnan(excess)] = ""  # no draws: the floor says nothing
        verdict[part["equal"].to_numpy(bool)] = "bit_equal"
        idle = (part["elements"] == 0) | (
            (tap == "topk") & part["margin_min"].isna() & (part["changed"] == 0)
        )
        verdict[idle.to_numpy()] = "not_exercised"
        verdict[(part["nonfinite"] > 0).to_numpy()] = "outside"
        excess = np.where(part["elements"] == 0, np.nan, excess)
        out.iloc[where, 0], out.iloc[where, 1] = verdict, excess
    return out


def _excess(
    rows: pd.DataFrame, draws: Draws, tap: str, plan: dict[str, str], alpha: float, reach: float
) -> Array:
    """Largest of the tests' statistic over bound; NaN where there are no draws."""
    kind, (fmt, own) = BY_NAME[tap].kind, codes(tap, plan)
    share = float(np.nanmean(draws.changed)) if np.isfinite(draws.changed).any() else math.nan
    if math.isnan(share):
        return np.full(len(rows), np.nan)
    dense = share > DENSE and kind not in ("ids", "bytes")
    bound, events = _count_bounds(rows, draws, (fmt, own), alpha, reach)
    tests = (
        []
        if dense
        else [_counts(rows) / np.maximum(bound, 1.0), _pooled(rows, draws, (fmt, own), alpha, reach)]
    )
    if kind not in ("ids", "bytes"):
        tests += _distance_tests(rows, draws, kind, dense, (fmt, own), bound, events, alpha, reach)
    return np.fmax.reduce(tests)


def _counts(rows: pd.DataFrame) -> Array:
    """Changed elements; all of them where a share makes no sense."""
    return (rows["changed"].fillna(1.0) * rows["elements"]).to_numpy(float)


def _event(rows: pd.DataFrame, fmt: str, own: bool) -> Array:
    """Elements that one unseen event can change: a group of codes that share a scale, or a row."""
    row = rows["elements"].to_numpy(float) / np.maximum(rows["rows"].to_numpy(float), 1.0)
    return np.minimum(row, GROUP[fmt] + 1) if own else row


def _dispersion(counts: Array) -> float:
    """Variance over mean of counts ``[J, D]``, pooled over tensors; at least 1 (single flips)."""
    mean = np.nanmean(counts, axis=1, keepdims=True)
    seen = (mean > 0)[:, 0]
    if not seen.any() or counts.shape[1] < 2:
        return 1.0
    return max(
        1.0, float(np.nansum((counts - mean)[seen] ** 2 / mean[seen]) / (seen.sum() * (counts.shape[1] - 1)))
    )


def _bound(
    total: Array, ahead: Array, exposures: float, width: Array, size: tuple[float, int], alpha: float
) -> Array:
    """Bound of a count: the seen kind of flips (quasi-Poisson), plus events that no draw has shown."""
    spread, draws = size
    return spread * next_count(total / spread, draws, alpha / 2) + width * unseen(exposures, ahead, alpha / 2)


def _count_bounds(
    rows: pd.DataFrame, draws: Draws, code: tuple[str, bool], alpha: float, reach: float
) -> tuple[Array, Array]:
    """Bound of each tensor's changed elements, and the number of unseen events in it."""
    counts = draws.changed * rows["elements"].to_numpy(float)[:, None]
    exposures, size = float(np.isfinite(counts).sum()), (_dispersion(counts), counts.shape[1])
    total = np.nansum(counts, axis=1) * reach
    ones = np.ones(len(rows))
    return _bound(total, ones, exposures, _event(rows, *code), size, alpha), unseen(
        exposures, ones, alpha / 2
    )


def _pooled(rows: pd.DataFrame, draws: Draws, code: tuple[str, bool], alpha: float, reach: float) -> Array:
    """The same test of sums, over a layer and over the tap; given to every tensor that changed at all.

    What is spread thinly over all tensors (a rounding before codes changes a percent of them)
    is invisible in each of them beside what one unseen event may do, but not in their sum.
    """
    counts = draws.changed * rows["elements"].to_numpy(float)[:, None]
    exposures, size = float(np.isfinite(counts).sum()), (_dispersion(counts), counts.shape[1])
    frame = pd.DataFrame(
        {
            "layer": rows["layer"].to_numpy(),
            "found": _counts(rows),
            "total": np.nansum(counts, axis=1) * reach,
            "width": _event(rows, *code),
            "one": 1.0,
        }
    )
    excess = np.zeros(len(rows))
    for key in (frame["layer"], np.zeros(len(rows), int)):
        by = frame.groupby(key)
        sums = by[["found", "total", "one"]].transform("sum")
        width = by["width"].transform("max").to_numpy(float)
        bound = _bound(
            sums["total"].to_numpy(float), sums["one"].to_numpy(float), exposures, width, size, alpha
        )
        excess = np.maximum(excess, sums["found"].to_numpy(float) / np.maximum(bound, 1.0))
    return np.where(frame["found"] > 0, excess, 0.0)


def _distance_tests(
    rows: pd.DataFrame,
    draws: Draws,
    kind: str,
    dense: bool,
    code: tuple[str, bool],
    bound: Array,
    events: Array,
    alpha: float,
    reach: float,
) -> list[Array]:
    """Distance and worst row over their bounds."""
    whole, worst = (_explained(drawn, alpha) * reach for drawn in (draws.distance, draws.worst))
    if kind == "lse":
        return [
            rows["max_abs"].to_numpy(float) / np.maximum(whole + FP32 * rows["amax"].to_numpy(float), 1e-300)
        ]
    if dense:
        whole, worst = whole + FP32, worst + FP32
    else:
        fmt, own = code
        row = np.minimum(
            bound, rows["elements"].to_numpy(float) / np.maximum(rows["rows"].to_numpy(float), 1.0)
        )
        moved = np.sqrt(row) * STEP["bf16" if not own else fmt] * rows["peak_row"].to_numpy(float)
        moved = np.maximum(moved, 0.0 if own or fmt == "bf16" else STEP[fmt])
        flips = np.sqrt(bound) * STEP["bf16" if not own else fmt] * rows["peak"].to_numpy(float)
        inner = np.sqrt(events) * moved * rows["row_peak"].to_numpy(float)
        whole, worst = np.maximum(whole, np.maximum(flips, inner)), np.maximum(worst, moved)
    found = (rows[name].fillna(np.inf).to_numpy(float) for name in ("rel_l2", "rel_l2_worst"))
    return [value / np.maximum(limit, 1e-300) for value, limit in zip(found, (whole, worst), strict=True)]


def _explained(drawn: Array, alpha: float) -> Array:
    """Predictive upper bound of a further draw of each tensor; log-normal, one spread for the tap.

    ``exp(mean_j + t s sqrt(1 + 1/n_j))`` with s pooled over all tensors (and t its Student
    quantile); 0 where no draw moved.
    """
    logs = np.log(np.where(drawn > 0, drawn, np.nan))
    number = np.isfinite(logs).sum(1)
    some = number > 0
    mean = np.where(some, np.nansum(logs, axis=1) / np.maximum(number, 1), -np.inf)
    degrees = int(np.maximum(number - 1, 0).sum())
    if degrees == 0:
        return np.exp(mean)
    spread = math.sqrt(float(np.nansum((logs - np.where(some, mean, 0.0)[:, None]) ** 2)) / degrees)
    return np.exp(mean + student(alpha, degrees) * spread * np.sqrt(1.0 + 1.0 / np.maximum(number, 1)))
