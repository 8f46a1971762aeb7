"""A rung's ``text/<id>.json``, if it is of this rung and plan. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from dsv4.ladder import Variant
from dsv4.plan import flatten

SCHEMA = 1


def read_head(results: Path, variant: Variant) -> dict[str, Any] | None:
    """The account of a rung's texts; None where there is none, or one of another rung or plan, of an earlier run."""
    path = results / "text" / f"{variant.id}.json"
    if not path.exists():
        return None
    head = json.loads(path.read_text())
    wanted = {"schema": SCHEMA, "variant": variant.id, "plan": flatten(variant.plan)}
    return head if all(head.get(name) == value for name, value in wanted.items()) else None
