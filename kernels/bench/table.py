"""Rows of bench.json as cells, and the table on a terminal."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kernels.bench.results import Row, ours
from kernels.bench.targets import TARGETS, Target, reached
from kernels.bench_case import OURS, REPLACED

HEADS = (
    "row",
    "ours, us",
    "floor, us",
    "of floor",
    "reused after",
    "no graph, us",
    "launches",
    "replaced, us",
    "peers, us",
    "run",
)
ABSENT = "peer absent"


def device_groups(results: Mapping[str, Any]) -> Iterable[tuple[str, str, list[Row]]]:
    """Rows by device and group, in the file's order."""

    def place(row: Row) -> tuple[str, str]:
        return results["runs"][row["run"]]["device"]["name"], row["group"]

    for (device, group), rows in groupby(sorted(results["rows"], key=place), key=place):
        yield device, group, list(rows)


def title(group: str, rows: list[Row]) -> str:
    """Name of a group, its target and whether that was reached."""
    target = TARGETS.get(group)
    if target is None:
        return group or "no group"
    return f"{target.title}: {goal(target)}; {reached(target, rows)}"


def goal(target: Target) -> str:
    """A target in words."""
    which = "on average" if target.average else "on each row"
    of = "of the floor" if target.against is None else f"of the time of {target.against}"
    words = f"must {target.must:.2f} {of} {which}, aim {target.aim:.2f}"
    words += f"; {target.each:.2f} on each row" if target.each else ""
    return words + "".join(
        f"; {name}: {must:.2f}, aim {aim:.2f}" for name, (must, aim) in target.rows.items()
    )


def cells(row: Row, results: Mapping[str, Any]) -> tuple[str, ...]:
    """One row as text, by :data:`HEADS`."""
    run = str(run_numbers(results)[row["run"]])
    if row["error"]:
        return (row["name"], f"error: {row['error']}", *[""] * (len(HEADS) - 3), run)
    path = ours(row)
    assert path is not None
    launches = ", ".join(f"{name} {count}" for name, count in row["launches"].items())
    floor = row.get("floor_us")
    peers = [other(row, name) for name in row["paths"] if name not in (OURS, REPLACED)]
    peers += [f"{name}: {ABSENT}" for name in row["absent"]]
    return (
        row["name"],
        us(path["us"]),
        number(floor) if floor else "",
        number(path["share"]) if "share" in path else "",
        reused_after(row, results["runs"][row["run"]]["device"]["l2_bytes"]),
        number(path["eager_us"]["median"]),
        launches,
        other(row, REPLACED).removeprefix(f"{REPLACED}: ") if REPLACED in row["paths"] else "",
        "; ".join(peers),
        run,
    )


def run_numbers(results: Mapping[str, Any]) -> dict[str, int]:
    """Number of each run among those of its device, the oldest 1: rows of two runs may be of two commits."""
    numbers: dict[str, int] = {}
    devices = Counter[str]()
    for name, run in sorted(results["runs"].items(), key=lambda item: item[1]["date"]):
        devices[run["device"]["name"]] += 1
        numbers[name] = devices[run["device"]["name"]]
    return numbers


def reused_after(row: Row, l2_bytes: int) -> str:
    """Bytes touched between two uses of the same bytes, and whether they are so few that these stay in the L2 cache."""
    if "reused_after" not in row:
        return "not recorded"
    size = row["reused_after"]
    if not row["bytes"]:
        return ""
    return f"{number(size / 1e6)} MB" + (", in L2" if size <= l2_bytes else "")


def other(row: Row, name: str) -> str:
    """Time of another path, and ours over it with quartiles."""
    path = row["paths"][name]
    if "us" not in path:
        return f"{name}: error: {path['error']}"
    ratio = row["ratios"][name]
    spread = f"{ratio['median']:.2f} ({ratio['q1']:.2f}-{ratio['q3']:.2f})"
    return f"{name}: {us(path['us'])}, ours/it {spread}"


def us(spread: Mapping[str, float]) -> str:
    """Median and quartiles."""
    return f"{number(spread['median'])} ({number(spread['q1'])}-{number(spread['q3'])})"


def number(value: float) -> str:
    """Three digits or more."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ceilings(found: Mapping[str, Any] | None) -> str:
    """The card's ceilings in words."""
    if not found:
        return "ceilings not measured"
    rates = [f"{kind} {rate / 1e12:.0f} TFLOP/s" for kind, rate in found["flops_per_s"].items()]
    rates += [f"{kind} not measured: {why}" for kind, why in found["errors"].items()]
    copy = f"copy {found['copy_bytes_per_s'] / 1e12:.2f} TB/s ({found['copied_bytes'] / 1e9:.1f} GB moved)"
    return ", ".join([copy, *rates])


def show(results: Mapping[str, Any], only: str | None = None, console: Console | None = None) -> None:
    """Print the tables of one device, or of all."""
    plain = console or Console()
    out = plain if console or plain.is_terminal else Console(width=180)
    for device, group, rows in device_groups(results):
        if only is not None and device != only:
            continue
        shown = Table(title=f"{device}: {title(group, rows)}", title_justify="left", box=box.SIMPLE_HEAD)
        for index, name in enumerate(HEADS):
            shown.add_column(name, justify="right" if 0 < index < 6 else "left", overflow="fold")
        for row in rows:
            shown.add_row(*cells(row, results), style="bold red" if row["error"] else None)
        out.print(shown)
    for name, number in run_numbers(results).items():
        found = results["runs"][name]
        if only is None or found["device"]["name"] == only:
            out.print(
                f"{found['device']['name']}, run {number}, {found['date']}: {ceilings(found['ceilings'])}"
            )
