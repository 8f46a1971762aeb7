"""What a verdict in ``gates.json`` says of a broken text; :mod:`dsv4.judge.text` wrote it. Imports nothing of ours."""

from collections.abc import Mapping
from typing import Any


def is_broken(verdict: Mapping[str, Any]) -> bool:
    """Whether a rung's text is broken, which the first reason of its verdict says too."""
    return bool(_block(verdict).get("broken"))


def faults(verdict: Mapping[str, Any]) -> list[str]:
    """Sentences: faults of the code that its text shows, whatever precision it runs at."""
    return list(_block(verdict).get("faults", ()))


def _block(verdict: Mapping[str, Any]) -> Mapping[str, Any]:
    return (verdict.get("e2e") or {}).get("text") or {}
