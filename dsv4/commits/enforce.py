"""The last rule of `snakemake commits`: exit 0 only if the base and every commit passed, on a reference that holds."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dsv4.console import main_guard
from dsv4.files import write_whole
from dsv4.judge.reference_check import in_doubt
from dsv4.ladder import State

DONE = "commits.ok"
PAGE = "reports/commits.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit 1 with the commits that did not pass, or where a foreign reference disagrees; else write ``commits.ok``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="folder of the run, results/<run>")
    results = parser.parse_args(arguments).results
    done = results / DONE
    done.unlink(missing_ok=True)
    found = json.loads((results / "commits.json").read_text(encoding="utf-8"))
    if doubt := in_doubt(found):
        print(doubt, file=sys.stderr)
        return 1
    verdicts = found["commits"]
    stopped = [verdict for verdict in verdicts if verdict["status"] != State.PASS]
    if stopped:
        print(f"{len(stopped)} of {len(verdicts)} commits did not pass (see {PAGE}):", file=sys.stderr)
        for verdict in stopped:
            state = verdict["status"].replace("_", " ")
            print(
                f"  {verdict['id']} {verdict['subject']}: {state}: {verdict['reasons'][0]}", file=sys.stderr
            )
        return 1
    write_whole(done, b"every commit passed\n")
    return 0


if __name__ == "__main__":
    main_guard(main)
