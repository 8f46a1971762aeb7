"""Render bench.json as Markdown: ``python -m kernels.bench.page results/bench.json docs/bench.md``."""

import argparse
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from kernels.bench import table
from kernels.bench.results import ResultsError, load

INTRO = """# Kernels: times

Made by `python -m kernels.bench.page` from what `python -m kernels.bench` measured; not edited by hand.

Microseconds a launch: median (quartiles) of CUDA graph replays, the paths of a row in turns in one process. Sets of
inputs and of outputs are in rotation: "reused after" is how much is touched between two uses of the same bytes, 1.5
times the device's L2 cache where 64 sets reach that; less than the cache, as with a decode step's few rows, is "in L2".
"ours/it" is our time over the other's, replay by replay. "floor" is the larger of counted bytes over copy bandwidth
and counted FLOPs over the matrix rates, both measured in the same run; "of floor" is floor over our time: it may pass
1 in L2. "no graph" launches from Python. "run" is the run of the list above that a row was measured in.

Attention's rows name the splits of a row's keys, as many as fill the device. The audit runs one split, whose bits do
not depend on the batch: where that is another launch, it has rows of its own, `b1_one_split` and `b1_q2_one_split`.
"""
BLACKWELL = (
    "BLACKWELL: NOT RUN. `make blackwell` on such a machine compiles, tests, measures and adds its rows."
)


def page(results: Mapping[str, Any]) -> str:
    """The whole page."""
    parts = [INTRO]
    devices = groupby(table.device_groups(results), key=lambda found: found[0])
    for device, groups in devices:
        parts += [f"## {device}", "\n".join(f"- {line}" for line in measured_by(results, device))]
        for _, group, rows in groups:
            parts += [
                f"### {table.title(group, rows)}",
                markdown([table.HEADS, *(table.cells(row, results) for row in rows)]),
            ]
    if not any(blackwell(run) for run in results["runs"].values()):
        parts.append(BLACKWELL)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def blackwell(run: Mapping[str, Any]) -> bool:
    """Whether a run was on a Blackwell card."""
    return int(run["device"]["capability"].partition(".")[0]) >= 10


def measured_by(results: Mapping[str, Any], device: str) -> list[str]:
    """What ran on a device: when, with which versions and command, and the card's ceilings."""
    lines = []
    numbers = table.run_numbers(results)
    runs = {name: run for name, run in results["runs"].items() if run["device"]["name"] == device}
    newest = max(runs.values(), key=lambda run: run["date"])["commit"]
    for name in sorted(runs, key=numbers.__getitem__):
        run = runs[name]
        found = run["versions"]
        ptxas = found["ptxas"]
        marked = "" if ptxas["trusted"] else ", which miscompiles FP8 round trips"
        versions = f"torch {found['torch']}, Triton {found['triton']}, driver {found['driver'] or 'unknown'}"
        lines.append(
            f"run {numbers[name]}: {run['date']}, commit {run['commit'] or 'unknown'}"
            f"{'' if run['commit'] == newest else ', not of the newest run'}, {versions}, ptxas {ptxas['version']}"
            f" ({ptxas['source']}{marked}): `{run['command']}`"
        )
        lines.append(table.ceilings(run["ceilings"]))
        lines.append(tests(run["tests"], device))
    return lines


def tests(found: Mapping[str, Any] | None, device: str) -> str:
    """The kernels' tests without the interpreter, as far as they ran on this device."""
    if not found or found["device"] != device:
        return "the kernels' tests on this device: not recorded"
    wrong = found["failures"] + found["errors"]
    return (
        f"the kernels' tests on this device: {found['tests'] - wrong - found['skipped']} passed, {wrong} failed,"
        f" {found['skipped']} skipped"
    )


def markdown(rows: list[tuple[str, ...]]) -> str:
    """A table; its first row is the heads."""
    text = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    rule = [["---"] * len(text[0])]
    return "\n".join(f"| {' | '.join(row)} |" for row in [text[0], *rule[:1], *text[1:]])


def main(argv: list[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.page", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path)
    args = parser.parse_args(argv)
    if not args.results.is_file():
        print(f"{args.results}: missing; run `snakemake bench` on a machine with a GPU", file=sys.stderr)
        return 1
    try:
        text = page(load(args.results))
    except ResultsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    args.page.parent.mkdir(parents=True, exist_ok=True)
    args.page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
