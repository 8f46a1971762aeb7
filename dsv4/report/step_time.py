"""Time of a decode step: what each rung's step took beside its parent's, and in which stages it changed."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from dsv4.report.digits import NONE, signed
from dsv4.report.load import Audit

COLUMNS = ("variant", "what", "us", "us_low", "us_high", "time_ratio")
OWN, PARENT = "the variant", "its parent, in turns with it"
MOST_STAGES = 5


def _timed(audit: Audit) -> Iterator[tuple[str, dict[str, Any]]]:
    for rung in audit.ladder:
        time = ((audit.verdicts.get(rung.id) or {}).get("cost") or {}).get("time")
        if time:
            yield rung.id, time


def frame(audit: Audit) -> pd.DataFrame:
    """Rows of :data:`COLUMNS`, microseconds: median and quartiles of the step, own and parent's."""
    rows = []
    for name, time in _timed(audit):
        ratio = (time["ratio"] or {}).get("median")
        for what, taken in ((OWN, time["step_us"]), (PARENT, time["parent_us"])):
            if taken:
                rows.append((name, what, taken["median"], taken["q1"], taken["q3"], ratio))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def ratio(time: dict[str, Any] | None) -> str:
    """Step time over the parent's, ``0.93×``; a dash where there is none."""
    if not time or not time["ratio"]:
        return NONE
    return f"{time['ratio']['median']:.2f}×"


def said(time: dict[str, Any] | None) -> str:
    """The times behind a ratio."""
    if not time:
        return ""
    own, parent, share = time["step_us"], time["parent_us"], time["ratio"]
    text = f"{own['median']:.0f} us ({own['q1']:.0f} to {own['q3']:.0f})"
    if not parent:
        return text
    return f"{text}; parent {parent['median']:.0f} us; ratio {share['q1']:.3f} to {share['q3']:.3f}"


def table(audit: Audit) -> list[dict[str, str]]:
    """One line a timed variant: step, parent's step, ratio, and the stages that changed most, all layers together."""
    lines = []
    for name, time in _timed(audit):
        stages = time["stages"].items()
        changes = [(own - parent, stage, parent) for stage, (own, parent) in stages if parent is not None]
        largest = sorted(changes, key=lambda change: -abs(change[0]))[:MOST_STAGES]
        where = [f"{stage} {signed(by)} of {parent:.0f}" for by, stage, parent in largest if abs(by) >= 1]
        own, parent = time["step_us"]["median"], (time["parent_us"] or {}).get("median")
        lines.append(
            {
                "variant": name,
                "us": f"{own:.0f}",
                "parent": NONE if parent is None else f"{parent:.0f}",
                "ratio": ratio(time),
                "where": ", ".join(where) or NONE,
            }
        )
    return lines
