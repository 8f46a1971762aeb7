"""One function a chart: frame in, chart out; no files, no state.

A chart's rows are named ``rows``, so that the page can put another variant's in their place.
Colours are CSS variables (:mod:`dsv4.report.theme`); what colour says, shape or text says too.
"""

from collections.abc import Sequence

import altair as alt
import pandas as pd

from dsv4.report import theme
from dsv4.report.marks import (
    FREE,
    MAIN,
    PLACE,
    SELECTED,
    band,
    chart,
    crosses,
    decade_axis,
    decades,
    layer_axis,
    layered,
    picked,
    placed,
    series,
    spanned,
    tap_axis,
    tip,
)

NOISE = ("noise_low", "noise_high")


def layer_cosine(frame: pd.DataFrame) -> alt.LayerChart:
    """1 - cosine by layer on a log axis: tensor, worst row (dashed), limit and floor (ticks), noise (band)."""
    base = decades(layered(), "err", "err_row", "floor", "limit", "noise_low", "noise_high")
    good, x = base.transform_filter("datum.bad == ''"), layer_axis()
    marks = series("series", [*MAIN, SELECTED])
    y = alt.Y("lg_err:Q", scale=FREE, axis=decade_axis("1 − cosine (log, up is worse)"))
    line = base.mark_line(strokeWidth=1.5).encode(x=x, y=y, color=marks["color"])
    row = base.mark_line(strokeWidth=1, strokeDash=[2, 3]).encode(x=x, y="lg_err_row:Q", color=marks["color"])
    names = tip("tap", "layer", "cos", "cos_row", "rel_l2", "over_noise", *NOISE, "noise_of", "gain", "at")
    points = good.mark_point(filled=True, size=42, opacity=1).encode(x=x, y=y, tooltip=names, **marks)
    bounds = [
        good.transform_filter(f"isValid(datum.lg_{name})")
        .mark_tick(
            thickness=thickness, width=alt.ExprRef(f"min({width}, {share} * width / domain('x').length)")
        )
        .encode(x=x, y=f"lg_{name}:Q", color=marks["color"], tooltip=tip("tap", "layer", name))
        for name, thickness, width, share in (("floor", 1, 8, 0.3), ("limit", 2, 22, 0.6))
    ]
    cross = crosses(base, x, "tap", "layer", "at")
    noise = band(base, x, marks["color"])
    layers = alt.layer(spanned(good, "err", "err_row"), noise, row, line, *bounds, points, cross)
    words = "1 minus cosine to the reference by layer, for attn_out, moe_out, streams and one more tap"
    return placed(layers.add_params(picked()), frame, 240, words)


def gain(frame: pd.DataFrame) -> alt.LayerChart:
    """Least-squares gain by layer, which cosine cannot see; 1 is right."""
    base = layered()
    y = alt.Y("gain:Q", scale=alt.Scale(zero=False), axis=alt.Axis(title="gain", tickCount=5, format="~g"))
    one = alt.Chart(alt.InlineData(values=[{"one": 1}])).mark_rule(strokeDash=[3, 3]).encode(y="one:Q")
    points = (
        base.transform_filter("datum.bad == ''")
        .mark_point(filled=True, size=42, opacity=1)
        .encode(
            x=layer_axis(),
            y=y,
            tooltip=tip("tap", "layer", "gain", "cos", "at"),
            **series("series", [*MAIN, SELECTED]),
        )
    )
    layers = alt.layer(one, points, crosses(base, layer_axis(), "tap", "layer", "at"))
    return placed(
        layers.add_params(picked()),
        frame,
        240,
        "Least-squares gain against the reference by layer; 1 is no gain",
    )


def choices(frame: pd.DataFrame) -> alt.LayerChart:
    """Order-free overlap of experts and top-k entries: mean (point) down to the worst row (tick)."""
    base = chart().transform_filter("datum.kind == 'ids'").transform_calculate(place=PLACE)
    marks = series("tap", ["topk", "expert_ids"])
    shift = alt.XOffset("tap:N")
    axis = alt.Axis(title="share also chosen by the reference", tickCount=5, format=".0%")
    y = alt.Y("overlap:Q", scale=alt.Scale(zero=False, domainMax=1), axis=axis)
    names = tip("tap", "layer", "overlap", "overlap_min", "at")
    span = base.mark_rule(strokeWidth=1.5).encode(
        x=layer_axis(), xOffset=shift, y=y, y2="overlap_min:Q", color=marks["color"], tooltip=names
    )
    worst = base.mark_tick(thickness=1.5, width=8).encode(
        x=layer_axis(), xOffset=shift, y="overlap_min:Q", color=marks["color"], tooltip=names
    )
    mean = base.mark_point(filled=True, size=42, opacity=1).encode(
        x=layer_axis(), xOffset=shift, y=y, tooltip=names, **marks
    )
    words = "Overlap of chosen experts and entries with the reference's, by layer"
    return placed(alt.layer(span, worst, mean), frame, 200, words)


def codes(frame: pd.DataFrame) -> alt.LayerChart:
    """Share of stored values and bytes that differ from the parent's, one ring a layer."""
    x = alt.X(
        "changed:Q",
        scale=alt.Scale(domainMin=0),
        axis=alt.Axis(title="share changed", format="~%", tickCount=6),
    )
    points = list(dict.fromkeys(frame["point"]))
    y = alt.Y("point:N", sort=None, axis=tap_axis(grid=True))
    rings = (
        chart()
        .mark_point(size=46, strokeWidth=1.4, color=theme.var("c0"))
        .encode(x=x, y=y, tooltip=tip("point", "layer", "changed", "at"))
    )
    least = (
        alt.Chart(alt.InlineData(values=[{"least": 1e-3}]))
        .mark_point(opacity=0, aria=False)
        .encode(x="least:Q")
    )
    words = "Share of stored codes and values changed against the parent"
    return placed(alt.layer(least, rings), frame, 20 * max(1, len(points)), words)


def drift(frame: pd.DataFrame, taps: Sequence[str] = (*MAIN, "logits")) -> alt.LayerChart:
    """Error of the free run by decode step: 1 - cosine, and KL for the logits."""
    base, marks = decades(chart(), "value", *NOISE), series("tap", taps)
    y = alt.Y("lg_value:Q", scale=FREE, axis=decade_axis("1 − cosine; logits: KL, nats (log)"))
    x = alt.X(
        "step:Q",
        scale=alt.Scale(nice=False),
        axis=alt.Axis(title="decode step", tickMinStep=1, grid=False, format="d"),
    )
    good, names = base.transform_filter("datum.bad == ''"), tip("tap", "step", "value", *NOISE, "at")
    line = base.mark_line(strokeWidth=1.5).encode(x=x, y=y, color=marks["color"])
    points = good.mark_point(filled=True, size=30, opacity=1).encode(x=x, y=y, tooltip=names, **marks)
    cross = crosses(base, x, "tap", "step", "at")
    return placed(
        alt.layer(spanned(good, "value", "value"), band(base, x, marks["color"]), line, points, cross),
        frame,
        240,
        "Error of the free run by decode step",
    )
