"""Compile every kernel ahead of time: ``python -m kernels.build --out results/build``."""

import argparse
import os
import sys
from pathlib import Path

from kernels.build.architecture import ARCHITECTURES
from kernels.build.judge import worst_first
from kernels.build.table import console, table
from kernels.toolchain import select


def main(argv: list[str] | None = None) -> int:
    """Compile what is stale; 0 if every kernel is built as it declares, else 1."""
    parser = argparse.ArgumentParser(prog="python -m kernels.build", description=__doc__)
    parser.add_argument(
        "--arch", action="append", choices=list(ARCHITECTURES), help="an architecture; default: every one"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder in which each architecture has one of its own"
    )
    parser.add_argument(
        "--module", action="append", help="a kernel module; default: every kernels/<op>/kernel.py"
    )
    parser.add_argument("--jobs", type=int, default=1, help="compilations at a time")
    parser.add_argument(
        "--judge-later", action="store_true", help="exit 0 whatever kernels.build.check will say"
    )
    args = parser.parse_args(argv)
    os.environ.pop("TRITON_INTERPRET", None)  # an interpreted kernel has nothing to compile

    from kernels.build import collect, run

    listed = []
    for arch in (ARCHITECTURES[name] for name in dict.fromkeys(args.arch or ARCHITECTURES)):
        builds, broken = collect.builds(args.module or collect.modules(), arch)
        listed.append(run.Listed(arch, builds, broken, select(blackwell=arch.blackwell)))
    wrong = []
    for summary in run.build_all(listed, args.out, jobs=args.jobs):
        rows = worst_first(summary["rows"])
        found = [row for row in rows if row["faults"]]
        wrong += found
        ptxas = f"ptxas {summary['ptxas']['version']}, {summary['ptxas']['source']}"
        if not args.judge_later:
            console().print(table(rows, f"{summary['arch']}: built, not run; {ptxas}"))
        run.say(
            f"{summary['arch']}: {len(rows)} kernels, {summary['compiled']} compiled in {summary['seconds']} s with"
            f" {ptxas}; {len(found)} with a fault"
        )
    return 0 if args.judge_later or not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
