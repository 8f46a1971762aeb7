"""Judge what was built: ``python -m kernels.build.check results/build``; exit status 1 if a kernel has a fault."""

import argparse
import json
import sys
from pathlib import Path

from kernels.build.judge import Row, worst_first
from kernels.build.table import console, table


def main(argv: list[str] | None = None) -> int:
    """Print the table of every architecture in a folder; 0 if all kernels are built as they declare."""
    parser = argparse.ArgumentParser(prog="python -m kernels.build.check", description=__doc__)
    parser.add_argument("folder", type=Path, help="results/build")
    parser.add_argument("--passed", type=Path, help="file to write when nothing is wrong")
    args = parser.parse_args(argv)
    summaries = [json.loads(path.read_text()) for path in sorted(args.folder.glob("*/build.json"))]
    if not summaries:
        print(f"{args.folder}: nothing is built; run `snakemake build`", file=sys.stderr)
        return 1
    rows: list[Row] = [row for summary in summaries for row in summary["rows"]]
    console().print(table(worst_first(rows), "built, not run"))
    wrong = [row for row in rows if row["faults"]]
    for row in wrong:
        print(f"{row['name']} on {row['arch']}: {'; '.join(row['faults'])}", file=sys.stderr)
    seconds = ", ".join(f"{s['arch']} {s['compiled']} compiled in {s['seconds']} s" for s in summaries)
    print(f"{len(rows)} builds, {len(wrong)} with a fault; {seconds}", file=sys.stderr)
    if not wrong and args.passed:
        args.passed.write_text(f"{len(rows)} builds\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
