"""``bench.json``: runs and their rows, merged by device; floors are computed here, from counts and ceilings."""

import json
import secrets
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kernels.bench_case import OURS

SCHEMA = 1
Row = dict[str, Any]


class ResultsError(ValueError):
    """A results file that this version does not read."""


def load(path: Path) -> dict[str, Any]:
    """Read results; an absent file is one without rows.

    Raises
    ------
    ResultsError
        No JSON, or another schema.
    """
    if not path.exists():
        return {"schema": SCHEMA, "runs": {}, "rows": []}
    try:
        results = json.loads(path.read_text())
    except ValueError as error:
        raise ResultsError(f"{path}: no valid JSON: {error}") from error
    if not isinstance(results, dict) or results.get("schema") != SCHEMA:
        found = results.get("schema") if isinstance(results, dict) else type(results).__name__
        raise ResultsError(
            f"{path}: schema {found!r}, expected {SCHEMA}; move the file away and measure again"
        )
    return results


def save(path: Path, results: Mapping[str, Any]) -> None:
    """Put a whole file at ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_text(json.dumps(results, indent=1) + "\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def merged(
    results: Mapping[str, Any], run: str, head: Mapping[str, Any], rows: Iterable[Row]
) -> dict[str, Any]:
    """Results with a run's rows in place of older ones of the same device, op, group and name.

    A run without rows left goes; so does the error of an op's unreached cases once one of them was measured.
    """
    new = [row | {"run": run} | against_floor(row, head["ceilings"]) for row in rows]
    runs = {**results["runs"], run: dict(head)}

    def device(row: Row) -> str:
        return runs[row["run"]]["device"]["name"]

    def same(row: Row) -> tuple[str, ...]:
        return (device(row), row["op"], row["group"], row["name"])

    measured = {(device(row), row["op"]) for row in new if not row["error"]}
    replaced = {same(row) for row in new}
    old = [
        row
        for row in results["rows"]
        if same(row) not in replaced and not (row["cases"] and (device(row), row["op"]) in measured)
    ]
    rows_left = old + new
    used = {row["run"] for row in rows_left} | {run}
    return {
        "schema": SCHEMA,
        "runs": {name: found for name, found in runs.items() if name in used},
        "rows": sorted(rows_left, key=lambda row: (device(row), row["group"], row["op"])),
    }


def against_floor(row: Row, ceilings: Mapping[str, Any] | None) -> dict[str, Any]:
    """``floor_us`` and, for each path, ``share``: floor / time, 1 where nothing can be faster.

    The floor is the larger of bytes over copy bandwidth and the operand types' FLOPs over their rates, summed. A
    type whose rate was not measured leaves the floor unknown.
    """
    if not ceilings or row["error"] or not (row["bytes"] or row["flops"]):
        return {"floor_us": None}
    rates = ceilings["flops_per_s"]
    if any(kind not in rates for kind, count in row["flops"].items() if count):
        return {"floor_us": None}
    multiply = sum(count / rates[kind] for kind, count in row["flops"].items() if count)
    floor = 1e6 * max(row["bytes"] / ceilings["copy_bytes_per_s"], multiply)
    paths = {
        name: path | ({"share": floor / path["us"]["median"]} if "us" in path else {})
        for name, path in row["paths"].items()
    }
    return {"floor_us": floor, "paths": paths}


def tests(path: Path) -> dict[str, Any] | None:
    """Counts of a pytest run from its JUnit file, with the device that its conftest wrote there; None if absent."""
    try:
        root = ET.parse(path).getroot()
    except (OSError, ET.ParseError):
        return None
    suites = list(root.iter("testsuite"))
    counts = {
        kind: sum(int(suite.get(kind, 0)) for suite in suites)
        for kind in ("tests", "failures", "errors", "skipped")
    }
    device = next(
        (found.get("value") for found in root.iter("property") if found.get("name") == "device"), None
    )
    return {**counts, "device": device, "date": suites[0].get("timestamp") if suites else None}


def ours(row: Row) -> Mapping[str, Any] | None:
    """Our path of a row if it was timed."""
    path = row["paths"].get(OURS)
    return path if path and "us" in path else None
