"""Render an audit's page: ``python -m dsv4.report --results results/<run> --config config.yaml``."""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from dsv4.files import WriteError, write_whole
from dsv4.ladder import LadderError
from dsv4.report.load import ReportError, load
from dsv4.report.page import render


def main(argv: list[str] | None = None) -> int:
    """Write ``reports/<run>-<time>.html`` and the same page as ``reports/index.html``."""
    parser = argparse.ArgumentParser(
        prog="python -m dsv4.report", description="Render an audit's page from its artefacts."
    )
    parser.add_argument("--results", type=Path, required=True, help="the audit's folder, results/<run>")
    parser.add_argument("--config", type=Path, default=Path("config.yaml"), help="its ladder names the rungs")
    parser.add_argument("--target", help="show this variant and its ancestors only")
    parser.add_argument("--reports", type=Path, default=Path("reports"), help="folder of the pages")
    args = parser.parse_args(argv)
    now = datetime.now(UTC)
    try:
        audit = load(args.results, args.config, args.target)
        page = render(audit, now)
        named = args.reports / f"{audit.run}-{now:%Y%m%dT%H%M%SZ}.html"
        for path in (named, args.reports / "index.html"):
            write_whole(path, page.encode())
    except (ReportError, LadderError, WriteError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    print(
        f"report: {args.reports / 'index.html'} ({len(page.encode()) / 1e6:.1f} MB), also {named}",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
