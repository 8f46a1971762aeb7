"""The table of what was built, on a terminal or in a log."""

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from kernels.build.judge import Row


def table(rows: Iterable[Row], title: str) -> Table:
    """One line a kernel: what it takes, which tensor-core instructions it holds, what is wrong."""
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, side in (("kernel", "left"), ("arch", "left"), ("regs", "right"), ("spill B", "right")):
        shown.add_column(name, justify=side, no_wrap=name == "arch")  # pyright: ignore[reportArgumentType]
    shown.add_column("shared B", justify="right")
    for name in ("tensor cores", "state"):
        shown.add_column(name, overflow="fold")
    for row in rows:
        wrong = row["faults"]
        cells = [row["name"], row["arch"], "", "", "", ""]
        if row["state"] == "built":
            spilled = row["spill_store_bytes"] + row["spill_load_bytes"]
            numbers = (row["registers"], spilled, row["shared_bytes"])
            cells[2:] = [*map(str, numbers), ", ".join(row["tensor"]) or "none"]
        state = "; ".join(wrong) if wrong else "; ".join(["built, not run", *row["remarks"]])
        shown.add_row(*cells, state, style="bold red" if wrong else None)
    return shown


def console(width: int | None = None) -> Console:
    """Where tables go: as wide as the terminal, and wide enough for a log."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=width or 150)
