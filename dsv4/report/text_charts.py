"""Charts of the section "Text, end to end": frame in, chart out, like :mod:`dsv4.report.charts`."""

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from dsv4.report import theme
from dsv4.report.marks import FREE, chart, decade_axis, decades, placed, series, spanned, tip
from dsv4.report.residual import EXERCISED
from dsv4.report.text_cells import KINDS
from dsv4.report.text_frames import BIN, ORDER

CHOSEN = "datum.variant == rung"
MARKS = ("reference stops", "reference is cut", "reference repeats", "first difference", "rung repeats")


def rung() -> alt.Parameter:
    """The rung that the section's select and the charts' clicks set."""
    return alt.param(name="rung", value="")


def by_position(frame: pd.DataFrame) -> alt.LayerChart:
    """KL along the reference's own text: the chosen rung with its band, the others faint; marks of the two texts."""
    base = decades(chart(), "at_least", "kl_mean", "kl_median", "kl_low", "kl_high")
    bins = base.transform_filter("datum.what == 'KL'").transform_calculate(
        middle="(datum.step + datum.last) / 2",
        low="max(isValid(datum.lg_kl_low) ? datum.lg_kl_low : -9, -9)",
        high="max(isValid(datum.lg_kl_high) ? datum.lg_kl_high : -9, -9)",
        median="isValid(datum.lg_kl_median) ? max(datum.lg_kl_median, -9) : datum.bad == '' ? -9 : null",
    )
    good, one = bins.transform_filter("datum.bad == ''"), bins.transform_filter(CHOSEN)
    axis = alt.Axis(title="position in the reference's text, tokens", grid=False, format="d", tickMinStep=1)
    x = alt.X("middle:Q", scale=alt.Scale(nice=False, zero=True), axis=axis)
    y = alt.Y("lg_at_least:Q", scale=FREE, axis=decade_axis("KL to trained, nats (log)"))
    colour = theme.var("c0")
    others = (
        bins.transform_filter("datum.variant != rung")
        .mark_line(strokeWidth=1, color=theme.var("faint"), opacity=0.4, aria=False)
        .encode(x=x, y=y, detail="variant:N")
    )
    shaded = one.transform_filter("datum.bad == ''").mark_area(opacity=0.2, color=colour, aria=False)
    band = shaded.encode(x=x, y="low:Q", y2="high:Q")
    median = one.mark_line(strokeWidth=1, strokeDash=[2, 3], color=colour).encode(x=x, y="median:Q")
    line = one.mark_line(strokeWidth=1.8, color=colour).encode(x=x, y=y)
    names = tip("variant", "step", "last", "kl_mean", "kl_median", "kl_low", "kl_high")
    touch = (
        good.mark_point(filled=True, size=70, opacity=0, cursor="pointer")
        .encode(x=x, y=y, tooltip=names)
        .add_params(alt.selection_point(name="cell", fields=["variant"], on="click", clear=False))
    )
    points = (
        good.transform_filter(CHOSEN)
        .mark_point(filled=True, size=26, opacity=1, color=colour)
        .encode(x=x, y=y, tooltip=names)
    )
    cross = (
        one.transform_filter("datum.bad != ''")
        .mark_text(text="✕", fontSize=13, fontWeight="bold", color=theme.var("fail"), baseline="top")
        .encode(x=x, y=alt.value(0), tooltip=tip("variant", "step", "bad"))
    )
    layers = [
        spanned(good, "at_least", "at_least"),
        others,
        band,
        median,
        line,
        *_events(base),
        touch,
        points,
        cross,
    ]
    words = f"KL of the forced text by position, mean of {BIN} tokens, for the chosen rung and the others"
    return placed(alt.layer(*layers).add_params(rung()), frame, 250, words)


