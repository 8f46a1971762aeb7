"""Times of a decode step, put beside the counted costs of each verdict; measured by :mod:`dsv4.run.times`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "times.json"


def read_times(results: Path) -> Mapping[str, Any]:
    """``times.json``, or nothing where no device was timed."""
    path = results / FILE
    return json.loads(path.read_text()) if path.exists() else {}


def with_time(verdict: Mapping[str, Any], times: Mapping[str, Any]) -> dict[str, Any]:
    """Verdict whose cost has the variant's time, or why it has none."""
    entry = times.get("variants", {}).get(verdict["id"])
    if entry is None or "cost" not in verdict:
        return dict(verdict)
    if "why_not" in entry:
        cost = {"time": None, "note": f"time: {entry['why_not']}"}
    else:
        batch = times["sequences"]
        where = (
            f"one decode step of {len(batch)} sequences, {min(batch)} to {max(batch)} tokens, as a CUDA graph"
        )
        cost = {"time": entry, "note": f"{where}, on {times['device']}"}
    return dict(verdict) | {"cost": verdict["cost"] | cost}
