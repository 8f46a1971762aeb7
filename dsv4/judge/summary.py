"""What a verdict says beside its state: cosines by layer, ledger, costs, what was not exercised."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from dsv4.engine.spec import declares
from dsv4.judge.claims_by_field import CLAIMS, NEEDS, WORDS
from dsv4.judge.evaluate import layer_value, select
from dsv4.judge.launches import Sizes, cache_bytes, key_bytes, launches, step_bytes
from dsv4.judge.limits import Limit
from dsv4.judge.measure import Notes
from dsv4.taps import BY_NAME, TAPS

SHOWN = ("attn_out", "moe_out")  # one number a layer on the report's first screen
IDLE = "no prompt gave it anything to choose from or to store"
FIDELITY = ("outside", "within", "bit_equal", "not_exercised")  # worst first


def number(value: Any) -> float | None:
    """A float that JSON can hold; None for NaN and infinities."""
    return float(value) if np.isfinite(value) else None


def step(notes: Notes, prompt: str, phase: str, row: int) -> int | None:
    """Decode step of a token position; None in prefill."""
    return row - notes.decode[prompt] if phase == "decode" and row >= 0 else None


def location(notes: Notes, row: Mapping[str, Any] | pd.Series) -> dict[str, Any]:
    """Prompt, step, layer, tap and row of a line of the table."""
    prompt, at = str(row["prompt"]), int(row["worst_row"])
    return {
        "prompt": prompt,
        "step": step(notes, prompt, str(row["phase"]), at),
        "layer": int(row["layer"]) if row["layer"] >= 0 else "model",
        "tap": str(row["tap"]),
        "row": at,
    }


def cosines(frame: pd.DataFrame, notes: Notes) -> dict[str, Any] | None:
    """Cosine of attention's output with ``trained``'s on the same inputs, by layer; moe_out beside it."""
    rows = select(frame, mode="isolated", against="trained", part="all")
    by_tap = {tap: _by_layer(select(rows, tap=tap)) for tap in SHOWN}
    first = select(rows, tap=SHOWN[0])
    first = first[first["cos"].notna() | broken(first)]
    if first.empty:
        return None
    worst = _first_worst(first, first["cos_min"])
    return {
        "tap": SHOWN[0],
        "min": number(first["cos_min"].min(skipna=False)),
        "mean": number(first["cos"].mean(skipna=False)),
        "per_layer": by_tap[SHOWN[0]],
        "by_tap": by_tap,
        "worst": location(notes, worst),
    }


def _by_layer(rows: pd.DataFrame) -> list[float | None]:
    """Lowest whole-tensor cosine over prompts and phases, layer by layer; None where one is not finite."""
    lowest = rows.groupby("layer")["cos"].min().sort_index()
    return [number(value) for value in lowest.where(~lowest.index.isin(rows.loc[broken(rows), "layer"]))]


def broken(rows: pd.DataFrame) -> pd.Series:
    """Rows in which something is NaN or Inf: no number that they share in may be given."""
    return rows["nonfinite"] > 0


def _first_worst(rows: pd.DataFrame, value: pd.Series) -> pd.Series:
    """The first row that is not finite, else the one of the lowest value."""
    bad = rows[broken(rows)]
    return bad.iloc[0] if len(bad) else rows.loc[value.idxmin()]


def against_parent(frame: pd.DataFrame, notes: Notes) -> dict[str, Any] | None:
    """What the change moved: taps, codes, and the first place in the order of a layer."""
    rows = select(frame, mode="isolated", against="parent")
    if rows.empty:
        return None
    whole = select(rows, part="all")
    moved = whole[~whole["equal"].astype(bool)]
    stored = [tap for tap, spec in BY_NAME.items() if spec.kind == "bytes"]
    codes = {
        f"{tap}.{part}": number(group["changed"].mean())
        for (tap, part), group in rows[rows["tap"].isin(stored)].groupby(["tap", "part"], observed=True)
    }
    free = select(frame, mode="compounded", against="parent", part="all")
    return {
        "taps_changed": int(moved.groupby(["layer", "tap"], observed=True).ngroups),
        "of": int(whole.groupby(["layer", "tap"], observed=True).ngroups),
        "codes_changed": codes,
        "rel_l2_max": None if broken(moved).any() else number(moved["rel_l2"].max()),
        "bit_equal": bool(whole["equal"].all() and free["equal"].all()),
        "worst": location(notes, moved.loc[moved["changed"].fillna(1.0).idxmax()]) if len(moved) else None,
    }


def fidelity(frame: pd.DataFrame) -> tuple[str | None, dict[str, int]]:
    """Worst fidelity verdict of any tap, and how many taps have each."""
    rows = select(frame, against="floor", mode="isolated", part="all")
    counts = {name: int((rows["verdict"] == name).sum()) for name in FIDELITY}
    return next((name for name in FIDELITY if counts[name]), None), counts


def ledger(frame: pd.DataFrame, limits: Iterable[Limit]) -> dict[str, Any]:
    """Own cost (against the parent) and sum so far (against the references), with the budgets."""
    free = select(frame, mode="compounded", part="all")
    sides = {"own": "parent", "sum": "trained", "plain": "plain"}
    found = {
        name: {
            "kl_nats": _of_model(select(free, against=against, tap="logits"), "kl_nats"),
            "rel_l2": _of_model(select(free, against=against, tap="hidden"), "rel_l2"),
        }
        for name, against in sides.items()
    }
    budgets = {limit.against: limit.value for limit in limits if limit.mode == "compounded"}
    return found | {"budget": {"kl_nats": {"own": budgets.get("parent"), "sum": budgets.get("trained")}}}


def _of_model(rows: pd.DataFrame, metric: str) -> float | None:
    values = layer_value(rows, metric)
    return number(values.iloc[0]) if len(values) else None


def end_to_end(frame: pd.DataFrame, notes: Notes) -> dict[str, Any] | None:
    """Logits of the free run against ``trained``."""
    rows = select(frame, mode="compounded", against="trained", tap="logits", part="all")
    rows = rows[rows["kl_worst"].notna() | broken(rows)]
    if rows.empty:
        return None
    worst = _first_worst(rows, -rows["kl_worst"])
    plain = select(frame, mode="compounded", against="plain", tap="logits", part="all")
    return {
        "kl_nats": _of_model(rows, "kl_nats"),
        "top1": _of_model(rows, "top1"),
        "kl_worst": number(rows["kl_worst"].max(skipna=False)),
        "kl_plain": _of_model(plain, "kl_nats"),
        "worst": {"prompt": str(worst["prompt"]), "phase": str(worst["phase"])},
    }


def reached(notes: Notes) -> dict[str, float]:
    """Largest value of each entry of ``exercised`` over the prompts."""
    found: dict[str, float] = {}
    for entries in notes.exercised.values():
        for name, value in entries.items():
            largest = max(value, default=0.0) if isinstance(value, list) else value
            if isinstance(largest, int | float):
                found[name] = max(found.get(name, 0.0), float(largest))
    return found


def not_exercised(frame: pd.DataFrame, notes: Notes) -> list[str]:
    """Sentences: paths that no prompt reached, and taps with nothing to judge."""
    found = reached(notes)
    lines = [
        f"{words} (reached {found[name]:g})" if name in found else f"{words.split(':')[0]}: not counted"
        for name, (least, words) in WORDS.items()
        if found.get(name, 0.0) < least
    ]
    return lines + [f"{tap}: {IDLE}" for tap in _idle(frame)]


def own_path(changed: Iterable[str], frame: pd.DataFrame, notes: Notes) -> list[str]:
    """Sentences: what the changed op's own path needed and no prompt reached, and its taps that say nothing."""
    found = reached(notes)
    changed = list(changed)
    lines = [
        f"{field}: {WORDS[name][1]} (reached {found.get(name, 0.0):g}, needs {least:g}); give it a prompt that does"
        for field in changed
        for name, least in NEEDS.get(field, {}).items()
        if found.get(name, 0.0) < least
    ]
    idle = _idle(frame)
    for field, tap in (
        (field, tap) for field in changed for tap in TAPS if tap.stage in CLAIMS.get(field, ())
    ):
        if declares(notes.declared, "isolated", "*", tap.name):
            lines.append(f"{field}: {tap.name} ({tap.stage}) is declared missing")
        elif tap.name in idle:
            lines.append(f"{field}: {tap.name} ({tap.stage}): {IDLE}; give it a prompt that does")
    return lines


