# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# (pandas' own types say that a column may be a frame)
"""The page of a branch: its commits, each with its verdict, and cosine by layer and commit.

``python -m dsv4.report.commits --results results/<run>`` reads ``commits.json`` and writes
``reports/commits.html``: one file, offline, without a script.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd
import vl_convert
from markupsafe import Markup

from dsv4.console import main_guard
from dsv4.files import write_whole
from dsv4.ladder import State
from dsv4.report import digits, theme
from dsv4.report.document import filled
from dsv4.report.strip import Strip, strip
from dsv4.report.words import WORDS, place
from dsv4.taps import MODEL, span

KINDS = {
    "base": "base",
    "no_numerics": "no numerics changed",
    "one_site": "one site",
    "two_sites": "two sites",
    "merge": "merge",
    "does_not_run": "does not run",
    "inherited": "inherited",
}
TAPS = ("attn_out", "moe_out")
EDGES = (1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)  # of 1 - cosine, between the colours of the map
MOST = 3  # stages of a commit that the table names


def render(found: Mapping[str, Any], now: datetime | None = None) -> str:
    """The page of ``commits.json``'s content."""
    title, tone = headline(found["commits"])
    context = {
        "found": found,
        "macros": theme.MACROS,
        "title": title,
        "tone": tone,
        "rows": [_row(verdict) for verdict in found["commits"]],
        "labels": _labels(found),
        "maps": [(tap, Markup(drawn)) for tap in TAPS if (drawn := heat(found["commits"], tap))],
        "tables": [(tap, _numbers(found["commits"], tap)) for tap in TAPS],
        "now": now or datetime.now(UTC),
    }
    return filled("commits.html.j2", context)


def _labels(found: Mapping[str, Any]) -> list[str]:
    """What every number stands under; whose reference it is if a foreign one was asked."""
    labels = sorted({verdict["label"] for verdict in found["commits"] if verdict.get("label")})
    reference = found.get("reference") or {}
    return [*labels, reference["text"]] if reference.get("verdict") else labels


