"""The ladder and the tables that need no script: everything already text, nothing measured here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dsv4.ladder import State, Variant
from dsv4.report import step_time
from dsv4.report.digits import NONE, cosine, first, number, percent, signed
from dsv4.report.frames import of
from dsv4.report.load import Audit
from dsv4.report.strip import Strip, strip
from dsv4.report.words import WORDS, advice, place

UNTIMED = "time: not measured on this device"


@dataclass(frozen=True)
class Rung:
    """A row of the ladder."""

    id: str
    why: str
    depth: int
    spine: bool
    state: State
    word: str
    change: tuple[str, str, str] | None
    culprit: str
    worst: str
    strips: tuple[Strip | None, Strip | None]
    excess: str
    over: bool
    kl: str
    top1: str
    time: str
    time_said: str
    launches: str
    bytes: str
    advice: str
    reason: str


def ordered(ladder: list[Variant]) -> Iterator[tuple[Variant, int]]:
    """Rungs bottom first, each followed by its leaves, with their depth beside the spine."""
    shown = {rung.id for rung in ladder}

    def walk(rung: Variant, depth: int) -> Iterator[tuple[Variant, int]]:
        yield rung, depth
        for leaf in ladder:
            if leaf.parent == rung.id and not leaf.spine:
                yield from walk(leaf, depth + 1)

    for rung in ladder:
        if rung.spine or rung.parent not in shown:
            yield from walk(rung, 0)


def rungs(audit: Audit, cells: pd.DataFrame) -> list[Rung]:
    """Rows of the ladder table."""
    return [_rung(audit, of(cells, rung.id), rung, depth) for rung, depth in ordered(audit.ladder)]


def _rung(audit: Audit, cells: pd.DataFrame, variant: Variant, depth: int) -> Rung:
    verdict = audit.verdicts.get(variant.id) or {}
    found = audit.state(variant)
    culprit = verdict.get("culprit") or {}
    excess = cells.loc[cells["against"] == "floor", "excess"].max()
    text = verdict.get("e2e") or {}
    name, pair = next(iter(variant.change.items()), ("", ("", "")))
    layer = culprit.get("layer")
    taps = {"attn_out": None, "moe_out": None} | {culprit.get("tap"): layer}
    return Rung(
        id=variant.id,
        why=verdict.get("why") or variant.why,
        depth=depth,
        spine=variant.spine,
        state=found,
        word=WORDS[found],
        change=(name, *pair) if name else None,
        culprit=place(culprit),
        worst=_worst(culprit),
        strips=(strip(cells, "attn_out", taps["attn_out"]), strip(cells, "moe_out", taps["moe_out"])),
        excess=NONE if pd.isna(excess) else f"{excess:.2f}×" if excess < 10 else f"{excess:.0f}×",
        over=bool(excess > 1),
        kl=number(text.get("kl_nats")),
        top1=percent(text.get("top1")),
        time=step_time.ratio((verdict.get("cost") or {}).get("time")),
        time_said=step_time.said((verdict.get("cost") or {}).get("time")),
        launches=signed((verdict.get("cost") or {}).get("launches_delta")),
        bytes=signed((verdict.get("cost") or {}).get("bytes_delta")),
        advice=advice(audit, variant),
        reason=first(verdict.get("reasons") or []),
    )


def _worst(culprit: Mapping[str, Any]) -> str:
    """Where a culprit shows most: prompt, row and decode step."""
    names = ("prompt", "row", "step")
    return ", ".join(f"{name} {culprit[name]}" for name in names if culprit.get(name) is not None)


def timed(audit: Audit) -> bool:
    """Whether any rung's time was measured."""
    return any((verdict.get("cost") or {}).get("time") is not None for verdict in audit.verdicts.values())


def layer_table(cells: pd.DataFrame, order: list[str], tap: str) -> dict[str, Any] | None:
    """Isolated cosine by variant and layer, as a table that needs no script."""
    rows = cells[(cells["tap"] == tap) & (cells["mode"] == "isolated") & (cells["against"] == "trained")]
    if rows.empty:
        return None
    grid = rows.pivot_table(index="variant", columns="layer", values="cos", aggfunc="min")
    grid = grid.reindex([name for name in order if name in grid.index])
    lines = [
        (str(name), [cosine(value) for value in line])
        for name, line in zip(grid.index, grid.to_numpy(), strict=True)
    ]
    return {"tap": tap, "layers": [int(layer) for layer in grid.columns], "lines": lines}