def _idle(frame: pd.DataFrame) -> list[str]:
    """Taps that no prompt gave anything to judge."""
    rows = select(frame, against="floor", mode="isolated", part="all")
    by_tap = rows.groupby("tap", sort=False, observed=True)["verdict"]
    return [str(tap) for tap, verdicts in by_tap if (verdicts == "not_exercised").all()]


def cost(
    plan: Mapping[str, str], parent: Mapping[str, str] | None, sizes: Sizes, notes: Notes
) -> dict[str, Any]:
    """Launches and bytes of one decode step, at the longest position measured, and what they changed by."""
    context = max(notes.positions.values(), default=0) + 1
    bytes_ = step_bytes(plan, sizes, context)
    counted = {
        "launches": sum(launches(plan, sizes).values()),
        "bytes_per_token": sum(bytes_.values()),
        "cache_bytes": cache_bytes(plan, sizes, context),
        "bytes_per_key": sum(key_bytes(plan, sizes.head_dim).values()),
    }
    before = cost(parent, None, sizes, notes) if parent else counted
    return {
        "time": None,
        "note": "time: not measured on this device",
        **counted,
        "launches_delta": counted["launches"] - before["launches"],
        "bytes_delta": counted["bytes_per_token"] - before["bytes_per_token"],
        "context": context,
    }
