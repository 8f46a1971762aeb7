"""The last rule: exit 1 if a spine rung failed. The audit itself is complete either way."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4.ladder import State

DONE = "enforced.ok"


def lineage(verdicts: Mapping[str, Mapping[str, Any]], target: str) -> list[str]:
    """The target and its ancestors."""
    chain: list[str] = []
    name: str | None = target
    while name is not None and name in verdicts and name not in chain:
        chain.append(name)
        name = verdicts[name].get("parent")
    return chain


def culprits(gates: Mapping[str, Any], target: str | None = None) -> list[Mapping[str, Any]]:
    """Failed spine rungs, of the whole ladder or among the target and its ancestors; leaves never count."""
    verdicts = {verdict["id"]: verdict for verdict in gates["variants"]}
    names = lineage(verdicts, target) if target else list(verdicts)
    return [
        verdicts[name]
        for name in names
        if verdicts[name]["status"] == State.FAIL and verdicts[name].get("spine")
    ]


def explain(failed: Sequence[Mapping[str, Any]]) -> str:
    """What failed and where, one line a rung."""
    lines = [f"{verdict['id']}: {(verdict.get('reasons') or ['failed'])[0]}" for verdict in failed]
    head = "The audit is complete, and these rungs do not hold (the report is written; reports/index.html):"
    return "\n".join([head, *(f"  {line}" for line in lines)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit 1 with the culprits, or write ``enforced.ok``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--target", help="a variant; only it and its ancestors count")
    options = parser.parse_args(arguments)
    done = options.results / DONE
    done.unlink(missing_ok=True)
    path = options.results / "gates.json"
    if not path.exists():
        print(f"error: {path} is not there; the audit did not get so far: run snakemake all", file=sys.stderr)
        return 1
    failed = culprits(json.loads(path.read_text()), options.target)
    if failed:
        print(explain(failed), file=sys.stderr)
        return 1
    done.write_text("no spine rung failed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
