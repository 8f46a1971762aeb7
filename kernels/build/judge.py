"""What is wrong with a build, and what a reader should know of it. Looks at rows of ``build.json`` only."""

from collections.abc import Sequence
from typing import Any

from kernels.build.architecture import ARCHITECTURES, TENSOR_MEMORY

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
    if (
        row["tensor_memory_columns"] > TENSOR_MEMORY
    ):  # Triton then gives an empty kernel, and raises at its launch
        found.append(f"needs {row['tensor_memory_columns']} columns of tensor memory of {TENSOR_MEMORY}")
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


def short(instructions: dict[str, int]) -> list[str]:
    """Tensor-core instructions without what all of them say, once each: ``wgmma e4m3``."""
    names = []
    for name in instructions:
        head, kind = name.split(".")[0], [part for part in name.split(".") if part.startswith("kind::")]
        types = [part for part in name.split(".") if part in _OPERANDS]
        names.append(" ".join([head, *kind, *dict.fromkeys(types)]))
    return list(dict.fromkeys(names))


_OPERANDS = ("e4m3", "e5m2", "e2m1", "bf16", "f16", "tf32", "s8", "u8")


def judged(row: Row) -> Row:
    """A row with what is said of it, for readers that only show: ``faults, remarks, tensor, native``."""
    built = row["state"] == "built"
    tensor = short(row["tensor_ptx"]) if built else []
    said = {"faults": faults(row), "remarks": remarks(row), "tensor": tensor}
    return row | said | {"native": native(row) if built else {}}


def worst_first(rows: Sequence[Row]) -> list[Row]:
    """Rows with a fault above the others, each part by name."""
    return sorted(rows, key=lambda row: (not faults(row), row["name"], row["arch"]))
