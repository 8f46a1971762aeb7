"""Layer-by-tap maps: frame in, chart out, like :mod:`dsv4.report.charts`."""

import json
from collections.abc import Sequence

import altair as alt
import pandas as pd

from dsv4.report import theme
from dsv4.report.digits import number
from dsv4.report.frames import ERROR_EDGES, EXCESS_EDGES
from dsv4.report.marks import PLACE, TAP_ORDER, chart, layer_axis, placed, tap_axis, tip

STEP = 15  # pixels a tap


def heat_excess(frame: pd.DataFrame) -> alt.LayerChart:
    """Layer by tap: distance to the emulated plan over the limit; a triangle is past it."""
    layers = _cells("level_excess", theme.EXCESS_RAMP, EXCESS_EDGES, "distance over limit")
    over = (
        chart()
        .transform_filter("datum.excess > 1 && datum.bad == ''")
        .transform_calculate(place=PLACE)
        .mark_text(text="▲", fontSize=9, color=theme.var("page"))
        .encode(x=layer_axis(), y=alt.Y("tap:N", sort=TAP_ORDER))
    )
    words = "Excess over the noise floor, layer by tap; a triangle is past the limit"
    return placed(alt.layer(*layers, over), frame, STEP * max(1, len(set(frame["tap"]))), words)


def heat_error(frame: pd.DataFrame) -> alt.LayerChart:
    """Layer by tap: error against the chosen reference, in decades."""
    layers = _cells(
        "level_error", theme.ERROR_RAMP, ERROR_EDGES, "relative L2, choices missed, codes changed"
    )
    words = "Error against the chosen reference, layer by tap, in decades"
    return placed(alt.layer(*layers), frame, STEP * max(1, len(set(frame["tap"]))), words)


def _cells(field: str, ramp: Sequence[str], edges: Sequence[float], words: str) -> list[alt.Chart]:
    """Layers of a layer-by-tap map: empty cells, binned cells that can be clicked, crosses."""
    base = chart().transform_calculate(place=PLACE)
    said = [number(edge, ".0e") if edge < 0.01 else f"{edge:g}" for edge in edges]
    labels = [*[f"≤ {edge}" for edge in said], f"> {said[-1]}"]
    squares = {
        "symbolType": "square",
        "symbolSize": 130,
        "titleLimit": 400,
        "columns": alt.ExprRef("width < 380 ? 4 : 7"),
    }
    legend = alt.Legend(title=words, labelExpr=f"{json.dumps(labels)}[datum.value]", **squares)
    scale = alt.Scale(domain=list(range(len(ramp))), range=[theme.var(name) for name in ramp])
    y = alt.Y("tap:N", sort=TAP_ORDER, axis=tap_axis())
    back = base.mark_rect(color=theme.var("none"), stroke=theme.var("page"), aria=False).encode(
        x=layer_axis(), y=y
    )
    cells = (
        base.transform_filter(f"datum.{field} >= 0 && datum.bad == ''")
        .mark_rect(stroke=theme.var("page"), strokeWidth=1, cursor="pointer")
        .encode(
            x=layer_axis(),
            y=y,
            color=alt.Color(f"{field}:O", scale=scale, legend=legend),
            tooltip=tip("tap", "layer", "cos", "rel_l2", "excess", "verdict", "overlap", "changed", "at"),
        )
        .add_params(alt.selection_point(name="cell", fields=["layer", "tap"], on="click", clear=False))
    )
    cross = (
        base.transform_filter("datum.bad != ''")
        .mark_text(text="✕", fontWeight="bold", color=theme.var("fail"))
        .encode(x=layer_axis(), y=y, tooltip=tip("tap", "layer", "at", "bad"))
    )
    return [back, cells, cross]
