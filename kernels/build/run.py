"""Compile what is stale of every architecture, under a lock each; see :func:`build_all`."""

import json
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kernels.build import collect
from kernels.build.architecture import Architecture
from kernels.build.judge import judged
from kernels.build.sharing import FIRST
from kernels.build.workers import Job, compile_all
from kernels.build_spec import Build
from kernels.toolchain import Ptxas

SUMMARY, LOCK, WORK = "build.json", ".lock", ".work"


def say(text: str) -> None:
    """One line of the log."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Listed:
    """What is to be built for an architecture, and with which assembler."""

    arch: Architecture
    builds: Sequence[Build]
    broken: Sequence[collect.Broken]
    ptxas: Ptxas


def build_all(listed: Sequence[Listed], out: Path, *, jobs: int = 1) -> list[dict[str, Any]]:
    """Bring each architecture's folder in ``out`` up to date and write its ``build.json``.

    An operating-system lock for each makes a second run wait and then find everything done; it goes with its owner,
    however that dies. Files are made in a folder ``.work`` and renamed into place, a kernel's JSON last, with the
    hashes of the others: what a killed run left is never taken for a result.

    Returns
    -------
    list of dict
        The summaries: ``schema, arch, triton, ptxas, date, seconds, compiled, rows``.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        for one in sorted(
            listed, key=lambda one: one.arch.name
        ):  # in one order: no two runs wait for each other
            (out / one.arch.name).mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(out / one.arch.name / LOCK))
        folders = [_Folder(one, out / one.arch.name) for one in listed]
        groups = _groups(folders)
        of = {folder.one.arch.name: folder for folder in folders}
        count = sum(map(len, groups))
        for done, (job, facts) in enumerate(compile_all(groups, jobs), start=1):
            said = facts["error"] or f"{facts['registers']} registers"
            say(f"{job.arch.name} {done}/{count} {job.build.name}: {said}")
            of[job.arch.name].keep(job, facts)
        return [folder.finish(started) for folder in folders]


class _Folder:
    """An architecture's folder, whose lock is held: what is stale there, and where what is made goes."""

    def __init__(self, one: Listed, out: Path) -> None:
        import triton

        self.one, self.work = one, out / WORK
        self._out, self._triton = out, triton.__version__
        shutil.rmtree(self.work, ignore_errors=True)  # of a run that was killed: we hold its lock
        self.work.mkdir()
        self._keys = {
            build.name: collect.key(build, one.arch, one.ptxas, self._triton) for build in one.builds
        }
        self._stale: dict[str, list[Build]] = {}  # builds that differ in name alone are compiled once
        for build in one.builds:
            if _cached(out, build.name, self._keys[build.name]) is None:
                self._stale.setdefault(self._keys[build.name], []).append(build)

    def jobs(self) -> list[Job]:
        """What has to be compiled."""
        once = [same[0] for same in self._stale.values()]
        return [Job(build, self.one.arch, self.work / build.name.replace("/", "__")) for build in once]

    def keep(self, job: Job, facts: dict[str, Any]) -> None:
        """Put what became of a Job into place, under the name of each Build that it stands for."""
        for build in self._stale[self._keys[job.build.name]]:
            row = collect.identity(build, self.one.arch) | facts
            row |= {"key": self._keys[build.name], "ptxas": self.one.ptxas.record(), "triton": self._triton}
            _keep(self._out, job.stem, row | {"compiled_as": job.build.name})

    def finish(self, started: float) -> dict[str, Any]:
        """Drop what is no longer built and write the summary."""
        builds, arch = self.one.builds, self.one.arch
        _drop_others(self._out, {build.name for build in builds})
        rows = [
            json.loads(_file(self._out, build.name, ".json").read_text()) | collect.identity(build, arch)
            for build in builds
        ]
        rows += [
            {"schema": collect.SCHEMA, "name": b.name, "arch": arch.name, "declares": [], "state": "failed"}
            | {"error": b.error}
            for b in self.one.broken
        ]
        shutil.rmtree(self.work)
        summary = {
            "schema": collect.SCHEMA,
            "arch": arch.name,
            "triton": self._triton,
            "ptxas": self.one.ptxas.record(),
            "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            "seconds": round(time.monotonic() - started, 1),
            "compiled": sum(map(len, self._stale.values())),
            "rows": [judged(row) for row in sorted(rows, key=lambda row: row["name"])],
        }
        _replace(self._out / SUMMARY, json.dumps(summary, indent=1).encode())
        return summary


def _groups(folders: Sequence[_Folder]) -> list[list[Job]]:
    """Jobs of one recipe together, the one first that leaves the others something; longest groups first.

    A kernel's source is as long as its compilation, roughly: what is short comes last, so that no core idles long.
    """
    found: dict[str, list[Job]] = {}
    for job in (job for folder in folders for job in folder.jobs()):
        found.setdefault(json.dumps(collect.recipe(job.build), sort_keys=True), []).append(job)
    groups = [sorted(group, key=lambda job: job.arch.name != FIRST) for group in found.values()]
    return sorted(groups, key=lambda group: -len(group) * len(getattr(group[0].build.kernel, "src", "")))


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
