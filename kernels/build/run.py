"""Compile what is stale of one architecture, under a lock; see :func:`build_all`."""

import json
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kernels.build import collect
from kernels.build.architecture import Architecture
from kernels.build.judge import judged
from kernels.build.workers import compile_all, stem
from kernels.build_spec import Build
from kernels.toolchain import Ptxas

SUMMARY, LOCK, WORK = "build.json", ".lock", ".work"


def say(text: str) -> None:
    """One line of the log."""
    print(text, file=sys.stderr, flush=True)


def build_all(
    builds: Sequence[Build],
    broken: Sequence[collect.Broken],
    arch: Architecture,
    out: Path,
    ptxas: Ptxas,
    *,
    jobs: int = 1,
) -> dict[str, Any]:
    """Bring ``out`` up to date and write its ``build.json``.

    An operating-system lock makes a second run wait and then find everything done; it goes with its owner, however
    that dies. Files are made under ``out/.work`` and renamed into place, a kernel's JSON last, with the hashes of
    the others: what a killed run left is never taken for a result.

    Returns
    -------
    dict
        The summary: ``schema, arch, triton, ptxas, date, seconds, compiled, rows``.
    """
    import triton

    out.mkdir(parents=True, exist_ok=True)
    with _locked(out / LOCK):
        started = time.monotonic()
        work = out / WORK
        shutil.rmtree(work, ignore_errors=True)  # of a run that was killed: we hold its lock
        work.mkdir()
        keys = {build.name: collect.key(build, arch, ptxas, triton.__version__) for build in builds}
        stale: dict[str, list[Build]] = {}  # builds that differ in name alone are compiled once
        for build in builds:
            if _cached(out, build.name, keys[build.name]) is None:
                stale.setdefault(keys[build.name], []).append(build)
        once = [same[0] for same in stale.values()]
        for done, (first, facts) in enumerate(compile_all(once, arch, work, jobs), start=1):
            said = facts["error"] or f"{facts['registers']} registers"
            say(f"{arch.name} {done}/{len(once)} {first.name}: {said}")
            for build in stale[keys[first.name]]:
                row = collect.identity(build, arch) | facts
                row |= {"key": keys[build.name], "ptxas": ptxas.record(), "triton": triton.__version__}
                _keep(out, stem(work, first), row)
        _drop_others(out, {build.name for build in builds})
        rows = [
            json.loads(_file(out, build.name, ".json").read_text()) | collect.identity(build, arch)
            for build in builds
        ]
        rows += [
            {"schema": collect.SCHEMA, "name": b.name, "arch": arch.name, "declares": [], "state": "failed"}
            | {"error": b.error}
            for b in broken
        ]
        shutil.rmtree(work)
        summary = {
            "schema": collect.SCHEMA,
            "arch": arch.name,
            "triton": triton.__version__,
            "ptxas": ptxas.record(),
            "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            "seconds": round(time.monotonic() - started, 1),
            "compiled": sum(map(len, stale.values())),
            "rows": [judged(row) for row in sorted(rows, key=lambda row: row["name"])],
        }
        _replace(out / SUMMARY, json.dumps(summary, indent=1).encode())
    return summary


class _locked:  # noqa: N801 - reads as the word it is
    """The folder's lock, with a line when it has to be waited for."""

    def __init__(self, path: Path) -> None:
        self._lock = FileLock(path)

    def __enter__(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            say(f"{self._lock.lock_file}: another build holds it; waiting")
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _file(out: Path, name: str, suffix: str) -> Path:
    return out / f"{name}{suffix}"


def _cached(out: Path, name: str, key: str) -> dict[str, Any] | None:
    """Return the row of an earlier run if it is of this key and its files are whole; failures are tried again."""
    try:
        row = json.loads(_file(out, name, ".json").read_text())
        whole = all(_hash(_file(out, name, suffix)) == row["sha256"][suffix] for suffix in (".ptx", ".cubin"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return row if row.get("key") == key and row["state"] == "built" and whole else None


def _hash(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _keep(out: Path, made: Path, row: dict[str, Any]) -> None:
    """Put a kernel's files into place, its JSON last."""
    name = row["name"]
    _file(out, name, "").parent.mkdir(parents=True, exist_ok=True)
    _file(out, name, ".json").unlink(missing_ok=True)
    row["sha256"] = {}
    for suffix in (".ptx", ".cubin"):
        if row["state"] == "built":
            row["sha256"][suffix] = _hash(made.with_suffix(suffix))
            _replace(_file(out, name, suffix), made.with_suffix(suffix).read_bytes())
        else:
            _file(out, name, suffix).unlink(missing_ok=True)
    _replace(_file(out, name, ".json"), json.dumps(row, indent=1).encode())


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _drop_others(out: Path, names: set[str]) -> None:
    """Remove the files of kernels that are no longer built, and parts that a killed run left."""
    keep = {_file(out, name, suffix) for name in names for suffix in (".json", ".ptx", ".cubin")}
    for path in out.rglob("*"):
        ours = path.suffix in (".json", ".ptx", ".cubin", ".part") and WORK not in path.parts
        if path.is_file() and ours and path not in keep and path != out / SUMMARY:
            path.unlink()
