"""``python -m dsv4 closure ENTRY …``: which files are live and why, which are dead, what is not known."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dsv4.closure.findings import Kind, Note
from dsv4.closure.graph import Closure, Reached, Search, archived
from dsv4.closure.module import Rank
from dsv4.closure.tree import ClosureError
from dsv4.files import write_json

SCHEMA = 1
STATUS = {Rank.LIVE: "live", Rank.MAYBE: "maybe", Rank.TYPES: "types only"}
TITLES = {
    Kind.UNKNOWN: "not known: a run may reach more",
    Kind.BROKEN: "broken: the tree has no such module or file",
    Kind.OPTIONAL: "missing, and caught",
    Kind.EMBEDDED: "kernel source in strings",
}


OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "entries",
        {"nargs": "+", "metavar": "ENTRY", "help": "a script, a module, module:function, or a Snakefile"},
    ),
    ("--root", {"type": Path, "default": Path(), "help": "the tree (default: this folder)"}),
    ("--archived", {"action": "append", "default": [], "metavar": "GLOB", "help": "files that must be dead"}),
    ("--json", {"type": Path, "metavar": "FILE", "help": "write everything there too"}),
)  # as dsv4.__main__ takes them


def run(entries: Sequence[str], root: Path, globs: Sequence[str], json: Path | None) -> int:
    """Print the closure; exit status 1 if an archived file is live, 2 if there is nothing to look at."""
    try:
        search = Search(root, entries)
        closure = search.closure()
    except ClosureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    met = archived(closure, globs, search.tree.files)
    if json is not None:
        archives = [
            {"glob": g, "files": n, "verdict": verdict(n, found), "met": [row(each) for each in found]}
            for g, n, found in met
        ]
        write_json(json, {"schema": SCHEMA, **record(closure), "archived": archives})
    _print(closure, Console())
    return _judge(met)


def _judge(met: list[tuple[str, int, list[Reached]]]) -> int:
    status = 0
    for glob, count, reached in met:
        live = [each for each in reached if each.rank is Rank.LIVE]
        for each in reached:
            print(f"archived {glob}: {each.file} is {STATUS[each.rank]}: {each.shown()}", file=sys.stderr)
        if not count:
            print(f"archived {glob}: no file of the tree matches", file=sys.stderr)
        elif not reached:
            print(f"archived {glob}: all {count} dead", file=sys.stderr)
        status = 1 if live else status
    return status


def verdict(count: int, reached: Sequence[Reached]) -> str:
    """One word for a glob: "no file", "dead", or the surest status of a file that is reached."""
    if not count:
        return "no file"
    return STATUS[min(each.rank for each in reached)] if reached else "dead"


def record(closure: Closure) -> dict[str, Any]:
    """Everything that was found, as JSON holds it."""
    notes = {kind.value: [_told(note) for note in closure.told(kind)] for kind in Kind}
    return {
        "root": closure.root.name,
        "entries": list(closure.entries),
        "counts": {STATUS[rank]: len(closure.of(rank)) for rank in Rank} | {"dead": len(closure.dead)},
        "left_out": closure.left_out,
        "live": [row(reached) for reached in closure.reached.values()],
        "dead": list(closure.dead),
        **notes,
    }


def row(reached: Reached) -> dict[str, Any]:
    """One file that is reached, with its chain."""
    chain = [{"file": step.file, "line": step.line, "how": step.how} for step in reached.chain]
    return {"file": reached.file, "status": STATUS[reached.rank], "chain": chain}


def _told(note: Note) -> dict[str, Any]:
    return {"file": note.file, "line": note.line, "text": note.text}


def _print(closure: Closure, console: Console) -> None:
    if console.is_terminal:
        title = f"reached from {', '.join(closure.entries)}"
        table = Table("file", "status", "why", title=title, title_justify="left")
        for reached in closure.reached.values():
            table.add_row(*map(escape, (reached.file, STATUS[reached.rank], reached.shown())))
        console.print(table, highlight=False)
    else:
        for reached in closure.reached.values():
            _say(console, f"{STATUS[reached.rank]:<10} {reached.file}  {reached.shown()}")
    for file in closure.dead:
        _say(console, f"{'dead':<10} {file}")
    for kind, title in TITLES.items():
        for number, note in enumerate(closure.told(kind)):
            if not number:
                _say(console, f"\n{title}")
            _say(console, f"  {note.file}:{note.line}  {note.text}")
    external = sorted({note.text for note in closure.told(Kind.EXTERNAL)})
    _say(console, f"\nnot of this tree: {', '.join(external) or 'nothing'}")
    counts = ", ".join(f"{len(closure.of(rank))} {STATUS[rank]}" for rank in Rank)
    left = ", ".join(f"{what} {count}" for what, count in sorted(closure.left_out.items()))
    _say(console, f"{counts}, {len(closure.dead)} dead; left out: {left or 'nothing'}")


def _say(console: Console, text: str) -> None:
    """One line, however long, as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
