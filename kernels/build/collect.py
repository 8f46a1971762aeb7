"""Which Builds there are, and what each one's result depends on."""

import hashlib
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.build.architecture import Architecture
from kernels.build_spec import FLASH, PRO, Build
from kernels.toolchain import Ptxas

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = 1  # of a row; part of every key, so that an older row is made again
READERS = tuple(
    Path(__file__).with_name(name) for name in ("compile.py", "evidence.py", "sharing.py")
)  # what makes a row's facts


@dataclass(frozen=True)
class Broken:
    """A kernel module whose builds cannot be listed."""

    name: str
    error: str


def modules() -> list[str]:
    """Every ``kernels/<op>/kernel.py``, as a dotted name."""
    return [f"kernels.{path.parent.name}.kernel" for path in sorted(ROOT.glob("*/kernel.py"))]


def builds(names: Sequence[str], arch: Architecture) -> tuple[list[Build], list[Broken]]:
    """Builds of kernel modules for one architecture, both models; a module that raises is named, not fatal."""
    found: dict[str, Build] = {}
    broken: list[Broken] = []
    for name in names:
        try:
            module = importlib.import_module(name)
            listed = [build for sizes in (FLASH, PRO) for build in module.builds(sizes)]
        except Exception as error:  # a broken kernel file must not hide the others' results
            broken.append(Broken(name, f"{type(error).__name__}: {error}"))
            continue
        for build in listed:
            if build.only and arch.name not in build.only:
                continue
            if build.name in found and found[build.name] != build:
                broken.append(Broken(build.name, f"{name}: two different builds have this name"))
            found[build.name] = build
    return list(found.values()), broken


def key(build: Build, arch: Architecture, ptxas: Ptxas, triton_version: str) -> str:
    """Hash of all that decides a build's result.

    The kernel's own key covers its source and every jit function and constant that it uses, formats included. What
    was found in its code depends on who looked: a repaired detector looks again.
    """
    parts = {
        "schema": SCHEMA,
        "readers": [hashlib.sha256(path.read_bytes()).hexdigest() for path in READERS],
        **recipe(build),
        "arch": arch.name,
        "ptxas": ptxas.record(),
        "triton": triton_version,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def recipe(build: Build) -> dict[str, Any]:
    """What of a Build decides its result, whatever the architecture."""
    return {
        "kernel": getattr(build.kernel, "cache_key", repr(build.kernel)),
        "signature": [[name, kind] for name, kind in build.signature.items()],
        "constants": {name: _text(value) for name, value in build.constants.items()},
        "aligned": sorted(build.aligned),
        "options": {name: _text(value) for name, value in build.options.items()},
    }


def identity(build: Build, arch: Architecture) -> dict[str, Any]:
    """Fields of a row that come from its Build."""
    return {
        "schema": SCHEMA,
        "name": build.name,
        "arch": arch.name,
        "kernel": getattr(build.kernel, "__name__", repr(build.kernel)),
        "source_hash": getattr(build.kernel, "cache_key", None),
        "signature": dict(build.signature),
        "constants": {name: _text(value) for name, value in build.constants.items()},
        "options": {name: _text(value) for name, value in build.options.items()},
        "declares": list(build.native),
    }


def _text(value: object) -> str:
    """A constant as text that changes when it does: a jit function by its source, a layout by its fields."""
    return getattr(value, "cache_key", None) or repr(value)
