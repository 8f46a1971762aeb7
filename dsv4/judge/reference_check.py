"""What a foreign reference said of ours, as the verdicts and the last rules read it."""

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

FILE = "reference_check.json"


class Verdict(StrEnum):
    """What a cross-check found."""

    AGREES = "agrees"
    DIFFERS = "differs"
    CANNOT_MEASURE = "cannot_measure"


def read_check(results: Path, asked: bool) -> dict[str, Any]:
    """Whose reference verdicts stand on, and what a foreign one says of it; its table stays in its own file."""
    path = results / FILE
    if not asked:
        return {"verdict": None, "text": "reference: ours; no other was given"}
    if not path.exists():
        return {"verdict": Verdict.CANNOT_MEASURE, "text": "reference: ours; the foreign one was not run"}
    content = json.loads(path.read_text())
    return {name: content[name] for name in ("of", "verdict", "text", "bound", "missing")}


def in_doubt(verdicts: Mapping[str, Any]) -> str:
    """Why no verdict of ``gates.json`` or ``commits.json`` can be believed: the reference's, or ""."""
    check = verdicts.get("reference") or {}
    return "" if check.get("verdict") in (None, Verdict.AGREES) else f"failed: {check['text']}"
