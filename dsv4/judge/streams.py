"""The magnitude of the mHC streams X, by layer and by decode step, and what BF16 resolves there."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsv4.dump import DumpReader
from dsv4.judge.measure import Notes
from dsv4.judge.text_files import Text
from dsv4.taps import MODEL, RESIDUAL


def bf16_ulp(value: float) -> float:
    """Spacing of BF16 at ``value``, 7 bits below its leading one; 0 at 0, NaN where it is not finite."""
    if not math.isfinite(value):
        return math.nan
    return math.ldexp(0.5, math.frexp(value)[1] - 7) if value else 0.0


def peaks(notes: Iterable[Notes]) -> list[float]:
    """Max abs X by layer, over free runs of all prompts and every row; empty where none was recorded.

    NaN or Inf where one was met.
    """
    entries = [entry for each in notes for entry in each.exercised.values()]
    found = [entry["residual_absmax"] for entry in entries if entry.get("residual_absmax")]
    return [float(value) for value in np.max(found, axis=0)] if found else []


def text_peaks(texts: Iterable[Text]) -> list[float]:
    """Max abs X by layer along the reference's texts, over rungs; NaN where one was not finite, empty of none."""
    found = [
        [math.nan if peak is None else peak for peak in text.head["residual_absmax"]]
        for text in texts
        if text.head["residual_absmax"]
    ]
    return [float(value) for value in np.max(found, axis=0)] if found else []


def text_step_peaks(text: Text) -> list[float]:
    """Max abs X by step of the reference's texts, over layers, both sites and prompts."""
    by_step = text.table.groupby("step")["residual_absmax"]
    return [float(rows.max(skipna=False)) for _, rows in by_step]


def step_peaks(dumps: Iterable[Path]) -> list[float]:
    """Max abs X by decode step, over layers, both sites and prompts: a rung's dumps on the reference's inputs.

    Parameters
    ----------
    dumps : one a prompt; those that are not there, and steps that were not dumped, count for nothing.

    Raises
    ------
    DumpError
        A dump is not what its stage wrote.
    """
    found: list[np.ndarray] = []
    for path in dumps:
        if path.exists():
            with DumpReader(path, verify=False) as dump:
                found += [_by_row(values) for values in _decode_streams(dump)]
    steps = max((len(rows) for rows in found), default=0)
    every = [np.pad(rows, (0, steps - len(rows))) for rows in found]
    return [float(value) for value in np.max(every, axis=0)] if steps else []


def _decode_streams(dump: DumpReader) -> Iterable[np.ndarray]:
    for layer in dump.layers("isolated", "decode"):
        if layer != MODEL:
            for tap in RESIDUAL:
                if dump.has("isolated", "decode", layer, tap):
                    yield dump.get("isolated", "decode", layer, tap)


def _by_row(values: np.ndarray) -> np.ndarray:
    return np.abs(values.reshape(len(values), -1)).max(axis=1)


def lines(name: str, found: Sequence[float]) -> list[Mapping[str, Any]]:
    """``{name: index, absmax, ulp}`` of each peak, None where it is not finite: JSON holds no NaN."""
    return [
        {name: index, "absmax": _finite(peak), "ulp": _finite(bf16_ulp(peak))}
        for index, peak in enumerate(found)
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
