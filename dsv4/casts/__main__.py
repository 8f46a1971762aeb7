"""The stage: ``python -m dsv4.casts --results results/RUN --config config.yaml`` writes ``casts.json``.

What it finds open is on the page; only ``python -m dsv4 casts`` exits with 1 for it.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console

from dsv4 import config as configuration
from dsv4.casts.command import show
from dsv4.casts.listing import listed
from dsv4.console import main_guard
from dsv4.files import write_whole


def main() -> int:
    """List the casts of this project's decode path."""
    parser = argparse.ArgumentParser(prog="python -m dsv4.casts", description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=Path("config.yaml"))
    arguments = parser.parse_args()
    listing = listed(Path(), [], configuration.load(arguments.config))
    show(listing, Console(), only_open=True)
    write_whole(arguments.results / "casts.json", json.dumps(listing.as_json(), indent=1).encode())
    return 0


if __name__ == "__main__":
    main_guard(main)
