"""Rows that the page swaps into its charts: by key, column by column, packed.

The charts together would repeat tens of thousands of rows; the page holds each row once,
gzipped, and gives a chart the rows of the chosen variant, mode and reference.
"""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import pandas as pd

from dsv4.report import points, text_frames

LIMIT = 2_200_000  # bytes of packed rows; with Vega's 0.9 MB the page stays under 4 MB
COLUMNS = (
    *("layer", "tap", "kind", "err", "err_row", "rel_l2", "gain", "max_abs", "changed"),
    *("overlap", "overlap_min", "excess", "floor", "limit", "verdict"),
    *("noise_low", "noise_high", "over_noise", "noise_of"),
    *("level_excess", "level_error", "bad", "at"),
)
TABLES = {  # name -> columns of the key, columns of a row
    "cells": (("variant", "mode", "against"), COLUMNS),
    "codes": (("variant",), ("point", "layer", "changed", "at")),
    "points": (("variant",), points.COLUMNS),
    "drift": (("variant",), ("tap", "step", "value", "noise_low", "noise_high", "bad", "at")),
    "texts": (text_frames.PAIR, text_frames.TEXT_COLUMNS),
    "kl": (text_frames.PAIR, text_frames.KL_COLUMNS),
    "classes": (("variant",), text_frames.CLASS_COLUMNS),
}
DIGITS = {"gain": 6, "overlap": 4, "overlap_min": 4}  # decimals; other numbers keep 3 digits


def table(frame: pd.DataFrame, keys: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """Columns of each key's rows; texts are numbers of entries in one list a column."""
    shown, texts = frame[list(columns)].copy(), {}
    for name in columns:
        if not pd.api.types.is_numeric_dtype(shown[name]):
            codes, names = pd.factorize(shown[name].astype(str), use_na_sentinel=False)
            shown[name], texts[name] = codes, list(names)
    by_key = reduce(lambda left, right: left + "|" + right, (frame[name].astype(str) for name in keys))
    rows = {
        str(key): [_plain(part[name].tolist(), DIGITS.get(name)) for name in columns]
        for key, part in shown.groupby(by_key, sort=False)
    }
    return {"columns": list(columns), "texts": texts, "rows": rows}


def _plain(values: list[Any], digits: int | None) -> list[Any]:
    """JSON numbers: whole as such, others to the digits that the page shows, NaN as null."""
    found: list[Any] = []
    for value in values:
        if value is None or value != value:
            found.append(None)
        elif isinstance(value, bool) or float(value).is_integer():
            found.append(int(value))
        else:
            found.append(round(value, digits) if digits else float(f"{value:.2e}"))
    return found


def pack(tables: dict[str, Any]) -> str:
    """Base64 of gzipped JSON; the same rows give the same text."""
    raw = json.dumps(tables, separators=(",", ":"), allow_nan=False).encode()
    return base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()


def fit(frames: Mapping[str, pd.DataFrame], order: Sequence[str]) -> tuple[str, list[str]]:
    """Pack the tables' rows as far as they fit the page; also the names of variants left out.

    Parameters
    ----------
    frames : rows of each of :data:`TABLES`.
    order : variants, the ones to keep first.
    """
    tables = {name: table(frame, *TABLES[name]) for name, frame in frames.items()}
    kept = list(order)
    while True:
        packed = pack({name: _only(found, set(kept)) for name, found in tables.items()})
        if len(packed) <= LIMIT or len(kept) <= 1:
            return packed, [name for name in order if name not in kept]
        kept = kept[: max(1, min(len(kept) - 1, int(len(kept) * LIMIT / len(packed))))]


def _only(found: dict[str, Any], variants: set[str]) -> dict[str, Any]:
    rows = {key: columns for key, columns in found["rows"].items() if key.split("|", 1)[0] in variants}
    return found | {"rows": rows}