def _events(base: alt.Chart) -> list[alt.Chart]:
    """Rules where a text stops, leaves the other, repeats; each with its word on a line of its own."""
    there = (
        base.transform_joinaggregate(most="max(last)")
        .transform_filter(f"datum.what != 'KL' && {CHOSEN}")
        .transform_calculate(place=f"indexof({list(MARKS)!r}, datum.what) * 13 + 6")
    )
    x, y = alt.X("step:Q"), alt.Y("place:Q", scale=None)
    look = {
        "domain": list(MARKS),
        "range": [theme.var(name) for name in ("faint", "faint", "faint", "fail", "c1")],
    }
    dashed: dict[str, Any] = {"domain": list(MARKS), "range": [[2, 2]] * 3 + [[1, 0]] * 2}
    colour = alt.Color("what:N", scale=alt.Scale(**look), legend=None)
    dash = alt.StrokeDash("what:N", scale=alt.Scale(**dashed), legend=None)
    layers = [
        there.mark_rule(strokeWidth=1.2).encode(
            x=x, color=colour, strokeDash=dash, tooltip=tip("what", "step")
        )
    ]
    page: dict[str, Any] = {
        "color": theme.var("page"),
        "stroke": theme.var("page"),
        "strokeWidth": 4,
        "opacity": 0.85,
    }
    soft: dict[str, Any] = {"color": theme.var("soft")}
    for side, some in (("left", "<"), ("right", ">=")):  # words lie inside the chart
        words = there.transform_filter(f"datum.step {some} 0.3 * datum.most")
        text: dict[str, Any] = {
            "fontSize": 10,
            "dx": 4 if side == "left" else -4,
            "align": side,
            "aria": False,
        }
        layers += [words.mark_text(**text, **look).encode(x=x, y=y, text="what:N") for look in (page, soft)]
    return layers


def by_class(frame: pd.DataFrame) -> alt.LayerChart:
    """Top-1 agreement by class of the reference's token and by kind of prompt: the chosen rung among the others."""
    names = [*ORDER, *KINDS.values()]
    there = [name for name in names if name in set(frame["name"])]
    base = chart()
    axis = alt.Axis(title="same most likely token as the reference", format="~%", tickCount=5)
    x = alt.X("top1:Q", scale=alt.Scale(zero=False, domainMax=1, nice=True), axis=axis)
    y = alt.Y(
        "name:N", sort=names, axis=alt.Axis(title=None, ticks=False, domain=False, grid=True, labelLimit=120)
    )
    told = tip("variant", "name", "top1", "kl_nats", "n")
    others = (
        base.transform_filter("datum.variant != rung")
        .mark_tick(thickness=1.5, height=10, color=theme.var("faint"), opacity=0.7, cursor="pointer")
        .encode(x=x, y=y, tooltip=told)
        .add_params(alt.selection_point(name="cell", fields=["variant"], on="click", clear=False))
    )
    points = (
        base.transform_filter(CHOSEN)
        .mark_point(filled=True, size=60, opacity=1, color=theme.var("c0"))
        .encode(x=x, y=y, tooltip=told)
    )
    words = "Top-1 agreement by token class and kind of prompt"
    return placed(alt.layer(others, points).add_params(rung()), frame, 22 * max(1, len(there)), words)


def magnitude(frame: pd.DataFrame, along: str) -> alt.LayerChart:
    """Largest magnitude of the residual streams by layer or step, and its BF16 ULP; the rule: where a ULP is 2."""
    shown = ("|X|, largest", "BF16 ULP of it")
    base, marks = decades(chart(), "size"), series("what", shown)
    step = alt.Axis(title=along, grid=False, format="d", tickMinStep=1)
    x = alt.X(f"{along}:Q", scale=alt.Scale(nice=False, padding=8), axis=step)
    y = alt.Y("lg_size:Q", scale=FREE, axis=decade_axis("size (log)"))
    line = base.mark_line(strokeWidth=1.5).encode(x=x, y=y, color=marks["color"])
    points = base.mark_point(filled=True, size=34, opacity=1).encode(
        x=x, y=y, tooltip=tip(along, "what", "size"), **marks
    )
    edge = alt.Chart(alt.InlineData(values=[{"lg": math.log10(EXERCISED), "said": f"{EXERCISED}: ULP 2"}]))
    rule = edge.mark_rule(strokeDash=[4, 3], color=theme.var("fail")).encode(y="lg:Q")
    said = edge.mark_text(align="left", baseline="top", dy=3, fontSize=10, color=theme.var("soft")).encode(
        y="lg:Q", x=alt.value(4), text="said:N"
    )
    words = f"Largest magnitude of the residual streams by {along}, and its BF16 ULP"
    return placed(alt.layer(spanned(base, "size", "size"), rule, said, line, points), frame, 180, words)


def magnitudes(rows: Sequence[dict[str, float]], along: str) -> pd.DataFrame:
    """Rows of :func:`magnitude` from ``residual.json``'s."""
    found = pd.DataFrame(rows, columns=[along, "absmax", "ulp"])
    named = {"absmax": "|X|, largest", "ulp": "BF16 ULP of it"}
    return found.rename(columns=named).melt(along, var_name="what", value_name="size")
