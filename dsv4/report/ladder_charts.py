"""Charts of the whole ladder: frame in, chart out, like :mod:`dsv4.report.charts`."""

from collections.abc import Sequence

import altair as alt
import pandas as pd

from dsv4.report import step_time, theme
from dsv4.report.marks import FREE, chart, decade_axis, decades, placed, series, spanned, tap_axis, tip


def end_to_end(frame: pd.DataFrame, order: Sequence[str]) -> alt.LayerChart:
    """KL of the free run's logits by variant, one mark a prompt and phase, on a log axis."""
    base, prompts = decades(chart(), "shown"), sorted(frame["prompt"].unique())
    y = alt.Y("variant:N", sort=list(order), axis=tap_axis(grid=True))
    x = alt.X("lg_shown:Q", scale=FREE, axis=decade_axis("KL to trained, nats (log)", grid=False))
    good, names = (
        base.transform_filter("datum.bad == ''"),
        tip("variant", "prompt", "phase", "kl_nats", "kl_worst", "top1"),
    )
    points = good.mark_point(filled=True, size=38, opacity=1).encode(
        x=x, y=y, tooltip=names, **series("prompt", prompts)
    )
    cross = (
        base.transform_filter("datum.bad != ''")
        .mark_text(text="✕", fontWeight="bold", color=theme.var("fail"))
        .encode(x=alt.value(alt.ExprRef("width - 6")), y=y, tooltip=tip("variant", "prompt", "bad"))
    )
    words = "KL of next-token distributions to the reference, by variant and prompt"
    layers = alt.layer(spanned(good, "shown", "shown", along="x"), points, cross)
    return placed(layers, frame, 19 * max(1, len(set(frame["variant"]))), words)


def step_times(frame: pd.DataFrame, order: Sequence[str]) -> alt.LayerChart:
    """Microseconds of a decode step by variant: its own and its parent's in the same turns, with quartiles."""
    base, marks = chart(), series("what", [step_time.OWN, step_time.PARENT])
    y = alt.Y("variant:N", sort=list(order), axis=tap_axis(grid=True))
    axis = alt.Axis(title="microseconds", grid=False)
    names = tip(*step_time.COLUMNS)
    spread = base.mark_rule(strokeWidth=1.5).encode(
        x=alt.X("us_low:Q", scale=FREE, axis=axis), x2="us_high:Q", y=y, color=marks["color"]
    )
    points = base.mark_point(filled=True, size=48, opacity=1).encode(
        x=alt.X("us:Q", scale=FREE, axis=axis), y=y, tooltip=names, **marks
    )
    words = "Time of one decode step of each variant and of its parent"
    return placed(alt.layer(spread, points), frame, 19 * max(1, len(set(frame["variant"]))), words)


def ledger(frame: pd.DataFrame, order: Sequence[str], title: str = "cost") -> alt.LayerChart:
    """What each rung added (circle), what the ladder has spent so far (squares), the budgets (ticks)."""
    base, marks = decades(chart(), "shown", "budget"), series("what", ["own cost", "sum so far"])
    x = alt.X("variant:N", sort=list(order), axis=alt.Axis(title=None, labelAngle=-35, labelLimit=120))
    y = alt.Y("lg_shown:Q", scale=FREE, axis=decade_axis(f"{title} (log)"))
    names = tip("variant", "what", "value", "budget")
    line = (
        base.transform_filter("datum.what == 'sum so far'")
        .mark_line(strokeWidth=1.5)
        .encode(x=x, y=y, color=marks["color"])
    )
    points = base.mark_point(filled=True, size=48, opacity=1).encode(x=x, y=y, tooltip=names, **marks)
    budget = (
        base.transform_filter("isValid(datum.lg_budget)")
        .mark_tick(thickness=2, width=20)
        .encode(x=x, y="lg_budget:Q", color=marks["color"], tooltip=names)
    )
    spans = [spanned(base, name, name) for name in ("shown", "budget")]
    words = "Cost of each rung against its parent, and against the reference so far, with budgets"
    return placed(alt.layer(*spans, line, budget, points), frame, 220, words)
