# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportReturnType=false
# (pandas' own types say that a column may be a frame)
"""From measurements to the few rows a chart draws: pandas in, pandas out, worst case kept.

Every aggregate is the worst over prompts and phases, never a mean that could hide one; where
it was worst stays with it (``at``). Non-finite values never reach a chart as numbers: they
become the text ``bad``, which charts draw as a mark of its own and a table lists.
"""

import numpy as np
import pandas as pd

from dsv4.taps import BY_NAME, STAGES

KEYS = ["variant", "mode", "against", "layer", "tap"]
LEAST = 1e-9  # what is below this is drawn here: a log axis has no zero
EXCESS_EDGES = (0.25, 0.5, 0.8, 1.0, 2.0, 10.0)
ERROR_EDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
ORDER = {tap: (STAGES.index(spec.stage), place) for place, (tap, spec) in enumerate(BY_NAME.items())}


def whole(metrics: pd.DataFrame) -> pd.DataFrame:
    """Rows over the whole tensor and all steps of a phase."""
    steps = metrics["step"].isna() | (metrics["step"] == -1)
    return metrics[steps & metrics["part"].fillna("all").isin(["all", ""])]


def of(frame: pd.DataFrame, *variants: str) -> pd.DataFrame:
    """Rows of these variants."""
    return frame[frame["variant"].isin(variants)]


def kind(tap: pd.Series) -> pd.Series:
    """What a tap holds (value, ids, bytes, scores, lse); unknown taps are values."""
    return tap.map({name: BY_NAME[name].kind if name in BY_NAME else "value" for name in tap.unique()})


def where(frame: pd.DataFrame) -> pd.Series:
    """Prompt, phase and worst position in words."""
    row = frame["worst_row"].map(
        lambda value: f", row {int(value)}" if np.isfinite(value) and value >= 0 else ""
    )
    return frame["prompt"].astype(str) + ", " + frame["phase"].astype(str) + row.astype(str)


def bad(frame: pd.DataFrame) -> pd.Series:
    """Why a row is no number that can be drawn, or an empty text."""
    count = frame["nonfinite"].fillna(0)
    value = frame["excess"].where(frame["against"] == "floor", frame["rel_l2"])
    measured = (frame["rows"] > 0) & (kind(frame["tap"]) == "value") & (frame["against"] != "floor")
    undefined = frame["rel_l2"].isna() & measured
    texts = np.select(
        [count > 0, np.isinf(value), undefined],
        [count.astype(int).astype(str) + " non-finite", "infinite", "undefined"],
        default="",
    )
    return pd.Series(texts, frame.index)


def cells(metrics: pd.DataFrame) -> pd.DataFrame:
    """One row per variant, mode, reference, layer and tap: the worst prompt and phase.

    Returns
    -------
    DataFrame with :data:`KEYS`, ``kind``, ``cos`` and ``cos_row`` (whole tensor and worst row),
    ``err`` and ``err_row`` (1 - those, which keep few digits without loss),
    ``rel_l2``, ``gain``, ``max_abs``, ``changed``, ``overlap``, ``overlap_min``, ``excess``,
    ``verdict``, ``bad``, ``at``.
    """
    rows = whole(metrics)
    if rows.empty:
        return pd.DataFrame(columns=[*KEYS, *_CELL_COLUMNS])
    rows = rows.assign(layer=rows["layer"].fillna(-1).astype(int), kind=kind(rows["tap"]), bad=bad(rows))
    score = rows["excess"].where(rows["against"] == "floor", rows["rel_l2"])
    score = score.fillna(1 - rows["overlap"]).fillna(rows["max_abs"]).fillna(rows["changed"]).fillna(-1)
    rows = rows.assign(score=score.where(rows["bad"] == "", np.inf))
    groups = rows.groupby(KEYS, observed=True)
    lowest = groups[["cos", "cos_min", "overlap", "overlap_min"]].min()
    worst = rows.loc[groups["score"].idxmax()]
    worst = worst.assign(at=where(worst)).set_index(KEYS)
    worst[["cos", "cos_row", "overlap", "overlap_min"]] = lowest.loc[worst.index].to_numpy()
    worst["err"], worst["err_row"] = 1 - worst["cos"], 1 - worst["cos_row"]
    finite = worst.replace([np.inf, -np.inf], np.nan).reset_index()
    ranked = finite["tap"].map(lambda tap: ORDER.get(tap, (99, 99)))
    order = finite.assign(ranked=ranked).sort_values(["variant", "mode", "against", "layer", "ranked"])
    return order[[*KEYS, *_CELL_COLUMNS]].reset_index(drop=True)


_CELL_COLUMNS = [
    *(
        "kind",
        "cos",
        "cos_row",
        "err",
        "err_row",
        "rel_l2",
        "gain",
        "max_abs",
        "changed",
        "overlap",
        "overlap_min",
    ),
    *("excess", "verdict", "bad", "at"),
]


def level(values: pd.Series, edges: tuple[float, ...]) -> pd.Series:
    """Bin of each value: 0 up to the first edge, then one more past every edge; -1 for none."""
    bins = np.searchsorted(edges, values.to_numpy(float), side="left")
    return pd.Series(np.where(values.isna(), -1, bins), values.index)


