"""Compile what is stale of one architecture, under a lock, a process a kernel; see :func:`build_all`."""

import json
import multiprocessing
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kernels.build import collect
from kernels.build.architecture import Architecture
from kernels.build.compile import BuildError, compile_build
from kernels.build.judge import judged
from kernels.build_spec import Build
from kernels.toolchain import Ptxas

SUMMARY, LOCK, WORK = "build.json", ".lock", ".work"
LONGEST = 300  # seconds; a compiler that takes longer hangs
Compile = Callable[[Build, Architecture, Path], None]
_FORK = multiprocessing.get_context("fork")  # Triton and torch are imported once


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
    compiler: Compile = compile_build,
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
        for first, facts in _compile([same[0] for same in stale.values()], arch, work, jobs, compiler):
            for build in stale[keys[first.name]]:
                row = collect.identity(build, arch) | facts
                row |= {"key": keys[build.name], "ptxas": ptxas.record(), "triton": triton.__version__}
                _keep(out, _stem(work, first.name), row)
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


def _stem(work: Path, name: str) -> Path:
    return work / name.replace("/", "__")


def _compile(
    builds: Sequence[Build], arch: Architecture, work: Path, jobs: int, compiler: Compile
) -> Iterator[tuple[Build, dict[str, Any]]]:
    """Yield each Build with what became of it, ``jobs`` at a time."""
    waiting, running = list(reversed(builds)), dict[int, tuple[BaseProcess, Build, float]]()
    done = 0
    while waiting or running:
        while waiting and len(running) < jobs:
            build = waiting.pop()
            process = _FORK.Process(target=_child, args=(compiler, build, arch, _stem(work, build.name)))
            process.start()
            running[process.sentinel] = (process, build, time.monotonic())
        ready = wait(list(running), timeout=1)
        for sentinel, (process, build, started) in list(running.items()):
            late = time.monotonic() - started > LONGEST
            if sentinel not in ready and not late:
                continue
            if late:
                process.kill()
            process.join()
            del running[sentinel]
            done += 1
            facts = _outcome(_stem(work, build.name), process.exitcode, late)
            state = f"{facts['registers']} registers" if facts["state"] == "built" else facts["error"]
            say(f"{arch.name} {done}/{len(builds)} {build.name}: {state}")
            yield build, facts


def _child(compiler: Compile, build: Build, arch: Architecture, stem: Path) -> None:
    _die_with_parent()
    log = os.open(stem.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)  # MLIR and LLVM write to the descriptors themselves
    os.dup2(log, 2)
    try:
        compiler(build, arch, stem)
    except BuildError as error:
        stem.with_suffix(".error").write_text(str(error))
        raise
    except Exception as error:
        stem.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
        raise


def _die_with_parent() -> None:
    """Linux: a compilation whose parent was killed ends, and with it its copy of the lock."""
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:
            os._exit(1)


def _outcome(stem: Path, exitcode: int | None, late: bool) -> dict[str, Any]:
    facts, error = stem.with_suffix(".json"), stem.with_suffix(".error")
    if exitcode == 0 and facts.is_file():
        return {"state": "built", "error": None} | json.loads(facts.read_text())
    if late:
        said = f"the compiler took more than {LONGEST} s"
    else:
        said = error.read_text() if error.is_file() else f"the compiler ended with exit code {exitcode}"
    log = stem.with_suffix(".log").read_text(errors="replace") if stem.with_suffix(".log").is_file() else ""
    return {"state": "failed", "error": _one_line(said, log)}


def _one_line(said: str, log: str) -> str:
    """Say what went wrong: the exception, and the first line in which the compiler names an error."""
    named = [line.strip() for line in log.splitlines() if "error:" in line or "Assertion" in line]
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no message"]
    # Triton's own errors begin with the place and end with what is wrong there
    return " | ".join(line[:300] for line in dict.fromkeys([lines[0], lines[-1], *named[:1]]))
