"""Measure every kernel on this machine's GPU: ``python -m kernels.bench --out results/bench.json``."""

import argparse
import json
import os
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernels.bench import results
from kernels.bench.measure import failed
from kernels.bench.table import show

ROOT = Path(__file__).resolve().parents[1]
OPS = [path.parent.name for path in sorted(ROOT.glob("*/bench.py"))]
ERRORS = 3  # exit status: measured, but some rows are errors
SILENT = 300.0  # seconds without an event after which a case hangs


@dataclass
class Run:
    """What the workers of one call reported."""

    head: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, merge, print; 0 if every row was measured, 3 if one is an error, 2 without a GPU, 1 if none ran."""
    args = _arguments(argv)
    if refusal := refused():
        print(f"bench: {refusal}", file=sys.stderr)
        return 2
    old = results.load(args.out)
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    head = {"date": now, "command": command(args), "commit": commit()}
    head |= {"device": None, "versions": None, "ceilings": None, "tests": results.tests(args.tests)}
    run = Run(head)
    for event in watched(args.op or OPS, args.group, args.seconds):
        if note(run, event) and run.head["device"]:
            device = run.head["device"]["name"]
            old = results.merged(old, f"{device} {now}", run.head, run.rows)
            results.save(args.out, old)
    if not run.rows:
        print("bench: no case ran", file=sys.stderr)
        return 1
    show(old, only=run.head["device"]["name"] if run.head["device"] else None)
    wrong = [row for row in run.rows if row["error"]]
    print(f"{args.out}: {len(run.rows)} rows measured now, {len(wrong)} of them errors", file=sys.stderr)
    return ERRORS if wrong else 0


def command(args: argparse.Namespace) -> str:
    """What measures the same again, anywhere: the options without the files of this machine."""
    words = [word for op in args.op or () for word in ("--op", op)]
    words += ["--group", args.group] if args.group else []
    words += ["--seconds", f"{args.seconds:g}"] if args.seconds is not None else []
    return shlex.join(["python", "-m", "kernels.bench", *words])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("results/bench.json"), help="merged into, row by row"
    )
    parser.add_argument(
        "--op", action="append", choices=OPS, help="folder below kernels/; default: every one with a bench.py"
    )
    parser.add_argument("--group", help="only this group of rows")
    parser.add_argument("--seconds", type=float, help="stop after this time; rows measured until then stay")
    parser.add_argument(
        "--tests", type=Path, default=Path("results/gpu_tests.xml"), help="pytest's JUnit file"
    )
    return parser.parse_args(argv)


def refused() -> str | None:
    """Why nothing can be measured here, or None."""
    import torch

    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set: interpreted kernels have no time; unset it"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device; times are measured on a GPU only"
    return None


def commit() -> str | None:
    """Commit of the working tree, with ``+dirty`` if files differ; None outside a checkout."""
    try:
        said = [
            subprocess.run(
                ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return said[0] + ("+dirty" if said[1] else "")


def note(run: Run, event: dict[str, Any]) -> bool:
    """Take an event in; whether it was a row."""
    kind = event["event"]
    if kind in ("device", "ceilings"):
        run.head |= {name: value for name, value in event.items() if name != "event"}
    elif kind == "case":
        print(
            f"{event['op']} {event['index']}: {event['group']}, {event['name']}", file=sys.stderr, flush=True
        )
    elif kind == "row":
        run.rows.append(event["row"])
        if event["row"]["error"]:
            print(f"  error: {event['row']['error']}", file=sys.stderr, flush=True)
    return kind == "row"


def watched(
    ops: Sequence[str],
    group: str | None,
    seconds: float | None,
    command: Sequence[str] = (),
    silent: float = SILENT,
) -> Iterator[dict[str, Any]]:
    """Events of workers that together run all ops: one that dies or hangs costs the case it was at."""
    left, skip, ceilings = list(ops), 0, True
    until = None if seconds is None else time.monotonic() + seconds
    while left:
        words = [*(command or [sys.executable, "-m", "kernels.bench.worker"]), "--skip", str(skip)]
        words += [word for op in left for word in ("--op", op)]
        words += ["--ceilings"] * ceilings + (["--group", group] if group else [])
        at: dict[str, Any] = {"op": left[0], "index": skip, "event": "start"}
        why = None
        for event in _events(words, silent, until):
            if event["event"] == "lost":
                why = event["why"]
                break
            ceilings = ceilings and event["event"] != "ceilings"
            if event["event"] == "end":
                return
            at = (
                (event if "op" in event else at | {"event": event["event"]})
                if event["event"] != "device"
                else at
            )
            yield event
        if why == "out of time":
            yield {
                "event": "row",
                "row": failed(at["op"], group or "", "cases not reached", "out of time", cases=True),
            }
            return
        if at["event"] == "start":  # no case began: the next worker would end the same way
            yield {
                "event": "row",
                "row": failed(at["op"], group or "", "all cases", f"the worker {why}", cases=True),
            }
            return
        if at["event"] in ("case", "building"):
            name = at.get("name", f"case {at['index']}, while it was built")
            yield {
                "event": "row",
                "row": failed(at["op"], at.get("group", group or ""), name, f"the worker {why}"),
            }
        left = left[left.index(at["op"]) :]
        skip = at["index"] + 1
        if at["event"] == "building":  # it would be built again only to end the same way
            left, skip = left[1:], 0


def _events(words: Sequence[str], silent: float, until: float | None) -> Iterator[dict[str, Any]]:
    """Events of one worker, and ``lost`` with the reason when it ends without ``end``."""
    reading, writing = os.pipe()
    process = subprocess.Popen([*words, "--events", str(writing)], pass_fds=(writing,), stdout=sys.stderr)
    os.close(writing)
    why, held = "", b""
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while True:
            left = silent if until is None else min(silent, until - time.monotonic())
            if left <= 0 or not selector.select(left):
                out = until is not None and time.monotonic() >= until
                why = "out of time" if out else f"was silent for {silent:.0f} s"
                process.kill()
                break
            got = os.read(reading, 1 << 16)
            if not got:
                break
            *lines, held = (held + got).split(b"\n")
            for line in lines:
                yield json.loads(line)
    os.close(reading)
    status = process.wait()
    yield {"event": "lost", "why": why or f"ended with exit status {status}"}


if __name__ == "__main__":
    sys.exit(main())
