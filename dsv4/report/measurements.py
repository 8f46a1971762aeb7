"""The metrics table as the report reads it: known columns, checked types, the wanted variants."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

TEXTS = ("variant", "mode", "phase", "prompt", "tap", "part", "against", "verdict")
NUMBERS = (
    *("layer", "rows", "cos", "cos_min", "cos_p01", "cos_median", "worst_row", "gain", "norm_ratio"),
    *("rel_l2", "rel_l2_worst", "max_abs", "nonfinite", "changed", "kl_nats", "top1", "kl_worst"),
    *("overlap", "overlap_min", "invalid", "duplicates", "mass_lost", "margin_min", "excess"),
)
OPTIONAL = ("step", "draw")
REQUIRED = ("variant", "mode", "phase", "prompt", "layer", "tap", "against")


class ReportError(ValueError):
    """An artefact that contradicts the contract; the message names file, key and value."""


def read(file: Path, wanted: Sequence[str]) -> pd.DataFrame:
    """Rows of the wanted variants from one Parquet file.

    Raises
    ------
    ReportError
        A column is missing, or a text where a number belongs, or the other way round.
    """
    names = pq.read_schema(file).names
    if not names:  # collected from nothing
        return empty_metrics()
    absent = [name for name in REQUIRED if name not in names]
    if absent:
        raise ReportError(f"{file}: columns {', '.join(absent)} are missing")
    table = pq.read_table(file, columns=[name for name in (*TEXTS, *NUMBERS, *OPTIONAL) if name in names])
    table = table.filter(pc.field("variant").isin(list(wanted)))
    for name in table.column_names:
        kind, numeric = table.schema.field(name).type, name not in TEXTS
        if numeric != (pa.types.is_integer(kind) or pa.types.is_floating(kind)) and not pa.types.is_null(
            kind
        ):
            raise ReportError(
                f"{file}: column {name} has type {kind}, expected {'a number' if numeric else 'text'}"
            )
    return table.to_pandas()


def empty_metrics() -> pd.DataFrame:
    """No rows, every column."""
    texts = {name: pd.Series(dtype=object) for name in TEXTS}
    return pd.DataFrame(texts | {name: pd.Series(dtype=float) for name in (*NUMBERS, *OPTIONAL)})


def labels(file: Path) -> dict[str, Any]:
    """Identity of the code and machine that a variant ran on, from its table's metadata; or nothing."""
    try:
        notes = json.loads((pq.read_schema(file).metadata or {}).get(b"dsv4", b"{}"))
    except (OSError, pa.ArrowInvalid):
        return {}
    return notes.get("labels") or {}
