"""B5's verdict: whether the BF16 residual stream is why a text repeats itself early, and what FP32 would cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from dsv4.report.digits import NONE, count, kl_change, number

TONES = {
    "contributor": ("fail", "contributor"),
    "ruled_out": ("pass", "ruled out"),
    "not_needed": ("not_needed", "not needed"),
    "not_exercised": ("cannot_measure", "NOT EXERCISED"),
    "not_run": ("not_run", "not run"),
}
ABSENT = {
    "schema": 1,
    "verdict": "not_run",
    "words": "An FP32 residual was not tried: it is, in snakemake all, if a rung that passed repeats itself earlier"
    " than the reference. To try it now: snakemake B5.",
}
EXERCISED = 256  # |X| from which on a BF16 ULP is 2


def shown(found: Mapping[str, Any]) -> dict[str, Any]:
    """Verdict, tables and sentences."""
    told = found or ABSENT
    tone, word = TONES[told["verdict"]]
    said = told["words"].removeprefix(f"{told['verdict'].replace('_', ' ')}: ")  # the badge says it
    asked = [_asked(one) for one in told.get("asked_by") or []]
    return {
        "tone": tone,
        "word": word,
        "words": f"{said[:1].upper()}{said[1:]}{'' if said.endswith('.') else '.'}",
        "asked": asked if len(asked) > 1 else [],  # the sentence names the first
        "rungs": _rungs(told),
        "cost": _cost(told.get("cost") or []),
        "exercised": _exercised(told),
        "mixing": _mixing(told.get("mixing") or {}),
    }


def largest(found: Mapping[str, Any]) -> float | None:
    """Largest |X| of any layer or step that was measured."""
    rows = [*(found.get("by_layer") or []), *(found.get("by_step") or [])]
    return max((row["absmax"] for row in rows if row["absmax"] is not None), default=None)


def _asked(one: Mapping[str, Any]) -> str:
    reference = one.get("reference_onset")
    other = "never" if reference is None else f"from {reference}"
    return (
        f"{one['variant']} repeats itself in {one['prompt']} from step {one['onset']}, the reference {other}"
    )


def _exercised(found: Mapping[str, Any]) -> str:
    most = largest(found)
    if most is None or found["verdict"] == "not_exercised":  # its sentence says so
        return ""
    side = "beyond" if most >= EXERCISED else "under"
    return f"Max |X| is {most:.4g}, {side} the {EXERCISED} from which on a BF16 ULP is 2."


def _rungs(found: Mapping[str, Any]) -> dict[str, Any]:
    """Onset by prompt and KL of each rung of the A/B, the rung below it first."""
    rungs: dict[str, Mapping[str, Any]] = dict(found.get("rungs") or {})
    if below := found.get("parent"):
        rungs = {below["variant"]: below | {"change": None}} | rungs
    prompts = list(dict.fromkeys(name for rung in rungs.values() for name in rung.get("onsets") or {}))
    lines = []
    for name, rung in rungs.items():
        onsets = rung.get("onsets") or {}
        change = rung.get("change") or {}
        steps = [_onset(onsets[prompt]) if prompt in onsets else NONE for prompt in prompts]
        lines.append((name, number(rung.get("kl_nats")), kl_change(change), bool(change.get("moved")), steps))
    return {"prompts": prompts, "lines": lines}


def _onset(step: int | None) -> str:
    return "never" if step is None else str(step)


def _cost(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = [
        {name: value for name, value in row.items() if not isinstance(value, Mapping)}
        | {f"{rung}: bytes_per_step": moved for rung, moved in (row.get("by_rung") or {}).items()}
        for row in rows
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[_said(row.get(name)) for name in names] for row in rows]
    return {"names": [_words(name) for name in names], "lines": lines}


def _words(name: str) -> str:
    """A column's name in words; a rung's id stays."""
    rung, colon, rest = name.rpartition(": ")
    return f"{rung}{colon}{rest.replace('_', ' ')}"


def _said(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NONE if value is None else str(value)
    return count(value)


def _mixing(found: Mapping[str, Any]) -> str:
    """Sums and norm of mHC's mixing matrices."""
    if not found:
        return ""
    parts = [
        f"{name} sums {found[key][0]:.6g} to {found[key][1]:.6g}"
        for name, key in (("row", "row_sum"), ("column", "column_sum"))
        if found.get(key)
    ]
    if found.get("spectral_norm_max") is not None:
        parts.append(f"spectral norm at most {found['spectral_norm_max']:.6g}")
    holds = found.get("non_expansive")
    said = "" if holds is None else ": mixing does not amplify" if holds else ": mixing amplifies"
    return f"mHC's mixing matrices: {', '.join(parts)}{said}."
