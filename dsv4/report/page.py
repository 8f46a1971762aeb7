"""From an audit to one self-contained HTML text."""

import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pandas as pd
from altair.utils.schemapi import debug_mode
from markupsafe import Markup

from dsv4.ladder import State
from dsv4.report import (
    behind,
    bounds,
    casts,
    code,
    digits,
    frames,
    kernels,
    panels,
    payload,
    points,
    step_time,
    tables,
    text,
    text_frames,
    text_panels,
    theme,
    words,
)
from dsv4.report.document import HERE, filled
from dsv4.report.ledger import costs, ledger
from dsv4.report.load import Audit, ReportError
from dsv4.report.marks import TAP_ORDER

BUNDLE = (
    'import sys, vl_convert; sys.stdout.write(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))'
)


def render(audit: Audit, now: datetime | None = None) -> str:
    """The whole page.

    Raises
    ------
    ReportError
        The chart library gave no script.
    """
    _bundling()
    # a chart is checked as a whole where it becomes JSON, not also in each of its parts
    with debug_mode(False):
        return filled("page.html.j2", _context(audit, now or datetime.now(UTC)), _script(), [text.STYLE])


def _context(audit: Audit, now: datetime) -> dict[str, Any]:
    """What the page's template is filled with."""
    limits = {name: verdict.get("limits") or [] for name, verdict in audit.verdicts.items()}
    cells = bounds.with_limits(bounds.with_floor(frames.heat(frames.cells(audit.metrics))), limits)
    cells = bounds.with_noise(cells, audit.noise)
    order = [rung.id for rung, _ in tables.ordered(audit.ladder)]
    measured = _among(order, cells["variant"])
    drift = bounds.with_step_noise(frames.drift(audit.metrics), audit.noise)
    stored = points.frame(audit)
    written = text_frames.tables(audit)
    rows = {"cells": cells, "codes": frames.codes(audit.metrics), "points": stored, "drift": drift}
    kept = [name for name in order if name in measured or name in audit.texts.documents]
    packed, left_out = payload.fit(rows | written, _by_interest(audit, kept))
    shown = [name for name in measured if name not in left_out]
    first = _first(audit, shown)
    samples = (_sample(frames.of(frame, first)) for frame in rows.values())
    one = panels.one_variant(*samples, noise=bounds.drawn_from(audit.noise))
    whole = panels.whole_ladder(
        frames.end_to_end(audit.metrics), ledger(audit), step_time.frame(audit), order
    )
    text_charts = text_panels.chosen(written) if audit.texts.documents else []
    residual_charts = text_panels.residual(audit.texts.residual)
    title, tone = words.headline(audit)
    return {
        "audit": audit,
        "macros": theme.MACROS,
        "title": title,
        "tone": tone,
        "summary": words.summary(audit),
        "labels": behind.labels(audit),
        "claim_devices": sorted({row.get("device") or "no device named" for row in audit.claims or []}),
        "rungs": tables.rungs(audit, cells),
        "untimed": None if tables.timed(audit) else tables.UNTIMED,
        "one": one,
        "whole": whole,
        "shown": shown,
        "left_out": left_out,
        "first": first,
        "againsts": _among(("trained", "plain", "parent", "B0", "floor"), cells["against"]),
        "taps": _among(TAP_ORDER, cells.loc[cells["kind"] == "value", "tap"]),
        "layer_tables": [tables.layer_table(cells, order, tap) for tap in ("attn_out", "moe_out")],
        "parts": frames.parts(audit.metrics).to_dict("records"),
        "points": points.table(audit, stored),
        "costs": costs(audit),
        "step_times": step_time.table(audit),
        "kernels": kernels.shown(audit.kernels, audit.ladder),
        "kernels_template": kernels.TEMPLATE,
        "text": text.shown(audit, left_out),
        "text_template": text.TEMPLATE,
        "text_panels": text_charts,
        "residual_panels": residual_charts,
        "casts": casts.shown(audit.casts),
        "casts_template": casts.TEMPLATE,
        "code": code.shown(audit.code),
        "code_template": code.TEMPLATE,
        "details": behind.details(audit),
        "guards": behind.guards(audit),
        "nonfinite": frames.nonfinite(audit.metrics).to_dict("records"),
        "identity": behind.identity(audit),
        "now": now,
        "digits": digits,
        "packed": packed,
        "specs": Markup(panels.specs([*one, *whole, *text_charts, *residual_charts])),  # every "<" is escaped
    }


def _among(names: Iterable[str], column: Iterable[str]) -> list[str]:
    """Names that a column holds, in their own order."""
    held = set(column)
    return [name for name in names if name in held]


def _sample(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a tap: enough to size a chart by, cheap to build it from."""
    return frame.drop_duplicates("point" if "point" in frame else "tap")


def _by_interest(audit: Audit, names: list[str]) -> list[str]:
    """What the page keeps first when it cannot keep all: failures, the spine from its top, then leaves."""
    spine = {rung.id for rung in audit.ladder if rung.spine}
    good = {rung.id for rung in audit.ladder if audit.state(rung) is State.PASS}
    return sorted(reversed(names), key=lambda name: (name in good, name not in spine))


def _first(audit: Audit, shown: list[str]) -> str:
    """The variant that the charts open with: the failing rung, else the last that was measured."""
    failing = [rung.id for rung in audit.ladder if rung.spine and audit.state(rung) is State.FAIL]
    spine = [rung.id for rung in audit.ladder if rung.spine and rung.id in shown]
    wanted = [audit.target or "", *failing, *reversed(spine), *shown]
    return next((name for name in wanted if name in shown), "")


@cache
def _bundling() -> subprocess.Popen[str]:
    """A process that makes Vega's script: seconds of a core in which this one's threads could not run."""
    return subprocess.Popen([sys.executable, "-c", BUNDLE], stdout=subprocess.PIPE, text=True)


@cache
def _script() -> str:
    """Vega's script, then ours."""
    vega, _ = _bundling().communicate()
    if _bundling().returncode:
        raise ReportError(f"vl_convert gave no script (exit {_bundling().returncode}); it says why above")
    return "{" + vega + "}\n" + (HERE / "page.js").read_text()
