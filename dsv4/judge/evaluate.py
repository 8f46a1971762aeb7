"""What is wrong with a variant: findings, in the order in which a layer computes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dsv4.judge import kernel_launches
from dsv4.judge.claims_by_field import claimed, stage_order
from dsv4.judge.launches import Sizes
from dsv4.judge.limits import Limit
from dsv4.judge.measure import Notes
from dsv4.judge.metrics import Array
from dsv4.judge.quantisation import POINTS
from dsv4.taps import BY_NAME, MODEL

WORST = ("max_abs", "rel_l2_worst", "margin_flipped")  # the largest of a layer counts
KINDS = ("missing", "nonfinite", "invalid", "scale", "fidelity", "rounding", "blast", "limit", "path")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that fails a variant.

    Attributes
    ----------
    kind : see :data:`KINDS`.
    mode, layer, tap : where; layer -1 is the model's own.
    text : the sentence, with numbers.
    size : how far beyond the bound, as a ratio (inf: no bound exists).
    limit : name of the limit, or "".
    prompt, phase, row : the worst row, a token position; "" and -1 where there is none.
    """

    kind: str
    mode: str
    layer: int
    tap: str
    text: str
    size: float = np.inf
    limit: str = ""
    prompt: str = ""
    phase: str = ""
    row: int = -1

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Isolated first (it localises), then by layer, stage and kind."""
        layer = self.layer if self.layer >= 0 else 1 << 16
        return self.mode != "isolated", layer, stage_order(BY_NAME[self.tap].stage), KINDS.index(self.kind)


LIMITED = ("mode", "against", "tap", "part")  # columns that say which rows a limit is about


def place(layer: int, tap: str) -> str:
    """Words for a place: ``layer 3, attn_in (attn_mhc)``."""
    where = f"layer {layer}" if layer >= 0 else "after the last layer"
    return f"{where}, {tap} ({BY_NAME[tap].stage})"


def select(frame: pd.DataFrame, **wanted: str) -> pd.DataFrame:
    """Rows whose columns have these values."""
    mask = np.ones(len(frame), bool)
    for name, value in wanted.items():
        mask &= (frame[name] == value).to_numpy()
    return frame[mask]


def layer_value(rows: pd.DataFrame, metric: str) -> pd.Series:
    """One number a layer over prompts and phases, weighted by rows.

    Relative L2 is pooled as a root mean square, maxima by the largest, the rest by the mean;
    ``gain_error`` is ``|mean gain - 1|``. Rows without a value are left out, but a layer where any
    prompt is not finite has no number: NaN.
    """
    column = "gain" if metric == "gain_error" else metric
    broken = rows.loc[rows["nonfinite"] > 0, "layer"].unique()
    held = (rows[column].notna() & (rows["rows"] > 0)).to_numpy()
    found = _pooled(rows if held.all() else rows[held], metric, column)
    if not len(broken):
        return found
    return found.reindex(found.index.union(broken)).where(lambda value: ~value.index.isin(broken))


def _pooled(rows: pd.DataFrame, metric: str, column: str) -> pd.Series:
    """By numpy: every limit of every rung asks, and pandas takes ten times as long to group a few rows."""
    layers, at = np.unique(rows["layer"].to_numpy(), return_inverse=True)
    value = rows[column].to_numpy(float)
    if metric in WORST:
        most = np.full(len(layers), -np.inf)
        np.maximum.at(most, at, value)
        return pd.Series(most, layers)
    weight = rows["rows"].to_numpy(float)
    power = 2 if metric == "rel_l2" else 1
    mean = np.bincount(at, weight * value**power) / np.bincount(at, weight)
    return pd.Series(np.abs(mean - 1) if metric == "gain_error" else mean ** (1 / power), layers)


def other_path(plan: Mapping[str, str], sizes: Sizes, notes: Notes) -> list[Finding]:
    """Kernels that did not run as often as the plan asks, in a dump that says it ran on kernels."""
    if notes.labels.get("backend") != "kernel":
        return []
    return [
        Finding(kind="path", mode="compounded", layer=-1, tap=one.tap, text=kernel_launches.words(one, seen))
        for one, seen in kernel_launches.wrong(plan, sizes, notes.launches, notes.requantised)
    ]


def findings(
    frame: pd.DataFrame,
    notes: Notes,
    limits: Iterable[Limit],
    plan: Mapping[str, str],
    changed: Iterable[str],
) -> list[Finding]:
    """Everything that fails the variant, in order."""
    found = [*_missing(notes), *_broken(frame), *_stored(notes), *_outside(frame), *blast(frame, changed)]
    due = [limit for limit in limits if limit.applies(plan)]
    at = frame.groupby(list(LIMITED), sort=False, observed=True).indices  # once, not a search a limit
    numbers = frame.select_dtypes("number")  # rows are taken of all columns only where a limit is exceeded
    for limit in due:
        where = at.get(tuple(getattr(limit, name) for name in LIMITED))
        if where is not None:
            found += _exceeded(frame, numbers, where, limit)
    return sorted(found, key=lambda finding: finding.order)


def _missing(notes: Notes) -> Iterator[Finding]:
    seen: dict[tuple[str, int, str], list[str]] = {}
    for mode, phase, layer, tap in notes.missing:
        seen.setdefault((mode, -1 if layer == MODEL else int(layer), tap), []).append(phase)
    for (mode, layer, tap), phases in seen.items():
        where = f"{mode}, {', '.join(sorted(set(phases)))}"
        text = f"{place(layer, tap)} was not dumped ({where}) and no adapter declared it"
        yield Finding(kind="missing", mode=mode, layer=layer, tap=tap, text=text)


def _broken(frame: pd.DataFrame) -> Iterator[Finding]:
    for column, kind, words in (
        ("nonfinite", "nonfinite", "NaN or Inf"),
        ("invalid", "invalid", "invalid ids (out of range, not visible, or left empty)"),
        ("duplicates", "invalid", "ids chosen twice"),
    ):
        bad = frame[(frame[column] > 0) & (frame["part"] == "all")]
        for (mode, layer, tap), rows in bad.groupby(["mode", "layer", "tap"], sort=False, observed=True):
            worst = rows.iloc[0]
            text = f"{place(layer, tap)}: {int(worst[column])} {words}, first at {_where(worst)}"
            yield Finding(kind=kind, mode=mode, layer=layer, tap=tap, text=text, **_at(worst))


def _where(row: pd.Series) -> str:
    return _at_words(_at(row))


def _at(row: pd.Series) -> dict[str, Any]:
    return {"prompt": str(row["prompt"]), "phase": str(row["phase"]), "row": int(row["worst_row"])}


def _stored(notes: Notes) -> Iterator[Finding]:
    """Quantisation points: scales stored that were not applied, values further off than rounding puts them."""
    for line in notes.points:
        for number, layer in enumerate(line["layers"]):
            point = {name: column[number] for name, column in line.items() if isinstance(column, list)}
            shared = {"mode": "isolated", "layer": layer}
            if point.get("unapplied") or point.get("undecoded"):
                tap, at = POINTS[line["tap"]].stored_bytes, _spot(point["scale_at"])
                text = f"{place(layer, tap)}: {_scale_words(line['tap'], point)}, first at {_at_words(at)}"
                yield Finding(kind="scale", tap=tap, text=text, **shared, **at)
            if point["beyond"]:
                at, count = _spot(point["worst"]), sum(point["bins"])
                size = np.inf if point["largest"] is None else point["largest"]
                part = "" if line["part"] == "all" else f" {line['part']}"
                text = (
                    f"{place(layer, line['tap'])}{part}: {point['beyond'] / count:.2%} of values are not the nearest"
                    f" that {line['format']} holds, up to {size:.3g} of its steps away ({_at_words(at)})"
                )
                yield Finding(kind="rounding", tap=line["tap"], text=text, size=2 * size, **shared, **at)


def _scale_words(tap: str, point: Mapping[str, Any]) -> str:
    if point["error"]:
        return f"its bytes cannot be decoded: {point['error']}"
    said = []
    if point["unapplied"]:
        off = f"{point['unapplied']} of {point['blocks']} blocks"
        low, high = point["ratio"] or (np.nan, np.nan)
        said.append(f"in {off} scale bytes are {low:.3g} to {high:.3g} times what these values ask for")
    if point["undecoded"]:
        said.append(f"in {point['undecoded']} rows the bytes decode to other values than {tap}")
    return f"scale stored is not the scale applied: {' and '.join(said)}"


def _spot(found: list[Any]) -> dict[str, Any]:
    return dict(zip(("prompt", "phase", "row"), found, strict=True))


def _at_words(at: Mapping[str, Any]) -> str:
    return f"{at['prompt']}, {at['phase']}, token {at['row']}"


def _outside(frame: pd.DataFrame) -> Iterator[Finding]:
    bad = select(frame, against="floor", verdict="outside")
    bad = bad[~(bad["nonfinite"] > 0)]  # those are a finding of their own; ids have no such number: NaN
    for (mode, layer, tap), rows in bad.groupby(["mode", "layer", "tap"], sort=False, observed=True):
        worst = rows.loc[rows["excess"].fillna(np.inf).idxmax()]
        text = (
            f"{place(layer, tap)} is not what the plan computes: {_apart(worst)} against the emulation,"
            f" {_times(worst['excess'])} what FP32 noise explains ({_where(worst)})"
        )
        size = float(worst["excess"])
        yield Finding(kind="fidelity", mode=mode, layer=layer, tap=tap, text=text, size=size, **_at(worst))


def _apart(row: pd.Series) -> str:
    parts = []
    if np.isfinite(row["rel_l2"]):
        parts.append(f"relative L2 {row['rel_l2']:.2g}")
    elif np.isfinite(row["max_abs"]):
        parts.append(f"off by up to {row['max_abs']:.2g}")
    parts.append(f"{row['changed']:.1%} of elements changed")
    if np.isfinite(row["gain"]) and abs(row["gain"] - 1) > 1e-3:
        parts.append(f"gain {row['gain']:.3f}")
    return ", ".join(parts)


def _times(excess: float) -> str:
    return f"{excess:.3g} times" if np.isfinite(excess) else "beyond"


def blast(frame: pd.DataFrame, changed: Iterable[str]) -> Iterator[Finding]:
    """Taps that differ from the parent's on the reference's inputs, and that no changed field claims."""
    changed = list(changed)
    allowed = claimed(changed)
    rows = select(frame, against="parent", mode="isolated", part="all")
    moved = rows[~rows["equal"].astype(bool)]
    for (layer, tap), hit in moved.groupby(["layer", "tap"], sort=False, observed=True):
        if BY_NAME[tap].stage in allowed:
            continue
        worst = hit.loc[hit["changed"].fillna(1.0).idxmax()]
        text = (
            f"blast radius: {place(layer, tap)} differs from the parent in {worst['changed']:.2%} of elements"
            f" ({_where(worst)}), but {', '.join(changed) or 'nothing'} claims only {', '.join(sorted(allowed))}"
        )
        yield Finding(kind="blast", mode="isolated", layer=layer, tap=tap, text=text, **_at(worst))


def _exceeded(frame: pd.DataFrame, numbers: pd.DataFrame, where: Array, limit: Limit) -> Iterator[Finding]:
    for layer, value in layer_value(numbers.iloc[where], limit.metric).items():
        if np.isnan(value) or not limit.exceeded(float(value)):  # not finite: a finding of its own
            continue
        word = "over" if limit.direction == "max" else "under"
        size = value / limit.value if limit.direction == "max" else (1 - value) / max(1 - limit.value, 1e-300)
        part = "" if limit.part == "all" else f" {limit.part}"
        text = (
            f"{place(int(layer), limit.tap)}{part}: {limit.metric} {value:.3g} against {limit.against} is {word}"
            f" {limit.value:.3g}, what its formats explain ({limit.name})"
        )
        rows = frame.iloc[where]
        yield Finding(
            kind="limit",
            mode=limit.mode,
            layer=int(layer),
            tap=limit.tap,
            text=text,
            size=float(size),
            limit=limit.name,
            **_at(_worst(rows[rows["layer"] == layer], limit)),
        )


def _worst(rows: pd.DataFrame, limit: Limit) -> pd.Series:
    """Row of a layer that is farthest towards its limit."""
    values = (rows["gain"] - 1).abs() if limit.metric == "gain_error" else rows[limit.metric]
    return rows.loc[(values if limit.direction == "max" else -values).fillna(np.inf).idxmax()]
