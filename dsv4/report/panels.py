"""The page's charts, each with the words that say how to read it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import pandas as pd

from dsv4.report import charts, heat, ladder_charts, points, step_time, theme
from dsv4.report.marks import MAIN, NUMBERS, TEXTS

DRIFTING = (*MAIN, "hidden", "logits")
CHOSEN = ("variant", "mode", "against")
TITLES = TEXTS | {name: title for name, (title, _) in NUMBERS.items()} | points.TITLES
NO_STEPS = "No per-step rows in metrics.parquet (column step), so drift over decode steps cannot be drawn."
SIGNALS = {"pick": "tap", "rung": "rung"}  # a chart's parameter -> the control that sets it
MEASURES = {"kl_nats": "KL, nats", "rel_l2": "relative L2", "top1": "top-1"}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart.

    Attributes
    ----------
    id : name in the page.
    title, lead : what it shows, and how to read it.
    chart : the drawing, or None with the reason in ``lead``.
    columns : of the table below it.
    data : table of the payload that its rows come from; empty: they are in the chart.
    key : parts of the key of its rows: a control's name, a fixed word after ``=``, or ``*`` for any.
    only : ``column=value``, the rows that the panel is about; empty: all.
    """

    id: str
    title: str
    lead: str
    chart: alt.LayerChart | None
    columns: tuple[str, ...]
    data: str = ""
    key: tuple[str, ...] = ()
    only: str = ""


def one_variant(
    cells: pd.DataFrame, codes: pd.DataFrame, stored: pd.DataFrame, drift: pd.DataFrame, noise: str = ""
) -> list[Panel]:
    """Charts of the chosen variant; the frames are those of one variant, to size the charts by.

    ``noise`` says whose free runs, and how many, the shaded bands are drawn from.
    """
    bounds = ("floor", "limit", *charts.NOISE)
    shaded = f" Shaded: free runs of {noise}, that differ in FP32 rounding noise alone" if noise else ""
    inside = f"{shaded} (compounded); up to there, a distance is no more than noise gives." if noise else ""
    stepped = "Free run against the trained reference, worst prompt and layer at each step."
    return [
        Panel(
            id="cosine",
            title="Cosine by layer",
            lead="Worst prompt; dashed: worst row; wide tick: the gate's limit; short tick: what noise explains."
            + inside,
            chart=charts.layer_cosine(cells),
            columns=("layer", "tap", "cos", "cos_row", "rel_l2", "gain", *bounds, "over_noise", "bad", "at"),
            data="cells",
            key=CHOSEN,
            only="kind=value",
        ),
        Panel(
            id="gain",
            title="Gain by layer",
            lead="A constant factor leaves cosine at 1; it shows here as a gain other than 1.",
            chart=charts.gain(cells),
            columns=("layer", "tap", "gain", "rel_l2", "bad", "at"),
            data="cells",
            key=CHOSEN,
            only="kind=value",
        ),
        Panel(
            id="excess",
            title="Excess over the noise floor",
            lead="Isolated: does the code compute what its plan says? Past 1 (triangle): no. Click: pick a tap.",
            chart=heat.heat_excess(cells),
            columns=("layer", "tap", "excess", "verdict", "rel_l2", "bad", "at"),
            data="cells",
            key=("variant", "=isolated", "=floor"),
        ),
        Panel(
            id="error",
            title="Error by layer and tap",
            lead="Against the chosen reference: what the plan costs. Click: pick a tap.",
            chart=heat.heat_error(cells),
            columns=("layer", "tap", "rel_l2", "cos", "overlap", "max_abs", "changed", "bad", "at"),
            data="cells",
            key=CHOSEN,
        ),
        Panel(
            id="choices",
            title="Choices",
            lead="Experts and index entries that the reference chose too: mean over rows, down to the worst row.",
            chart=charts.choices(cells),
            columns=("layer", "tap", "overlap", "overlap_min", "at"),
            data="cells",
            key=("variant", "mode", "=trained"),
            only="kind=ids",
        ),
        Panel(
            id="codes",
            title="Stored codes changed",
            lead="At quantisation points, isolated, against the parent: one ring a layer. All at 0: bit-equal storage.",
            chart=charts.codes(codes),
            columns=("layer", "point", "changed", "at"),
            data="codes",
            key=("variant",),
        ),
        Panel(
            id="points",
            title="Quantisation points",
            lead="Isolated: stored values against what they were made from, in steps (ULP) of their format. One correct"
            " rounding: ½ at most. ▲ too far off for a correct store; ≠ the scale stored is not the scale applied.",
            chart=points.histogram(stored),
            columns=("layer", "point", "within", "beyond", "largest", "same", "worst"),
            data="points",
            key=("variant",),
        ),
        Panel(
            id="drift",
            title="Drift over decode steps",
            lead=f"{stepped}{shaded}{'.' if shaded else ''}" if len(drift) else NO_STEPS,
            chart=charts.drift(drift, [tap for tap in DRIFTING if tap in set(drift["tap"])])
            if len(drift)
            else None,
            columns=("tap", "step", "value", *charts.NOISE, "bad", "at"),
            data="drift",
            key=("variant",),
        ),
    ]


def whole_ladder(
    text: pd.DataFrame, ledger: pd.DataFrame, times: pd.DataFrame, order: Sequence[str]
) -> list[Panel]:
    """Charts of all variants; their rows are in the chart."""
    said = "Free run against the trained reference, one mark a prompt and phase. Below 1e-9: at 1e-9."
    panels = [
        Panel(
            id="text",
            title="Text: KL of the next token",
            lead=said if len(text) else "No logits were measured.",
            chart=ladder_charts.end_to_end(text, order) if len(text) else None,
            columns=("variant", "prompt", "phase", "kl_nats", "kl_worst", "top1", "bad"),
        )
    ]
    if len(times):
        panels.append(
            Panel(
                id="times",
                title="Time of a decode step",
                lead="All prompts in one batch, one CUDA graph; median, bar: quartiles. Variant and parent in turns.",
                chart=ladder_charts.step_times(times, order),
                columns=step_time.COLUMNS,
            )
        )
    for number, (measure, rows) in enumerate(ledger.groupby("measure", sort=False)):
        name = MEASURES.get(str(measure), str(measure).replace("_", " "))
        panels.append(
            Panel(
                id=f"ledger{number}",
                title=f"Ledger: {name}",
                lead="What each rung added to its parent, and the sum so far; ticks: budgets. Below 1e-9: at 1e-9.",
                chart=ladder_charts.ledger(rows, order, name),
                columns=("variant", "what", "value", "budget"),
            )
        )
    return panels


def specs(panels: Sequence[Panel]) -> str:
    """JSON of all charts, safe inside a script element; rows that the payload holds are left out."""
    found = {}
    for panel in panels:
        if panel.chart is None:
            continue
        spec = panel.chart.properties(padding=2).to_dict()
        spec.pop("$schema", None)
        spec["config"] = theme.config()
        if panel.data:
            spec["datasets"] = {"rows": []}
        found[panel.id] = {
            "spec": spec,
            "signals": [[name, SIGNALS[name]] for name in _params(spec) if name in SIGNALS],
            "columns": [(name, TITLES.get(name, name)) for name in panel.columns],
            **{name: getattr(panel, name) for name in ("data", "key", "only")},
        }
    return json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")


def _params(spec: Mapping[str, Any]) -> list[str]:
    return [param["name"] for param in spec.get("params", [])]
