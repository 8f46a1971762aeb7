"""The cast sweep's list, as ``casts.json`` holds it (:mod:`dsv4.casts`): what each cast moves and what became of it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4.casts.hits import Direction, arrow

TEMPLATE = "casts.html.j2"
TONES = {"open": "fail", "fixed": "pass", "exempt": "not_needed", "free": "not_run"}
ORDER = list(TONES)


def load(results: Path) -> tuple[dict[str, Any], str]:
    """The list, and why there is none, or ''."""
    path = results / "casts.json"
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}, "the decode path was not swept for casts"
    except (OSError, ValueError) as error:
        return {}, f"cannot be read: {error}"
    if not isinstance(content, dict) or content.get("schema") != 1:
        return {}, "is not of schema 1: run snakemake again"
    return content, ""


def shown(found: Mapping[str, Any]) -> dict[str, Any]:
    """All that the section says."""
    if not found:
        empty = dict.fromkeys(("rows", "steps", "problems", "warnings", "no_cast", "free"), ())
        return {"status": "The decode path was not swept.", "last": "", "context": 0, **empty}
    rows = [cast for cast in found["casts"] if cast["status"] != "free" or cast["grep"]]
    rows.sort(key=lambda cast: (ORDER.index(cast["status"]), -_most(cast)))
    return {
        "status": _status(found),
        "rows": [_row(cast, found["rungs"]) for cast in rows],
        "steps": _steps(found),
        "last": found["rungs"][-1] if found["rungs"] else "",
        "context": found["context"],
        "free": sorted(found["free"].items(), key=lambda pair: -pair[1]),
        "problems": [f"{each['file']}:{each['line']}: {each['said']}" for each in found["problems"]],
        "warnings": found["warnings"],
        "no_cast": found["grep"]["no_cast"],
    }


def _status(found: Mapping[str, Any]) -> str:
    count = {state: found["count"].get(state, 0) for state in ORDER}
    wrong = _many(len(found["problems"]), "marker")
    left = "Nothing is open" if found["clean"] else f"{count['open']} open, {wrong} wrong"
    return (
        f"{left} in {_many(found['files'], 'file')}: {_many(count['fixed'], 'cast')} fixed by a rung,"
        f" {count['exempt']} exempt, {count['free']} others are no hits."
        f" The plan's grep finds {_many(found['grep']['hits'], 'line')}."
    )


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


def _most(cast: Mapping[str, Any]) -> int:
    return max((step["bytes"] for step in cast["step"].values()), default=0)


def _row(cast: Mapping[str, Any], rungs: list[str]) -> dict[str, Any]:
    step = cast["step"]
    worst = max(step, key=lambda rung: step[rung]["bytes"], default="")
    at_last = step.get(rungs[-1], {}).get("bytes", 0) if rungs else 0
    calls = f"{step[worst]['calls']} calls in {worst}" if worst else "not run in a step"
    return {
        "at": f"{cast['file']}:{cast['line']}",
        "grep": cast["grep"],
        "text": cast["text"],
        "direction": "no hit" if cast["status"] == "free" else Direction(cast["direction"]).words,
        "dtypes": arrow(cast["source"], cast["target"]),
        "producer": _place(cast["producer"], cast["file"]),
        "consumer": _place(cast["consumer"], cast["file"]),
        "element": _element(cast),
        "most": f"{_most(cast):,}",
        "last": f"{at_last:,}",
        "calls": calls,
        "tone": TONES[cast["status"]],
        "became": f"fixed by {cast['reason']}" if cast["status"] == "fixed" else cast["status"],
        "reason": cast["reason"] if cast["status"] != "fixed" else "",
    }


def _element(cast: Mapping[str, Any]) -> str:
    """Bytes an element from the producer's store to the consumer's load, as it is and where the producer emits it."""
    now, then = cast["bytes_now"], cast["bytes_fixed"]
    return "—" if now is None else f"{now:g} → {then:g}"


def _place(place: Mapping[str, Any] | None, file: str) -> str:
    if place is None:
        return "not evident"
    return f"{place['line'] if place['file'] == file else '{file}:{line}'.format(**place)}: {place['text']}"


def _steps(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Bytes and calls of all casts of a step, by rung."""
    total = []
    for rung in found["rungs"]:
        steps = [cast["step"][rung] for cast in found["casts"] if rung in cast["step"]]
        total.append({key: sum(step[key] for step in steps) for key in ("bytes", "calls")} | {"rung": rung})
    return total