def headline(verdicts: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """What the page says first, and its tone: the first commit that fails, else what is unknown, else that all hold."""
    judged = [verdict for verdict in verdicts if verdict["kind"] != "base"]
    for state in (State.FAIL, State.BLOCKED, State.CANNOT_MEASURE):
        hit = [verdict for verdict in verdicts if verdict["status"] == state]
        if hit:
            first, more = hit[0], f", and {len(hit) - 1} more" if len(hit) > 1 else ""
            where = place(first.get("culprit")) if first["kind"] != "two_sites" else ""
            what = where or KINDS[first["kind"]]
            return f"{first['id']} {WORDS[state].replace('fail', 'fails')}: {what}{more}", str(state)
    count = f"all {len(judged)} commits" if len(judged) > 1 else "the commit"
    return f"{count} hold".capitalize() + ("" if len(judged) > 1 else "s"), str(State.PASS)


def _row(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """One commit as the table shows it: everything already text."""
    state = State(verdict["status"])
    culprit, cos = verdict.get("culprit") or {}, verdict.get("cos") or {}
    change = ", ".join(f"{name}: {old} → {new}" for name, (old, new) in verdict.get("change", {}).items())
    return {
        "id": verdict["id"],
        "sha": verdict["commit"],
        "subject": verdict["subject"],
        "kind": KINDS[verdict["kind"]],
        "state": state,
        "word": WORDS[state],
        "culprit": place(culprit),
        "confirmed": (verdict.get("confirmed") or {}).get("confirmed"),
        "strips": [_strip(verdict, tap, culprit) for tap in TAPS],
        "cos": digits.cosine(cos.get("min")),
        "moved": _moved(verdict),
        "change": change,
        "rung": verdict["rung"],
        "against": (verdict.get("against") or "")[:10],
        "reason": verdict["reasons"][0],
        "reasons": "; ".join(verdict["reasons"]),
    }


def _moved(verdict: Mapping[str, Any]) -> str:
    """Stages that moved against the commit below, with their layers."""
    sites = verdict.get("sites") or []
    said = [f"{site['stage']} ({_layers(site['layers'])})" for site in sites[:MOST]]
    more = f"; and {len(sites) - MOST} more" if len(sites) > MOST else ""
    if said:
        return "; ".join(said) + more
    return (
        "nothing"
        if verdict["kind"] in ("no_numerics", "merge") and verdict["status"] == State.PASS
        else digits.NONE
    )


def _layers(layers: Sequence[Any]) -> str:
    """Layer numbers for a cell, and ``model`` for what lies beyond the last."""
    numbers = [layer for layer in layers if layer != MODEL]
    return ", ".join([*([span(numbers)] if numbers else []), *([MODEL] if MODEL in layers else [])])


def _cells(verdict: Mapping[str, Any], tap: str) -> pd.DataFrame:
    """Cosine of one commit and tap by layer, in the columns of the page's frames."""
    values = ((verdict.get("cos") or {}).get("by_tap") or {}).get(tap) or []
    rows = [
        {"layer": layer, "cos": math.nan if cos is None else cos, "bad": "not finite" if cos is None else ""}
        for layer, cos in enumerate(values)
    ]
    same = {
        "tap": tap,
        "mode": "isolated",
        "against": "trained",
        "at": "worst prompt",
        "commit": verdict["id"],
    }
    return pd.DataFrame(rows, columns=["layer", "cos", "bad"]).assign(**same)


def _strip(verdict: Mapping[str, Any], tap: str, culprit: Mapping[str, Any]) -> Strip | None:
    return strip(_cells(verdict, tap), tap, culprit.get("layer") if culprit.get("tap") == tap else None)


def heat(verdicts: Sequence[Mapping[str, Any]], tap: str) -> str | None:
    """Drawing of cosine by layer and commit, oldest first; None if nothing was measured."""
    frames = [cells for verdict in verdicts if len(cells := _cells(verdict, tap))]
    if not frames:
        return None
    frame = pd.concat(frames)
    gap = 1 - frame["cos"]
    frame["level"] = sum((gap > edge).astype(int) for edge in EDGES)
    said = [digits.number(edge, ".0e") for edge in EDGES]
    labels = [*(f"≤ {edge}" for edge in said), f"> {said[-1]}"]
    colours = alt.Scale(domain=list(range(len(labels))), range=[theme.var(name) for name in theme.ERROR_RAMP])
    legend = alt.Legend(
        title=f"1 − cosine of {tap}", labelExpr=f"{json.dumps(labels)}[datum.value]", symbolType="square"
    )
    order = [verdict["id"] for verdict in verdicts]
    x = alt.X("layer:O", axis=alt.Axis(title="layer", labelAngle=0, grid=False))
    y = alt.Y("commit:N", sort=order, scale=alt.Scale(domain=order), axis=alt.Axis(title=None, ticks=False))
    base = alt.Chart(frame)
    cells = (
        base.transform_filter("datum.bad == ''")
        .mark_rect(stroke=theme.var("page"))
        .encode(x=x, y=y, color=alt.Color("level:O", scale=colours, legend=legend))
    )
    cross = (
        base.transform_filter("datum.bad != ''")
        .mark_text(text="✕", fontWeight="bold", color=theme.var("fail"))
        .encode(x=x, y=y)
    )
    width = min(620, 34 * frame["layer"].nunique())
    about = f"1 − cosine of {tap} with the reference, by layer and commit"
    whole = alt.layer(cells, cross).properties(width=width, height=20 * len(order), description=about)
    return vl_convert.vegalite_to_svg(whole.to_dict() | {"config": theme.config()})


def _numbers(verdicts: Sequence[Mapping[str, Any]], tap: str) -> list[tuple[str, list[str]]]:
    return [
        (verdict["id"], [digits.cosine(value) for value in cells["cos"]])
        for verdict in verdicts
        if len(cells := _cells(verdict, tap))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--results", type=Path, required=True, help="folder of the run, results/<run>")
    parser.add_argument("--reports", type=Path, default=Path("reports"), help="folder of the page")
    options = parser.parse_args(arguments)
    found = json.loads((options.results / "commits.json").read_text(encoding="utf-8"))
    page = options.reports / "commits.html"
    write_whole(page, render(found).encode())
    print(f"commits: {page}")
    return 0


if __name__ == "__main__":
    main_guard(main)
