"""B5's verdict: whether the BF16 residual stream is why a text repeats itself early, and what FP32 would cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from dsv4.report.digits import NONE, count, number

TONES = {
    "contributor": ("fail", "contributor"),
    "ruled_out": ("pass", "ruled out"),
    "not_needed": ("not_needed", "not needed"),
    "not_exercised": ("cannot_measure", "not exercised"),
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
    return {
        "tone": tone,
        "word": word,
        "words": told["words"],
        "asked": [_asked(one) for one in told.get("asked_by") or []],
        "rungs": _rungs(told.get("rungs") or {}),
        "cost": _cost(told.get("cost") or []),
        "exercised": _exercised(told),
        "idle": (largest(told) or EXERCISED) < EXERCISED,
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
    if most is None:
        return ""
    if most < EXERCISED:
        return (
            f"|X| is at most {most:.4g}; a BF16 ULP reaches 2 from {EXERCISED} on: what an FP32 residual saves shows in"
            " a larger model only."
        )
    return f"|X| reaches {most:.4g}, beyond the {EXERCISED} from which a BF16 ULP is 2."


def _rungs(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Onset by prompt and KL of each rung of the A/B."""
    prompts = list(dict.fromkeys(name for rung in found.values() for name in rung.get("onsets") or {}))
    lines = []
    for name, rung in found.items():
        onsets = rung.get("onsets") or {}
        lines.append((name, number(rung.get("kl_nats")), [_onset(onsets.get(prompt)) for prompt in prompts]))
    return {"prompts": prompts, "lines": lines}


def _onset(step: int | None) -> str:
    return "never" if step is None else str(step)


def _cost(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[_said(row.get(name)) for name in names] for row in rows]
    return {"names": [name.replace("_", " ") for name in names], "lines": lines}


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
