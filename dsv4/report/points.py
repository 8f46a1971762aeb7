"""Quantisation points: how far stored values are from what they were made from, and by which scale.

Rows come from the verdicts (``quantisation``, see :mod:`dsv4.judge.quantisation`); here they are
only summed, named and drawn.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import altair as alt
import pandas as pd

from dsv4.report import theme
from dsv4.report.digits import NONE, number, percent
from dsv4.report.load import Audit
from dsv4.report.marks import PLACE, chart, layer_axis, placed
from dsv4.report.tables import ordered

BINS = ("0", "≤ ¼", "≤ ½", "≤ 1", "≤ 2", "> 2")  # of dsv4.judge.quantisation.EDGES
SHARES = ("exact", "quarter", "half", "one", "two", "more")
RAMP = ("h1", "h2", "h4", "x4", "x5", "x6")
HEIGHT, FILL = 22, 0.86  # pixels a point; share of them that a full bar takes
TITLES = {
    "format": "format",
    "within": "within ½",
    "beyond": "too far off",
    "largest": "largest",
    "ratio_low": "scale ratio, least",
    "ratio_high": "scale ratio, most",
    "same": "stored = applied",
    "bad": "not finite",
    "worst": "furthest at",
}
FORMATS = {"within": ".2%", "beyond": ".3%", "largest": ".4f", "ratio_low": ".4g", "ratio_high": ".4g"}
COLUMNS = ("point", "layer", "line", *SHARES, *TITLES)  # of a variant's rows in the page


def frame(audit: Audit) -> pd.DataFrame:
    """One row a variant, point (tap and part) and layer: shares of the bins, and :data:`TITLES`."""
    names = ("variant", *COLUMNS)
    rows = [
        {"variant": variant, **row}
        for variant, verdict in audit.verdicts.items()
        for row in _rows(verdict.get("quantisation") or [])
    ]
    found = pd.DataFrame(rows, columns=[name for name in names if name != "line"])
    order = {point: place for place, point in enumerate(dict.fromkeys(found["point"]))}
    return found.assign(line=found["point"].map(order).astype("Int64"))[list(names)]


def _rows(lines: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for line in lines:
        for number_, layer in enumerate(line["layers"]):
            at = {name: column[number_] for name, column in line.items() if isinstance(column, list)}
            total = sum(at["bins"]) or 1
            low, high = at.get("ratio") or (None, None)
            shares = [count / total for count in at["bins"]]
            yield {
                "point": _point(line),
                "layer": layer,
                **dict(zip(SHARES, shares, strict=True)),
                "format": line["format"],
                "within": sum(shares[:3]),
                "beyond": at["beyond"] / total,
                "largest": at["largest"],
                "bad": "a value" if at["largest"] is None else "",
                "ratio_low": low,
                "ratio_high": high,
                "same": _same(at),
                "worst": "{}, {}, row {}".format(*at["worst"]),
            }


def _point(line: Mapping[str, Any]) -> str:
    return line["tap"] if line["part"] == "all" else f"{line['tap']}, {line['part']}"


def _same(at: Mapping[str, Any]) -> str:
    if at.get("unapplied") is None:
        return ""
    return "no" if at["unapplied"] or at["undecoded"] else "yes"


def table(audit: Audit, found: pd.DataFrame) -> list[dict[str, str]]:
    """One line a variant and point, all layers together, as text."""
    order = {rung.id: place for place, (rung, _) in enumerate(ordered(audit.ladder))}
    lines = []
    for (variant, _), rows in sorted(
        found.groupby(["variant", "line"], sort=True),
        key=lambda item: (order.get(item[0][0], 99), item[0][1]),
    ):
        said = set(rows["same"])
        without = "no scale" if set(rows["format"]) == {"bf16"} else "not dumped"
        low, high = rows["ratio_low"].min(), rows["ratio_high"].max()
        lines.append(
            {
                "variant": str(variant),
                "point": rows["point"].iloc[0],
                "format": ", ".join(dict.fromkeys(rows["format"])),
                "within": percent(rows["within"].mean()),
                "beyond": "0" if rows["beyond"].max() == 0 else percent(rows["beyond"].max()),
                "largest": "not finite" if rows["bad"].any() else number(rows["largest"].max(), ".3f"),
                "ratio": NONE if pd.isna(low) else f"{low:g}" if low == high else f"{low:g} to {high:g}",
                "same": "no" if "no" in said else "yes" if "yes" in said else without,
            }
        )
    return lines


def histogram(found: pd.DataFrame) -> alt.LayerChart:
    """Point by layer: a bar of the shares in each bin; ▲ further off than a correct store, ≠ another scale."""
    names = list(dict.fromkeys(found.sort_values("line")["point"]))
    ends = [0, max(1, len(names))]
    axis = alt.Axis(
        title=None,
        values=[place + FILL / 2 for place in range(len(names))],
        labelExpr=f"{json.dumps(names)}[floor(datum.value)]",
        ticks=False,
        domain=False,
        grid=False,
        labelLimit=140,
        labelOverlap=False,
    )
    rows = {"scale": alt.Scale(domain=ends, reverse=True, nice=False), "axis": axis}
    base = chart().transform_calculate(place=PLACE)
    tips = [alt.Tooltip("point:N", title="point"), alt.Tooltip("layer:Q", title="layer", format="d")]
    tips += [
        alt.Tooltip(f"{name}:{'Q' if name in FORMATS else 'N'}", title=title, format=FORMATS.get(name, ""))
        for name, title in TITLES.items()
    ]
    legend = alt.Legend(
        title="steps of the stored format",
        labelExpr=f"{json.dumps(list(BINS))}[indexof({json.dumps(list(SHARES))}, datum.value)]",
        symbolType="square",
        symbolSize=130,
        columns=6,
    )
    scale = alt.Scale(domain=list(SHARES), range=[theme.var(name) for name in RAMP])
    bars = (
        base.transform_fold(list(SHARES), as_=["bin", "share"])
        .transform_calculate(rank=f"indexof({json.dumps(list(SHARES))}, datum.bin)")
        .transform_stack(
            stack="share",
            groupby=["point", "layer"],
            sort=[alt.SortField("rank")],
            as_=["low", "high"],
        )
        .transform_filter("datum.share > 0")
        .transform_calculate(
            top=f"datum.line + {FILL} * (1 - datum.high)", bottom=f"datum.line + {FILL} * (1 - datum.low)"
        )
        .mark_rect(width=alt.RelativeBandSize(band=0.96))
        .encode(
            x=layer_axis(),
            y=alt.Y("top:Q", **rows),
            y2="bottom:Q",
            color=alt.Color("bin:N", scale=scale, legend=legend),
            tooltip=tips,
        )
    )
    marks = [
        base.transform_filter(test)
        .transform_calculate(middle=f"datum.line + {FILL / 2}")
        .mark_text(text=text, fontSize=size, fontWeight="bold", dx=shift, color=theme.var("ink"))
        .encode(x=layer_axis(), y=alt.Y("middle:Q", **rows), tooltip=tips)
        for test, text, size, shift in (
            ("datum.beyond > 0 && datum.bad == ''", "▲", 9, 0),
            ("datum.bad != ''", "✕", 12, 0),
            ("datum.same == 'no'", "≠", 14, 9),
        )
    ]
    words = (
        "Distance of stored values to what they were made from, in steps of the stored format, point by layer"
    )
    return placed(alt.layer(bars, *marks), found.drop(columns="variant"), HEIGHT * ends[1], words)
