"""The page's tables: everything already text, nothing measured here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dsv4.ladder import State, Variant
from dsv4.report.digits import NONE, cosine, number, percent, signed
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
    strips: tuple[Strip | None, Strip | None]
    excess: str
    over: bool
    kl: str
    top1: str
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
        strips=(strip(cells, "attn_out", taps["attn_out"]), strip(cells, "moe_out", taps["moe_out"])),
        excess=NONE if pd.isna(excess) else f"{excess:.2f}×" if excess < 10 else f"{excess:.0f}×",
        over=bool(excess > 1),
        kl=number(text.get("kl_nats")),
        top1=percent(text.get("top1")),
        launches=signed((verdict.get("cost") or {}).get("launches_delta")),
        bytes=signed((verdict.get("cost") or {}).get("bytes_delta")),
        advice=advice(audit, variant),
        reason="; ".join(verdict.get("reasons") or []),
    )


def timed(audit: Audit) -> bool:
    """Whether any rung's time was measured."""
    return any((verdict.get("cost") or {}).get("time") is not None for verdict in audit.verdicts.values())


def details(audit: Audit) -> list[dict[str, Any]]:
    """What stands behind each verdict: taps, fidelity, blast radius, what was not exercised."""
    rows = []
    for rung, _ in ordered(audit.ladder):
        verdict = audit.verdicts.get(rung.id)
        if verdict is None:
            continue
        blast = verdict.get("blast_radius") or {}
        taps = verdict.get("taps")
        rows.append(
            {
                "id": rung.id,
                "commit": (verdict.get("commit") or NONE)[:10],
                "taps": f"{taps[0]} of {taps[1]}" if taps else NONE,
                "partial": bool(taps and taps[0] < taps[1]),
                "fidelity": (verdict.get("fidelity") or NONE).replace("_", "-"),
                "blast": _blast(blast),
                "blast_ok": blast.get("ok"),
                "reasons": verdict.get("reasons") or [],
                "not_exercised": verdict.get("not_exercised") or [],
                "confirmed": _confirmed(verdict.get("confirmed")),
            }
        )
    return rows


def _blast(blast: Mapping[str, Any]) -> str:
    if blast.get("ok") is None:
        return NONE
    changed = ", ".join(str(item) for item in blast.get("changed") or [])
    return "only claimed ops changed" if blast["ok"] else f"unclaimed ops changed: {changed or 'not named'}"


def _confirmed(found: Mapping[str, Any] | None) -> str:
    if not found:
        return NONE
    return ", ".join(f"{name}: {_yes(value)}" for name, value in found.items())


def _yes(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


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


def identity(audit: Audit) -> list[tuple[str, str]]:
    """Who ran what on what: every attribute of the run that the artefacts carry."""
    head = {key: value for key, value in audit.head.items() if key not in ("schema", "labels")}
    for name in ("run", "identity"):
        head |= head.pop(name, None) or {} if isinstance(head.get(name), Mapping) else {}
    return [
        (name.replace("_", " "), _plain(value))
        for name, value in head.items()
        if value not in (None, "", {}, [])
    ]


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    return _yes(value)
