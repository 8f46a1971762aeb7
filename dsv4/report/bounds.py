"""What an error may be: noise, isolated and compounded, and the gate's limits, as the charts draw them.

A vector that is moved by ``r`` of its length keeps a cosine of at least ``sqrt(1 - r**2)``; so a
bound on relative L2 is one on 1 - cosine too.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from dsv4.report import frames

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


def with_noise(cells: pd.DataFrame, noise: pd.DataFrame) -> pd.DataFrame:
    """Add to compounded cells how far free runs of one plan drift by rounding noise alone.

    A draw is aggregated as a cell is, worst prompt and phase; the band is least to most over draws.

    Parameters
    ----------
    cells : see :func:`dsv4.report.frames.cells`.
    noise : table of :mod:`dsv4.run.noise`.

    Returns
    -------
    DataFrame with ``noise_low`` and ``noise_high`` (1 - cosine), ``over_noise`` (relative L2 over
    the largest of a draw) and ``noise_of`` (the plan and the number of draws).
    """
    drawn = frames.cells(per_draw(noise))
    drawn = drawn.assign(err=drawn["err"].clip(lower=frames.LEAST))
    places = drawn.groupby(["layer", "tap"], as_index=False)
    band = places.agg(noise_low=("err", "min"), noise_high=("err", "max"), noise_l2=("rel_l2", "max"))
    bands = ["noise_low", "noise_high", "over_noise"]
    joined = cells.drop(columns=bands, errors="ignore").merge(band, on=["layer", "tap"], how="left")
    joined["over_noise"] = joined["rel_l2"] / joined["noise_l2"].where(joined["noise_l2"] > 0)
    joined[bands] = joined[bands].where(joined["mode"] == "compounded").astype(float)
    joined["noise_of"] = np.where(joined["noise_high"].notna(), drawn_from(noise), "")
    return joined.drop(columns="noise_l2")


def with_step_noise(drift: pd.DataFrame, noise: pd.DataFrame) -> pd.DataFrame:
    """Add the same band to decode steps: ``noise_low`` and ``noise_high``, see :func:`dsv4.report.frames.drift`."""
    drawn = frames.drift(per_draw(noise)).groupby(["tap", "step"], as_index=False)
    band = drawn.agg(noise_low=("value", "min"), noise_high=("value", "max"))
    joined = drift.merge(band, on=["tap", "step"], how="left")
    return joined.astype({"noise_low": float, "noise_high": float})


def per_draw(noise: pd.DataFrame) -> pd.DataFrame:
    """The draws as if each were a variant compared with its reference."""
    return noise.assign(variant=noise["draw"].astype(str), against="trained")


def drawn_from(noise: pd.DataFrame) -> str:
    """Whose noise it is, and of how many draws; empty if none was drawn."""
    if noise.empty:
        return ""
    return f"plan {noise['variant'].iloc[0]}, {noise['draw'].nunique()} draws"


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