def heat(frame: pd.DataFrame) -> pd.DataFrame:
    """Cells with the bin of their excess (``level_excess``) and of their error (``level_error``).

    The error of choices is the share not chosen, of log-sum-exps the largest difference, of
    codes the share changed.
    """
    error = frame["rel_l2"].fillna(1 - frame["overlap"]).fillna(frame["max_abs"]).fillna(frame["changed"])
    return frame.assign(
        error=error,
        level_excess=level(frame["excess"], EXCESS_EDGES),
        level_error=level(error, ERROR_EDGES),
    )


def codes(metrics: pd.DataFrame) -> pd.DataFrame:
    """Share of stored values, code bytes and scale bytes that differ from the parent's, isolated.

    One row a variant, point (tap, with ``scales`` for its scale bytes) and layer: worst prompt.
    """
    stored = [tap for tap, spec in BY_NAME.items() if not spec.replay]
    rows = metrics[
        (metrics["against"] == "parent") & (metrics["mode"] == "isolated") & metrics["tap"].isin(stored)
    ]
    rows = rows[rows["changed"].notna() & rows["part"].isin(["all", "scale"]) & ~(rows["step"] >= 0)]
    names = ["variant", "point", "layer", "changed", "at"]
    if rows.empty:
        return pd.DataFrame(columns=names)
    scales = rows["part"].map({"all": "", "scale": ", scales"}).astype(str)
    rows = rows.assign(
        point=rows["tap"].astype(str) + scales, at=where(rows), layer=rows["layer"].astype(int)
    )
    worst = rows.loc[rows.groupby(["variant", "point", "layer"], observed=True)["changed"].idxmax()]
    place = {tap: number for number, tap in enumerate(stored)}
    worst = worst.assign(place=worst["tap"].map(place)).sort_values(["variant", "place", "point", "layer"])
    return worst[names].reset_index(drop=True)


def drift(metrics: pd.DataFrame) -> pd.DataFrame:
    """Decode steps of the free run against ``trained``: worst prompt by variant, tap and step."""
    rows = metrics[
        (metrics["step"] >= 0) & (metrics["mode"] == "compounded") & (metrics["against"] == "trained")
    ]
    rows = rows[rows["part"].fillna("all").isin(["all", ""])]
    if rows.empty:
        return pd.DataFrame(columns=["variant", "tap", "step", "measure", "value", "at", "bad"])
    rows = rows.assign(bad=bad(rows), at=where(rows) + ", layer " + rows["layer"].astype(int).astype(str))
    logits = rows["tap"] == "logits"
    value = rows["kl_nats"].where(logits, 1 - rows["cos"]).clip(lower=LEAST)
    rows = rows.assign(
        measure=np.where(logits, "KL, nats", "1 − cosine"), value=value.where(rows["bad"] == "")
    )
    ranked = rows.assign(score=rows["value"].fillna(np.inf))
    worst = ranked.loc[ranked.groupby(["variant", "tap", "step"], observed=True)["score"].idxmax()]
    return worst[["variant", "tap", "step", "measure", "value", "at", "bad"]].reset_index(drop=True)


def end_to_end(metrics: pd.DataFrame) -> pd.DataFrame:
    """Logits of the free run by variant and prompt: KL in nats, its worst row, top-1 agreement."""
    rows = whole(metrics)
    rows = rows[(rows["tap"] == "logits") & (rows["mode"] == "compounded") & (rows["against"] == "trained")]
    rows = rows[rows["kl_nats"].notna() | (rows["nonfinite"] > 0)].assign(bad=bad(rows))
    rows = rows.assign(shown=rows["kl_nats"].clip(lower=LEAST))  # equal logits have a KL of 0
    names = ["variant", "prompt", "phase", "kl_nats", "kl_worst", "top1", "shown", "bad"]
    return rows[names].replace([np.inf, -np.inf], np.nan).reset_index(drop=True)


def parts(metrics: pd.DataFrame) -> pd.DataFrame:
    """Lowest isolated cosine to ``trained`` of the nope and rope parts, by variant and tap."""
    rows = metrics[metrics["part"].isin(["nope", "rope"]) & (metrics["mode"] == "isolated")]
    rows = rows[rows["against"] == "trained"]
    table = rows.pivot_table(
        index=["variant", "tap"], columns="part", values="cos", aggfunc="min", observed=True
    )
    return table.reindex(columns=["nope", "rope"]).reset_index()


def nonfinite(metrics: pd.DataFrame) -> pd.DataFrame:
    """Every measurement that is not a number, once a place: parts and references are joined."""
    rows = metrics.assign(bad=bad(metrics))
    rows = rows[rows["bad"] != ""].astype({"layer": int})
    place = ["variant", "mode", "phase", "prompt", "layer", "tap"]
    if rows.empty:
        return rows[[*place, "against", "part", "bad"]]
    groups = rows.groupby(place, observed=True, sort=False)[["against", "part", "bad"]]
    return groups.agg(lambda texts: ", ".join(dict.fromkeys(texts.astype(str)))).reset_index()
