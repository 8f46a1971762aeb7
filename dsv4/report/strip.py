# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (pandas' own types say that a column may be a frame, and a row any tuple)
"""The ladder's small per-layer strips: one bar a layer, taller is worse, on a log scale."""

import math
from dataclasses import dataclass

import pandas as pd

from dsv4.report.digits import cosine

HEIGHT = 20
WIDTH = 74  # pixels at most, however many layers
LOW, HIGH = -9.0, -1.0  # decades of 1 - cosine between an empty and a full bar


@dataclass(frozen=True)
class Bar:
    """One layer: place and size in the drawing, look, and what its tooltip says."""

    x: float
    y: float
    width: float
    height: float
    look: str
    title: str


@dataclass(frozen=True)
class Strip:
    """All layers of one tap; ``label`` says the same in words, ``worst`` in a number."""

    width: int
    bars: tuple[Bar, ...]
    label: str
    worst: str


def strip(cells: pd.DataFrame, tap: str, culprit_layer: object = None) -> Strip | None:
    """Isolated cosine to ``trained`` of one variant and tap, by layer; None if not measured."""
    rows = cells[(cells["tap"] == tap) & (cells["mode"] == "isolated") & (cells["against"] == "trained")]
    rows = rows[rows["layer"] >= 0].sort_values("layer")
    if rows.empty:
        return None
    pitch = min(8.0, WIDTH / len(rows))
    lowest = rows["cos"].min()
    bars = []
    for place, row in enumerate(rows.itertuples()):
        size = HEIGHT if row.bad else _height(float(row.cos))
        look = "bad" if row.bad or row.layer == culprit_layer else "worst" if row.cos == lowest else "bar"
        said = row.bad or f"cosine {cosine(row.cos)}"
        title = f"layer {row.layer}: {said} ({row.at})"
        bars.append(
            Bar(
                round(place * pitch, 2),
                HEIGHT - size,
                round(pitch - (1 if pitch > 3 else 0), 2),
                size,
                look,
                title,
            )
        )
    broken = rows[rows["bad"] != ""]
    at = rows.loc[rows["cos"].idxmin(), "layer"] if rows["cos"].notna().any() else None
    worst = broken.iloc[0]["bad"] if len(broken) else cosine(lowest)
    label = f"{tap}, isolated, {len(rows)} layers: worst {worst}"
    label += f" in layer {broken.iloc[0]['layer'] if len(broken) else at}"
    return Strip(width=round(pitch * len(rows)), bars=tuple(bars), label=label, worst=worst)


def _height(value: float) -> float:
    gap = 1 - value
    if not gap > 10**LOW:
        return 1
    share = (math.log10(gap) - LOW) / (HIGH - LOW)
    return round(1 + (HEIGHT - 1) * min(1.0, share), 1)
