"""``python -m dsv4 casts``: every cast of a tree that costs memory traffic, and what became of it."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsv4.casts.hits import Cast, Status
from dsv4.casts.listing import Listing, listed
from dsv4.casts.sweep import SweepError
from dsv4.config import Config, ConfigError
from dsv4.files import write_whole

SAID = {"widened_after_narrow": "widened after narrow", "narrowed_only_next": "narrowed only, next"}
CELL = 48  # characters of source in a cell
STYLE = {Status.OPEN: "bold red", Status.EXEMPT: "dim", Status.FIXED: "green"}


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes besides ``--config``."""
    parser.add_argument(
        "paths", nargs="*", type=Path, help="files or folders; default: what a plan runs, or all"
    )
    parser.add_argument("--root", type=Path, default=Path(), help="the tree (default: this folder)")
    parser.add_argument("--json", type=Path, help="also write the list here")


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


def show(listing: Listing, console: Console) -> None:
    """The list as a table, and a line on the rest."""
    for warning in listing.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if listing.hits:
        console.print(_table(listing))
    for problem in listing.problems:
        console.print(f"{problem.file}:{problem.line}: {problem.said}", style="red", markup=False)
    count = {status: sum(cast.status is status for cast in listing.casts) for status in Status}
    said = ", ".join(f"{count[status]} {status}" for status in Status)
    grep = f"{len(listing.greps)} lines with `.float()`"
    console.print(f"{listing.files} files, {grep}; casts: {said}", highlight=False)


def _table(listing: Listing) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("cast", no_wrap=True)
    for name in ("what it does", "producer", "consumer", "what became of it"):
        table.add_column(name, overflow="fold")
    if listing.rungs:
        table.add_column("bytes a step", justify="right", no_wrap=True)
    for cast in listing.hits:
        cells = [f"{cast.file}:{cast.line}", _does(cast), _place(cast, "producer"), _place(cast, "consumer")]
        cells.append(_became(cast))
        if listing.rungs:
            cells.append(f"{listing.most(cast):,} → {listing.bytes_in(cast, listing.rungs[-1]):,}")
        table.add_row(*map(escape, cells), style=STYLE.get(cast.status))
    if listing.rungs:
        table.caption = f"bytes a step: in the rung where it costs most → in {listing.rungs[-1]}"
        table.caption_justify = "right"
    return table


def _does(cast: Cast) -> str:
    dtypes = f"{_short(cast.source) or '?'} → {_short(cast.target) or 'quantised'}"
    return f"{SAID.get(cast.direction, 'dtype not evident')}: {dtypes}"


def _short(dtype: str) -> str:
    return dtype.replace("bfloat", "BF").replace("float8_e", "E").replace("float", "FP").removesuffix("fn")


def _place(cast: Cast, which: str) -> str:
    place = getattr(cast, which)
    if place is None:
        return "not evident"
    text = place.text if len(place.text) <= CELL else f"{place.text[: CELL - 1]}…"
    return f"{place.line if place.file == cast.file else f'{place.file}:{place.line}'}: {text}"


def _became(cast: Cast) -> str:
    by = " by " if cast.status is Status.FIXED else ": "
    return f"{cast.status}{by}{cast.reason}" if cast.reason else str(cast.status)
