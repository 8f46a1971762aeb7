"""What is wrong with a build: states, reasons and the table. Reads JSON only, so that it runs without Triton."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kernels.build.architecture import ARCHITECTURES

Row = dict[str, Any]


def native(row: Row) -> dict[str, str]:
    """Declared narrow formats of a row: ``"native"``, ``"missing"`` or ``"widened"`` (no such instruction)."""
    arch = ARCHITECTURES[row["arch"]]
    states = {}
    for declared in row["declares"]:
        pattern = arch.native.get(declared)
        found = pattern is not None and any(pattern.search(name) for name in row.get("tensor_ptx") or {})
        states[declared] = "widened" if pattern is None else "native" if found else "missing"
    return states


def faults(row: Row) -> list[str]:
    """Reasons for which a kernel must not be used as built; empty if it may."""
    if row["state"] != "built":
        return [f"not built: {row['error']}"]
    arch = ARCHITECTURES[row["arch"]]
    found = [
        f"{declared} is not native"
        for declared, state in native(row).items()
        if state == "missing" and declared in arch.demanded
    ]
    if row["shared_bytes"] > arch.shared_bytes:
        found.append(f"needs {row['shared_bytes']} bytes of shared memory of {arch.shared_bytes}")
    if row["miscompiled_casts"]:
        found.append(f"miscompiled by ptxas {row['ptxas']['version']}: {row['miscompiled_casts'][0]}")
    return found


def remarks(row: Row) -> list[str]:
    """What a reader should know of a kernel that may be used."""
    if row["state"] != "built":
        return []
    spilled = row["spill_store_bytes"] + row["spill_load_bytes"]
    said = [f"spills {spilled} bytes"] if spilled else []
    said += [f"{name} {state}" for name, state in native(row).items() if state != "native"]
    if not row["ptxas"]["trusted"]:
        said.append(f"ptxas {row['ptxas']['version']}, {row['ptxas']['source']}")
    return said + list(row["warnings"])


def table(rows: Iterable[Row], title: str) -> Table:
    """One line a kernel: what it takes, which tensor-core instructions it holds, what is wrong."""
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, side in (("kernel", "left"), ("arch", "left"), ("regs", "right"), ("spill B", "right")):
        shown.add_column(name, justify=side, no_wrap=name == "arch")  # pyright: ignore[reportArgumentType]
    shown.add_column("shared B", justify="right")
    for name in ("tensor cores", "state"):
        shown.add_column(name, overflow="fold")
    for row in rows:
        wrong = faults(row)
        cells = [row["name"], row["arch"], "", "", "", ""]
        if row["state"] == "built":
            spilled = row["spill_store_bytes"] + row["spill_load_bytes"]
            numbers = (row["registers"], spilled, row["shared_bytes"])
            cells[2:] = [*map(str, numbers), ", ".join(short(row["tensor_ptx"])) or "none"]
        state = "; ".join(wrong) if wrong else "; ".join(["built, not run", *remarks(row)])
        shown.add_row(*cells, state, style="bold red" if wrong else None)
    return shown


def short(instructions: dict[str, int]) -> list[str]:
    """Tensor-core instructions without what all of them say, once each: ``wgmma e4m3``."""
    names = []
    for name in instructions:
        head, kind = name.split(".")[0], [part for part in name.split(".") if part.startswith("kind::")]
        types = [part for part in name.split(".") if part in _OPERANDS]
        names.append(" ".join([head, *kind, *dict.fromkeys(types)]))
    return list(dict.fromkeys(names))


_OPERANDS = ("e4m3", "e5m2", "e2m1", "bf16", "f16", "tf32", "s8", "u8")


def console(width: int | None = None) -> Console:
    """Where tables go: as wide as the terminal, and wide enough for a log."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=width or 150)


def worst_first(rows: Sequence[Row]) -> list[Row]:
    """Rows with a fault above the others, each part by name."""
    return sorted(rows, key=lambda row: (not faults(row), row["name"], row["arch"]))
