"""``python -m dsv4 casts [--root DIR] [PATH ...]``: casts that cost memory traffic, and what became of each."""

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsv4.casts.hits import Cast, Status, arrow
from dsv4.casts.listing import Listing, listed
from dsv4.casts.sweep import SweepError
from dsv4.config import Config, ConfigError
from dsv4.files import write_whole

CELL = 60  # characters of source that a line shows
STYLE = {Status.OPEN: "bold red", Status.EXEMPT: "dim", Status.FIXED: "green"}


def run(config: Config, arguments: argparse.Namespace) -> int:
    """Print the list; exit status 1 if something is open or a marker cannot stand."""
    try:
        listing = listed(arguments.root, arguments.paths, config)
    except SweepError as error:
        raise ConfigError(str(error)) from error
    show(listing, Console())
    if arguments.json is not None:
        write_whole(arguments.json, json.dumps(listing.as_json(), indent=1).encode())
    return 0 if listing.clean else 1


def show(listing: Listing, console: Console, *, only_open: bool = False) -> None:
    """The list as a table, and a line on the rest."""
    for warning in listing.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if hits := listing.open if only_open else listing.hits:
        console.print(_table(listing, hits))
    for problem in listing.problems:
        console.print(f"{problem.file}:{problem.line}: {problem.said}", style="red", markup=False)
    count = {status: sum(cast.status is status for cast in listing.casts) for status in Status}
    said = ", ".join(f"{count[status]} {status}" for status in Status)
    grep = f"{len(listing.greps)} lines with `.float()`"
    console.print(f"{listing.files} files, {grep}; casts: {said}", highlight=False)


def _table(listing: Listing, hits: Sequence[Cast]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("cast, its producer and consumer, what became of it")
    if listing.rungs:
        table.add_column(f"bytes a step: most → in {listing.rungs[-1]}", justify="right", max_width=20)
    for cast in hits:
        lines = [f"{cast.file}:{cast.line}  {arrow(cast.source, cast.target)}, {cast.direction.words}"]
        lines += [f"  from {_place(cast, 'producer')}", f"  into {_place(cast, 'consumer')}"]
        cell = Text("\n".join([*lines, ""])).append(f"  {_became(cast)}", style=STYLE.get(cast.status, ""))
        moved = (
            f"{listing.most(cast):,} → {listing.bytes_in(cast, listing.rungs[-1]):,}" if listing.rungs else ""
        )
        table.add_row(cell, *([moved] if moved else []))
    return table


def _place(cast: Cast, which: str) -> str:
    place = getattr(cast, which)
    if place is None:
        return "not evident"
    text = place.text if len(place.text) <= CELL else f"{place.text[: CELL - 1]}…"
    return f"{place.line if place.file == cast.file else f'{place.file}:{place.line}'}: {text}"


def _became(cast: Cast) -> str:
    by = " by " if cast.status is Status.FIXED else ": "
    return f"{cast.status}{by}{cast.reason}" if cast.reason else str(cast.status)
