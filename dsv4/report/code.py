"""Which code runs, from ``closure.json``: counts, archived files, what is not known, what is dead."""

from collections.abc import Mapping, Sequence
from typing import Any

TEMPLATE = "code.html.j2"
TONES = {
    "dead": "pass",
    "live": "fail",
    "maybe": "cannot_measure",
    "types only": "cannot_measure",
    "no file": "not_run",
}
WORDS = {"maybe": "not ruled out", "types only": "named by types alone", "no file": "no such file"}
TOLD = {"unknown": "not known", "broken": "broken", "embedded": "in a string"}


def shown(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the section shows; None if nothing was found out."""
    if not found:
        return None
    variant, workflow = found["variant"], found["workflow"]
    return {
        "status": _status(variant, workflow),
        "archived": [_archived(row) for row in found["archived"]],
        "notes": [
            {"what": said, "place": f"{note['file']}:{note['line']}", "text": note["text"]}
            for kind, said in TOLD.items()
            for note in workflow[kind]
        ],
        "live": [
            {"file": row["file"], "status": row["status"], "why": chain(row["chain"])}
            for row in variant["live"]
        ],
        "entry": ", ".join(variant["entries"]),
        "dead": workflow["dead"],
    }


def chain(steps: Sequence[Mapping[str, Any]]) -> str:
    """``entry.py:12 → a.py:3 → b.cu``."""
    return " → ".join(f"{step['file']}:{step['line']}" if step["line"] else step["file"] for step in steps)


def _status(variant: Mapping[str, Any], workflow: Mapping[str, Any]) -> str:
    """One sentence with the counts; on top of live files those that only may be reached."""
    live, dead = workflow["counts"]["live"], workflow["counts"]["dead"]
    maybe = sum(count for name, count in workflow["counts"].items() if name not in ("live", "dead"))
    more = f", {maybe} more may be" if maybe else ""
    left = ", ".join(f"{what} {count}" for what, count in sorted(workflow["left_out"].items()))
    return (
        f"A variant's stage, {', '.join(variant['entries'])}, reaches {variant['counts']['live']} files;"
        f" the whole workflow {live} of {live + maybe + dead}{more}, {dead} are dead."
        + (f" Left out: {left}." if left else "")
    )


def _archived(row: Mapping[str, Any]) -> dict[str, Any]:
    variants = list(row["met"])
    first = row["met"][variants[0]][0] if variants else None
    return {
        "glob": row["glob"],
        "files": row["files"],
        "tone": TONES[row["verdict"]],
        "word": WORDS.get(row["verdict"], row["verdict"]),
        "by": f"{variants[0]}{f' and {len(variants) - 1} more' if variants[1:] else ''}" if variants else "",
        "why": chain(first["chain"]) if first else "",
    }
