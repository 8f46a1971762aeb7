"""What was built of the kernels and what was timed: read from ``results/build`` and ``results/bench.json``.

Both are made on request, by ``snakemake build`` and, on a GPU, ``snakemake bench``; the page says what is missing.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4.ladder import Variant

TEMPLATE = "kernels.html.j2"
OURS, REPLACED = "ours", "replaced"
HOPPER = "sm_90a"
# Field of a plan, or field=value -> what that change launches: beginnings of build names.
LAUNCHES: Mapping[str, tuple[str, ...]] = {
    "norm_quant": ("rmsnorm_quantise_nvfp4/hidden",),
    "mhc_quant": ("mhc_rmsnorm_quantise_nvfp4",),
    "q_a_norm": ("rmsnorm_quantise_nvfp4/q_a",),
    "kv_read": ("sparse_attn/b1a",),
    "q_format=fp8": ("sparse_attn/b1/", "sparse_attn/b1_table"),
    "q_format=fp8x2": ("sparse_attn/b1_q2",),
    "rope_format": ("sparse_attn/b1_rope_fp8",),
    "pv_format": ("sparse_attn/b1_pv_fp8",),
    "kv_record": ("sparse_attn/b1_aligned", "sparse_attn/hopper"),
    "index_score=fp8": ("index_logits", "index_topk", "index_query/fp8", "index_key/fp8"),
    "index_score=fp4": ("index_logits", "index_topk", "index_query/fp4", "index_key/fp4"),
    "kv_norm": ("kv_norm", "kv_write"),
}
START = (
    *("linear", "grouped_ffn", "gather_dequantise", "sparse_attn/b0", "sparse_attn/combine", "rmsnorm/"),
    *("nvfp4_quantise", "hc/", "route/"),
)


@dataclass
class Kernels:
    """Evidence about kernels beside an audit.

    Attributes
    ----------
    built : ``build.json`` of each architecture that has one.
    bench : ``bench.json``, or empty.
    foreign : the audited tree's own build, or empty.
    gaps : files that are there and cannot be read, with the reason.
    """

    built: dict[str, dict[str, Any]] = field(default_factory=dict)
    bench: dict[str, Any] = field(default_factory=dict)
    foreign: dict[str, Any] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)


def load(results: Path) -> Kernels:
    """Read what lies beside an audit's folder ``results/<run>``; a file that cannot be read is a gap."""
    root, found = results.resolve().parent, Kernels()
    for path in sorted(root.glob("build/*/build.json")):
        if summary := _read(path, found.gaps):
            found.built[summary["arch"]] = summary
    found.bench = _read(root / "bench.json", found.gaps)
    found.foreign = _read(results / "foreign_build.json", found.gaps)
    return found


