"""Texts of an audit, as ``text/`` and ``residual.json`` hold them: read whole, or named as missing.

A file that is absent is no gap: leaves, failed rungs and rungs on request have no text, and the section says which
rungs lack one. A file that cannot be read is.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from jsonschema.exceptions import best_match

from dsv4.report.measurements import ReportError

SCHEMA = "text.schema.yaml"
COLUMNS = ("prompt", "step", "kl_nats", "top1")  # of a table of forced positions that the page reads


@dataclass
class Texts:
    """Forced and free texts of the rungs that have them.

    Attributes
    ----------
    documents : variant -> its ``text/<variant>.json``.
    forced : rows of :data:`COLUMNS` and ``variant``, one a forced position: KL in nats, top-1 as bool.
    residual : B5's verdict, or empty.
    gaps : files that are there and cannot be read, with the reason.
    """

    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    forced: pd.DataFrame = field(default_factory=lambda: no_rows())
    residual: dict[str, Any] = field(default_factory=dict)
    gaps: list[tuple[str, str]] = field(default_factory=list)


def no_rows() -> pd.DataFrame:
    """No forced positions, every column."""
    return pd.DataFrame({name: pd.Series(dtype=object) for name in ("variant", *COLUMNS)})


def load(results: Path, wanted: Sequence[str]) -> Texts:
    """Read the texts of the wanted variants.

    Raises
    ------
    ReportError
        A file that says something of the wrong type.
    """
    found, frames = Texts(), []
    for name in wanted:
        path = results / "text" / f"{name}.json"
        if (document := _json(path, "document", found.gaps)) is not None:
            found.documents[name] = document
            frames += _forced(path.with_suffix(".parquet"), name, found.gaps)
    found.forced = pd.concat(frames, ignore_index=True) if frames else no_rows()
    found.residual = _json(results / "residual.json", "residual", found.gaps) or {}
    return found


def _json(path: Path, kind: str, gaps: list[tuple[str, str]]) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        gaps.append((path.name, f"cannot be read: {error}"))
        return None
    if error := best_match(_schema(kind).iter_errors(content)):
        place = ".".join(str(step) for step in error.absolute_path) or "top level"
        raise ReportError(f"{path}: {place}: {error.message[:300]}")
    return content


@cache
def _schema(kind: str) -> jsonschema.Draft202012Validator:
    defined = yaml.safe_load((Path(__file__).parent / SCHEMA).read_text())["$defs"]
    return jsonschema.Draft202012Validator({"$defs": defined, "$ref": f"#/$defs/{kind}"})


def _forced(path: Path, variant: str, gaps: list[tuple[str, str]]) -> list[pd.DataFrame]:
    try:
        names = pq.read_schema(path).names
        if absent := [name for name in COLUMNS if name not in names]:
            raise ReportError(f"{path}: columns {', '.join(absent)} are missing")
        rows = pq.read_table(path, columns=list(COLUMNS)).to_pandas()
    except FileNotFoundError:
        gaps.append((path.name, "is missing beside its .json: run snakemake again"))
    except (OSError, pa.ArrowInvalid) as error:
        gaps.append((path.name, f"cannot be read: {str(error)[:200]}"))
    else:
        return [rows.assign(variant=variant)]
    return []
