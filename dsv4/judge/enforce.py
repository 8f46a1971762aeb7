"""The last rule: exit 0 only if every spine rung that was asked for passed, or is not needed.

And if the text of none shows a fault of the code. A text that is only worse fails nothing: the page says it.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv4.console import main_guard
from dsv4.files import write_whole
from dsv4.judge.broken import faults
from dsv4.judge.reference_check import in_doubt
from dsv4.ladder import B5, State

DONE = "enforced.ok"
GOOD = (State.PASS, State.NOT_NEEDED)


def lineage(verdicts: Mapping[str, Mapping[str, Any]], target: str) -> list[str]:
    """The target and its ancestors."""
    chain: list[str] = []
    name: str | None = target
    while name is not None and name in verdicts and name not in chain:
        chain.append(name)
        name = verdicts[name].get("parent")
    return chain


def asked(verdicts: Mapping[str, Mapping[str, Any]], target: str | None) -> list[str]:
    """Spine rungs that count: of the target and its ancestors, or all but those on request."""
    names = (
        lineage(verdicts, target)
        if target and target != B5
        else [v for v in verdicts if not verdicts[v].get("on_request")]
    )
    return [name for name in names if verdicts[name].get("spine")]


def culprits(gates: Mapping[str, Any], target: str | None = None) -> list[Mapping[str, Any]]:
    """Spine rungs that did not pass, of the whole ladder or among the target and its ancestors; leaves never count.

    Without those that only wait for another culprit below them, and those on request that are no target.
    """
    verdicts = {verdict["id"]: verdict for verdict in gates["variants"]}
    stopped = [name for name in asked(verdicts, target) if verdicts[name]["status"] not in GOOD]
    return [
        verdicts[name]
        for name in stopped
        if verdicts[name]["status"] == State.FAIL or not set(lineage(verdicts, name)[1:]) & set(stopped)
    ]


def explain(stopped: Sequence[Mapping[str, Any]]) -> str:
    """What did not pass and where, one line a rung; a state but failure is named."""
    whole = all(verdict["status"] in (State.FAIL, State.CANNOT_MEASURE) for verdict in stopped)
    head = f"The audit is {'' if whole else 'not '}complete, and these rungs of the spine did not pass"
    lines = [f"{head} (the report is written: reports/index.html):"]
    for verdict in stopped:
        state = "" if verdict["status"] == State.FAIL else f"{verdict['status'].replace('_', ' ')}: "
        lines.append(f"  {verdict['id']}: {state}{(verdict.get('reasons') or ['no reason is given'])[0]}")
    return "\n".join(lines)


def faulty_texts(gates: Mapping[str, Any], target: str | None = None) -> list[str]:
    """Lines: rungs asked for that passed their gates, and whose text shows a fault of the code."""
    verdicts = {verdict["id"]: verdict for verdict in gates["variants"]}
    return [f"  {name}: {said}" for name in asked(verdicts, target) for said in faults(verdicts[name])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit 1 with culprits and faulty texts, or if a foreign reference is unlike ours; else write ``enforced.ok``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--target", help="a variant, only it and its ancestors count; or B5")
    options = parser.parse_args(arguments)
    done = options.results / DONE
    done.unlink(missing_ok=True)
    path = options.results / "gates.json"
    if not path.exists():
        print(f"error: {path} is not there; the audit did not get so far: run snakemake all", file=sys.stderr)
        return 1
    gates = json.loads(path.read_text())
    judged, wanted = [verdict["id"] for verdict in gates["variants"]], options.target or "all"
    if not judged or wanted not in ("all", *([B5] if gates.get("target") == B5 else judged)):
        print(f"error: {path} has no verdict on {wanted}; run snakemake {wanted}", file=sys.stderr)
        return 1
    if doubt := in_doubt(gates):
        print(doubt, file=sys.stderr)
        return 1
    if stopped := culprits(gates, options.target):
        print(explain(stopped), file=sys.stderr)
    if lines := faulty_texts(gates, options.target):
        head = "These rungs of the spine passed their gates, but their text is broken by a fault of the code:"
        print("\n".join([head, *lines]), file=sys.stderr)
    if stopped or lines:
        return 1
    write_whole(done, b"every spine rung asked for passed\n")
    return 0


if __name__ == "__main__":
    main_guard(main)
