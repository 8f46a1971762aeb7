"""Charts of the section "Text, end to end", each with the words that say how to read it."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dsv4.report import text_charts
from dsv4.report.panels import Panel
from dsv4.report.text_frames import BIN

UNJUDGED = "gates.json holds no judgement of the forced text, so this cannot be drawn."
UNFORCED = "No forced positions were read, so this cannot be drawn."


def chosen(tables: Mapping[str, pd.DataFrame]) -> list[Panel]:
    """Charts of the chosen rung and prompt; ``tables``: see :func:`dsv4.report.text_frames.tables`."""
    positions, classes = (
        tables[name].drop_duplicates(kind) for name, kind in (("kl", "what"), ("classes", "name"))
    )
    measured = bool(
        (positions["what"] == "KL").any()
    )  # one row a kind sizes a chart; the page gives it all others
    return [
        Panel(
            id="kl",
            title="KL by position",
            lead=f"The reference's own text, forced through the rung: mean of {BIN} tokens; dashed: their median;"
            " shaded: 95% of them. Faint: the other rungs; click one to choose it."
            if measured
            else UNFORCED,
            chart=text_charts.by_position(positions) if measured else None,
            columns=("variant", "what", "step", "last", "kl_mean", "kl_median", "kl_low", "kl_high", "bad"),
            data="kl",
            key=("*", "prompt"),
        ),
        Panel(
            id="classes",
            title="Top-1 by token class and kind of prompt",
            lead="Circle: the chosen rung; ticks: the others." if len(classes) else UNJUDGED,
            chart=text_charts.by_class(classes) if len(classes) else None,
            columns=("variant", "name", "top1", "kl_nats", "n"),
            data="classes",
            key=("*",),
        ),
    ]


def residual(found: Mapping[str, Any]) -> list[Panel]:
    """Charts of B5: their rows are in the chart."""
    panels = []
    for along in ("layer", "step"):
        if rows := found.get(f"by_{along}"):
            frame = text_charts.magnitudes(rows, along)
            panels.append(
                Panel(
                    id=f"residual_{along}",
                    title=f"Residual streams by {along}",
                    lead="Largest |X| of all streams, and the step of BF16 there.",
                    chart=text_charts.magnitude(frame, along),
                    columns=(along, "what", "size"),
                )
            )
    return panels
