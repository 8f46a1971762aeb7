"""What several charts share: named rows, axes, series, tooltips, and the mark of a non-finite value."""

import json
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from dsv4.report import theme
from dsv4.report.frames import LEAST, ORDER

MAIN = ("attn_out", "moe_out", "streams")
SELECTED = "selected tap"
TAP_ORDER = sorted(ORDER, key=lambda tap: ORDER[tap])
FREE = alt.Scale(zero=False, nice=False)  # the marks of `spanned` set the ends
PLACE = "datum.layer < 0 ? 1000000 : datum.layer"
TEXTS = {"tap": "tap", "at": "worst at", "bad": "not finite", "verdict": "verdict", "prompt": "prompt"}
TEXTS |= {name: name for name in ("variant", "phase", "what", "point")}
TEXTS |= {"noise_of": "noise floor of", "name": "class or kind"}
NUMBERS = {
    "layer": ("layer", "d"),
    "step": ("step", "d"),
    "cos": ("cosine", ".9f"),
    "cos_row": ("cosine, worst row", ".9f"),
    "rel_l2": ("relative L2", ".3e"),
    "floor": ("1 − cosine in the noise floor", ".1e"),
    "limit": ("1 − cosine at the limit", ".1e"),
    "noise_low": ("noise of free runs, least", ".1e"),
    "noise_high": ("noise of free runs, most", ".1e"),
    "over_noise": ("relative L2 over noise's", ".2f"),
    "gain": ("gain", ".6f"),
    "overlap": ("overlap, mean", ".4f"),
    "overlap_min": ("overlap, worst row", ".4f"),
    "changed": ("share changed", ".4%"),
    "top1": ("top-1 agreement", ".2%"),
    "kl_nats": ("KL, nats", ".3e"),
    "kl_worst": ("KL, worst row", ".3e"),
    "excess": ("excess over limit", ".3f"),
    "us": ("step, us", ".1f"),
    "us_low": ("lower quartile, us", ".1f"),
    "us_high": ("upper quartile, us", ".1f"),
    "time_ratio": ("over the parent's", ".3f"),
    "max_abs": ("largest difference", ".3e"),
    "last": ("to step", "d"),
    "kl_mean": ("KL, mean, nats", ".3e"),
    "kl_median": ("KL, median", ".3e"),
    "kl_low": ("KL, 2.5% quantile", ".1e"),
    "kl_high": ("KL, 97.5% quantile", ".1e"),
    "n": ("tokens", "d"),
    "size": ("size", ".4g"),
}


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON holds them: NaN is null."""
    return json.loads(str(frame.to_json(orient="records", double_precision=15)))


def chart() -> alt.Chart:
    """Chart over the rows that :func:`placed` gives and the page can replace."""
    return alt.Chart(alt.NamedData("rows"))


def placed(layers: Any, frame: pd.DataFrame, height: int, description: str) -> alt.LayerChart:
    """With its rows, as wide as its place on the page, and described to those who do not see it."""
    fit, rows = alt.AutoSizeParams(type="fit-x", contains="padding"), {"rows": records(frame)}
    return layers.properties(
        width="container", autosize=fit, height=height, description=description, datasets=rows
    )


def layer_axis() -> alt.X:
    """Layers in order, the model's own taps after the last."""
    words = {"title": "layer", "labelExpr": "datum.value < 0 ? 'model' : datum.value", "labelOverlap": True}
    axis = alt.Axis(**words, labelAngle=0, grid=False)
    return alt.X("layer:O", axis=axis, sort=alt.EncodingSortField(field="place", op="min"))


def decades(base: alt.Chart, *fields: str) -> alt.Chart:
    """Add ``lg_<field>``, the decimal logarithm; a linear axis of it shows whole decades only."""
    logs = {f"lg_{name}": f"datum.{name} > 0 ? log(datum.{name}) / LN10 : null" for name in fields}
    return base.transform_calculate(**logs)


