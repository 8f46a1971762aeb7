"""Processes that compile one Build after another; see :func:`compile_all`."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from kernels.build.architecture import Architecture
from kernels.build.compile import BuildError, compile_build
from kernels.build_spec import Build
from kernels.process import die_with_parent

LONGEST = 300  # seconds; a compiler that takes longer hangs
Compile = Callable[[Build, Architecture, Path], None]
_FORK = multiprocessing.get_context("fork")  # Triton and torch are imported once


def compile_all(
    builds: Sequence[Build], arch: Architecture, work: Path, jobs: int, compiler: Compile = compile_build
) -> Iterator[tuple[Build, dict[str, Any]]]:
    """Yield each Build with what became of it, ``jobs`` at a time; its files are in ``work``, see :func:`stem`.

    A process compiles many, because before its first kernel Triton hashes itself: as much work as a small kernel is.
    One that dies or hangs takes only the Build at hand down; the others go on in a new one.
    """
    waiting = deque(builds)
    workers: list[_Worker] = []
    while waiting or workers:
        while waiting and len(workers) < jobs:
            workers.append(_Worker(builds, arch, work, compiler))
            workers[-1].begin(waiting.popleft())
        wait([worker.pipe for worker in workers], timeout=1)
        for worker in list(workers):
            build, facts = worker.build, worker.facts()
            if facts is None:
                continue
            if waiting and worker.alive:  # it compiles on while the caller puts the result into place
                worker.begin(waiting.popleft())
            else:
                workers.remove(worker)
                worker.stop()
            yield build, facts


def stem(work: Path, build: Build) -> Path:
    """Path of a Build's files in the work folder, without the suffix."""
    return work / build.name.replace("/", "__")


class _Worker:
    """A compiling process and the Build that it has at hand."""

    build: Build

    def __init__(self, builds: Sequence[Build], arch: Architecture, work: Path, compiler: Compile) -> None:
        self._work = work
        self._places = {build.name: place for place, build in enumerate(builds)}
        self.pipe, theirs = _FORK.Pipe()
        stems = [stem(work, build) for build in builds]
        self._process = _FORK.Process(
            target=_serve, args=(theirs, builds, stems, arch, compiler), daemon=True
        )
        self._process.start()
        theirs.close()  # the pipe ends with the process
        self.alive = True

    def begin(self, build: Build) -> None:
        """Give it the next Build: its place in the list, since a kernel does not go through a pipe."""
        self.build, self._started = build, time.monotonic()
        with contextlib.suppress(ConnectionError):  # it died meanwhile: its facts will say so
            self.pipe.send(self._places[build.name])

    def facts(self) -> dict[str, Any] | None:
        """What became of the Build at hand, None while it is compiled."""
        made = stem(self._work, self.build)
        if self.pipe.poll():  # an answer, or the end of the process
            try:
                self.pipe.recv()
            except (EOFError, ConnectionError):
                self.stop()
                return _failed(made, f"the compiler ended with exit code {self._process.exitcode}")
            return _outcome(made)
        if time.monotonic() - self._started <= LONGEST:
            return None
        self.stop()
        return _failed(made, f"the compiler took more than {LONGEST} s")

    def stop(self) -> None:
        """End the process and what it started; the exit code of one that has ended stays."""
        self.alive = False
        self._process.kill()
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()


def _serve(
    pipe: Connection, builds: Sequence[Build], stems: Sequence[Path], arch: Architecture, compiler: Compile
) -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None
    assert starter.pid is not None
    os.setpgrp()  # with the assembler that it starts it is stopped as one
    die_with_parent(starter.pid)  # and with it goes its copy of the lock
    while True:
        place = pipe.recv()
        _compile(compiler, builds[place], arch, stems[place])
        pipe.send(place)


def _compile(compiler: Compile, build: Build, arch: Architecture, made: Path) -> None:
    log = os.open(made.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)  # MLIR and LLVM write to the descriptors themselves
    os.dup2(log, 2)
    os.close(log)
    try:
        compiler(build, arch, made)
    except BuildError as error:
        made.with_suffix(".error").write_text(str(error))
    except Exception as error:
        made.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()


def _outcome(made: Path) -> dict[str, Any]:
    error = made.with_suffix(".error")
    if error.is_file():
        return _failed(made, error.read_text())
    return {"state": "built", "error": None} | json.loads(made.with_suffix(".json").read_text())


def _failed(made: Path, said: str) -> dict[str, Any]:
    log = made.with_suffix(".log")
    return {
        "state": "failed",
        "error": _one_line(said, log.read_text(errors="replace") if log.is_file() else ""),
    }


def _one_line(said: str, log: str) -> str:
    """Say what went wrong: the exception, and the first line in which the compiler names an error."""
    named = [line.strip() for line in log.splitlines() if "error:" in line or "Assertion" in line]
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no message"]
    # Triton's own errors begin with the place and end with what is wrong there
    return " | ".join(line[:300] for line in dict.fromkeys([lines[0], lines[-1], *named[:1]]))
