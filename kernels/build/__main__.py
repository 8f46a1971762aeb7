"""Compile every kernel for one architecture: ``python -m kernels.build --arch sm_100a --out results/build/sm_100a``."""

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
    parser.add_argument("--arch", choices=list(ARCHITECTURES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of this architecture's files")
    parser.add_argument(
        "--module", action="append", help="a kernel module; default: every kernels/<op>/kernel.py"
    )
    parser.add_argument("--jobs", type=int, default=1, help="compilations at a time")
    parser.add_argument(
        "--judge-later", action="store_true", help="exit 0 whatever kernels.build.check will say"
    )
    args = parser.parse_args(argv)
    os.environ.pop("TRITON_INTERPRET", None)  # an interpreted kernel has nothing to compile
    arch = ARCHITECTURES[args.arch]
    ptxas = select(blackwell=arch.blackwell)

    from kernels.build import collect, run

    builds, broken = collect.builds(args.module or collect.modules(), arch)
    summary = run.build_all(builds, broken, arch, args.out, ptxas, jobs=args.jobs)
    rows = worst_first(summary["rows"])
    wrong = [row for row in rows if row["faults"]]
    if not args.judge_later:
        console().print(table(rows, f"{arch.name}: built, not run; {ptxas}"))
    run.say(
        f"{arch.name}: {len(rows)} kernels, {summary['compiled']} compiled in {summary['seconds']} s with {ptxas};"
        f" {len(wrong)} with a fault"
    )
    return 0 if args.judge_later or not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