def decade_axis(title: str, *, grid: bool = True) -> alt.Axis:
    """Axis of a decimal logarithm: 1e-5, 1e-4, ..., 1; what lies between decades has no label."""
    whole = "datum.value == 0 ? '1' : datum.value == round(datum.value) ? '1e' + datum.value : ''"
    return alt.Axis(title=title, tickMinStep=1, labelExpr=whole, grid=grid)


def spanned(base: alt.Chart, low: str, high: str, *, along: str = "y") -> alt.Chart:
    """Invisible marks that stretch a decade axis to whole decades around the data."""
    edges = {"low": f"floor(datum.lg_{low})", "high": f"floor(datum.lg_{high}) + 1"}
    marks = (
        base.transform_filter(f"isValid(datum.lg_{low})")
        .transform_calculate(**edges)
        .mark_rule(opacity=0, aria=False)
    )
    return marks.encode(y="low:Q", y2="high:Q") if along == "y" else marks.encode(x="low:Q", x2="high:Q")


def tap_axis(*, grid: bool = False) -> alt.Axis:
    """Every tap's name, however close they stand."""
    return alt.Axis(title=None, ticks=False, domain=False, grid=grid, labelLimit=120, labelOverlap=False)


def tip(*names: str) -> list[alt.Tooltip]:
    """Tooltip of these columns, named and formatted alike in every chart."""
    found = []
    for name in names:
        if name in TEXTS:
            found.append(alt.Tooltip(f"{name}:N", title=TEXTS[name]))
        else:
            title, form = NUMBERS.get(name, (name, ".3e"))
            found.append(alt.Tooltip(f"{name}:Q", title=title, format=form))
    return found


def series(field: str, names: Sequence[str]) -> dict[str, Any]:
    """Colour and shape together for one nominal field, so that neither is needed alone."""
    colours = [theme.var(name) for name in theme.TAPS]
    shapes = ["circle", "square", "triangle-up", "diamond", "cross"]
    known = list(names)[: len(colours)]
    return {
        "color": alt.Color(
            f"{field}:N", scale=alt.Scale(domain=known, range=colours[: len(known)]), title=None
        ),
        "shape": alt.Shape(
            f"{field}:N", scale=alt.Scale(domain=known, range=shapes[: len(known)]), title=None
        ),
    }


def layered() -> alt.Chart:
    """Value rows of the main taps and of the picked one, with the series that each belongs to."""
    named = f"indexof({json.dumps(list(MAIN))}, datum.tap) >= 0"
    fine = "datum.bad == '' && isValid(datum.{0}) ? max(datum.{0}, {1}) : null"  # null breaks a line
    errors = {name: fine.format(name, LEAST) for name in ("err", "err_row")}
    return (
        chart()
        .transform_filter(f"({named} || datum.tap == pick) && datum.kind == 'value'")
        .transform_calculate(series=f"{named} ? datum.tap : '{SELECTED}'", place=PLACE, **errors)
    )


def band(base: alt.Chart, x: alt.X, color: alt.Color) -> alt.Chart:
    """What free runs of one plan drift by noise alone: shaded from the least draw to the most."""
    shape = {"opacity": 0.22, "line": {"strokeWidth": 0.75, "opacity": 0.7}, "aria": False}
    shaded = base.transform_filter("isValid(datum.lg_noise_high)").mark_area(**shape)
    return shaded.encode(x=x, y="lg_noise_high:Q", y2="lg_noise_low:Q", color=color)


def picked() -> alt.Parameter:
    """The tap that the page's select and the heat maps' clicks set."""
    return alt.param(name="pick", value="attn_out")


def crosses(base: alt.Chart, x: alt.X, *names: str) -> alt.Chart:
    """Non-finite values: a cross at the top edge, where no number can be."""
    mark = {"text": "✕", "fontSize": 13, "fontWeight": "bold", "color": theme.var("fail"), "baseline": "top"}
    return (
        base.transform_filter("datum.bad != ''")
        .mark_text(**mark)
        .encode(x=x, y=alt.value(0), tooltip=tip(*names, "bad"))
    )
