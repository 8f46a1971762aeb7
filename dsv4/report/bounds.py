"""What an error may be: the noise floor and the gate's limits, in the unit of the cosine chart.

A vector that is moved by ``r`` of its length keeps a cosine of at least ``sqrt(1 - r**2)``; so a
bound on relative L2 is one on 1 - cosine too.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

PLACE = ["variant", "layer", "tap"]


def gap(distance: pd.Series | np.ndarray | float) -> Any:
    """Largest 1 - cosine at a relative L2 distance."""
    inside = np.clip(np.asarray(distance, float), 0.0, 1.0)
    return -np.expm1(0.5 * np.log1p(-(np.minimum(inside, 1 - 1e-16) ** 2)))


def with_floor(cells: pd.DataFrame) -> pd.DataFrame:
    """Add ``floor`` to isolated cells: 1 - cosine that FP32 noise of this tap can explain.

    The floor's comparison gives a distance and its share of what is allowed (``excess``); their
    ratio is the distance at which the first of the floor's tests would have said "outside".
    """
    floors = cells[(cells["against"] == "floor") & (cells["excess"] > 0) & (cells["rel_l2"] > 0)]
    allowed = floors.assign(floor=gap(floors["rel_l2"] / floors["excess"]))[[*PLACE, "floor"]]
    joined = cells.drop(columns="floor", errors="ignore").merge(allowed, on=PLACE, how="left")
    joined["floor"] = joined["floor"].where(joined["mode"] == "isolated")
    return joined


def with_limits(cells: pd.DataFrame, limits: Mapping[str, Iterable[Mapping[str, Any]]]) -> pd.DataFrame:
    """Add ``limit``: the tightest limit on a cell's relative L2 or cosine, as 1 - cosine.

    Parameters
    ----------
    cells : see :func:`dsv4.report.frames.cells`.
    limits : by variant, ``{tap, part, metric, against, mode, value}``; other metrics and parts
        are left out.
    """
    rows = []
    for variant, found in limits.items():
        for limit in found:
            if limit.get("part", "all") != "all" or limit["metric"] not in ("rel_l2", "cos"):
                continue
            value = gap(limit["value"]) if limit["metric"] == "rel_l2" else 1 - limit["value"]
            rows.append(
                (variant, limit.get("mode", "isolated"), limit["against"], limit["tap"], float(value))
            )
    keys = ["variant", "mode", "against", "tap"]
    table = pd.DataFrame(rows, columns=[*keys, "limit"]).groupby(keys, as_index=False)["limit"].min()
    return cells.drop(columns="limit", errors="ignore").merge(
        table.astype({"limit": float}), on=keys, how="left"
    )