def _read(path: Path, gaps: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        gaps.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(content, dict) or content.get("schema") != 1:
        gaps.append(f"{path.name} is not of schema 1: make it again")
        return {}
    return content


def shown(kernels: Kernels, ladder: Iterable[Variant]) -> dict[str, Any]:
    """All that the section says."""
    return {
        "status": status(kernels),
        "architectures": [_architecture(found) for found in kernels.built.values()],
        "names": list(kernels.built),
        "builds": _builds(kernels),
        "rungs": [_rung(kernels, rung) for rung in ladder] if kernels.built else [],
        "devices": _devices(kernels.bench),
        "foreign": kernels.foreign,
    }


def status(kernels: Kernels) -> list[str]:
    """What ran, what was only built, what was neither."""
    lines = list(kernels.gaps)
    if not kernels.built:
        lines.append("No kernel is built: run snakemake build, which needs no GPU.")
    devices = {run["device"]["name"]: run for run in kernels.bench.get("runs", {}).values()}
    for name, run in devices.items():
        lines.append(f"Kernels ran on {name}, {run['date'][:10]}.")
    if not devices:
        lines.append("No kernel was timed: run snakemake bench on a machine with a GPU.")
    if not any(_blackwell(run) for run in devices.values()):
        others = ", ".join(name for name in kernels.built if name != HOPPER)
        lines.append(f"BLACKWELL: NOT RUN ({others}: built, not run)." if others else "BLACKWELL: NOT RUN.")
    return lines


def _blackwell(run: Mapping[str, Any]) -> bool:
    return int(run["device"]["capability"].partition(".")[0]) >= 10


def _architecture(found: Mapping[str, Any]) -> dict[str, Any]:
    rows, ptxas = found["rows"], found["ptxas"]
    good = [row for row in rows if row["state"] == "built"]
    return {
        "name": found["arch"],
        "built": len(good),
        "of": len(rows),
        "faults": sum(bool(row["faults"]) for row in rows),
        "spilling": sum(row["spill_store_bytes"] + row["spill_load_bytes"] > 0 for row in good),
        "ptxas": f"{ptxas['version']} ({ptxas['source']}{'' if ptxas['trusted'] else ', not trusted with FP8'})",
        "triton": found["triton"],
    }


def _builds(kernels: Kernels) -> list[dict[str, Any]]:
    """One line a kernel, a cell an architecture; kernels with a fault first."""
    rows = {(row["name"], arch): row for arch, found in kernels.built.items() for row in found["rows"]}
    names = sorted({name for name, _ in rows})
    lines = [{"name": name, "cells": [_cell(rows.get((name, a))) for a in kernels.built]} for name in names]
    return sorted(lines, key=lambda line: not any(cell["wrong"] for cell in line["cells"]))


def _cell(row: Mapping[str, Any] | None) -> dict[str, Any]:
    if row is None:
        return {"text": "—", "more": "not built for this architecture", "wrong": False}
    if row["state"] != "built":
        return {"text": "not built", "more": row["error"], "wrong": True}
    spilled = row["spill_store_bytes"] + row["spill_load_bytes"]
    parts = [f"{row['registers']} regs", f"{row['shared_bytes'] / 1024:.0f} KB", *row["tensor"]]
    parts += [f"spills {spilled} B"] if spilled else []
    return {
        "text": ", ".join([*row["faults"], *parts]),
        "more": "; ".join(["built, not run", *row["remarks"]]),
        "wrong": bool(row["faults"]),
    }


def _rung(kernels: Kernels, rung: Variant) -> dict[str, Any]:
    """A rung with the state of what its change launches, on Hopper and on Blackwell."""
    begins = set() if rung.change else set(START)
    for site, (_, new) in rung.change.items():
        begins |= set(LAUNCHES.get(f"{site}={new}", LAUNCHES.get(site, ())))
    states = {}
    for arch, found in kernels.built.items():
        rows = [row for row in found["rows"] if any(row["name"].startswith(begin) for begin in begins)]
        states[arch] = _state(kernels.bench, arch, rows) if rows else "no kernel of its own"
    return {"id": rung.id, "states": [states[arch] for arch in kernels.built]}


def _state(bench: Mapping[str, Any], arch: str, rows: list[dict[str, Any]]) -> str:
    if any(row["faults"] for row in rows):
        return "built with faults" if all(row["state"] == "built" for row in rows) else "not built"
    ops = {row["name"].partition("/")[0] for row in rows}
    capability = arch.removeprefix("sm_").rstrip("a")
    ran = sorted(
        {
            bench["runs"][row["run"]]["device"]["name"]
            for row in bench.get("rows", [])
            if row["op"] in ops
            and not row["error"]
            and bench["runs"][row["run"]]["device"]["capability"].replace(".", "") == capability
        }
    )
    return f"ran on {', '.join(ran)}" if ran else "built, not run"


def _devices(bench: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of times, by device."""
    devices: dict[str, dict[str, Any]] = {}
    for row in bench.get("rows", []):
        run = bench["runs"][row["run"]]
        name = run["device"]["name"]
        device = devices.setdefault(name, {"name": name, "ceilings": _ceilings(run["ceilings"]), "rows": []})
        device["rows"].append(_times(row))
    return list(devices.values())


def _times(row: Mapping[str, Any]) -> dict[str, str]:
    path = row["paths"].get(OURS) or {}
    timed = not row["error"] and "us" in path
    peers = [f"{n} {r['median']:.2f}" for n, r in row["ratios"].items() if n != REPLACED]
    peers += [f"{name}: peer absent" for name in row["absent"]]
    spread = f"{_us(path['us']['median'])} ({_us(path['us']['q1'])}–{_us(path['us']['q3'])})" if timed else ""
    return {
        "group": row["group"],
        "name": row["name"],
        "us": spread or f"error: {row['error']}",
        "floor": _us(row["floor_us"]) if row.get("floor_us") else "",
        "share": f"{path['share']:.2f}" if "share" in path else "",
        "replaced": f"{row['ratios'][REPLACED]['median']:.2f}" if REPLACED in row["ratios"] else "",
        "peers": ", ".join(peers),
    }


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ceilings(found: Mapping[str, Any] | None) -> str:
    if not found:
        return "ceilings not measured"
    rates = [f"{kind} {rate / 1e12:.0f} TFLOP/s" for kind, rate in found["flops_per_s"].items()]
    return ", ".join([f"copy {found['copy_bytes_per_s'] / 1e12:.2f} TB/s", *rates])
