"""Processes that compile one Job after another; see :func:`compile_all`."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from kernels.build.architecture import Architecture
from kernels.build.compile import BuildError, compile_build
from kernels.build.sharing import Kept
from kernels.build_spec import Build
from kernels.process import die_with_parent

LONGEST = 300  # seconds; a compiler that takes longer hangs
Compile = Callable[[Build, Architecture, Path, Kept], None]
_FORK = multiprocessing.get_context("fork")  # Triton and torch are imported once


@dataclass(frozen=True)
class Job:
    """One Build for one architecture; ``stem`` is the path of its files in the work folder, without the suffix."""

    build: Build
    arch: Architecture
    stem: Path


def compile_all(
    groups: Sequence[Sequence[Job]], jobs: int, compiler: Compile = compile_build
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yield each Job with what became of it, ``jobs`` at a time, in the order of the groups.

    A process compiles many, because before its first kernel Triton hashes itself: as much work as a small kernel is.
    It compiles all of a group, whose Jobs leave each other what they have in common. One that dies or hangs takes
    only the Job at hand down; the others go on in a new one.
    """
    waiting = deque((number, 0) for number, group in enumerate(groups) if group)
    workers: list[_Worker] = []
    while waiting or workers:
        while waiting and len(workers) < jobs:
            workers.append(_Worker(groups, compiler))
            workers[-1].begin(*waiting.popleft())
        wait([worker.pipe for worker in workers], timeout=1)
        for worker in list(workers):
            job, facts = worker.job, worker.facts()
            if facts is None:
                continue
            if (rest := worker.rest()) is not None:
                waiting.appendleft(rest)
            if waiting and worker.alive:  # it compiles on while the caller puts the result into place
                worker.begin(*waiting.popleft())
            else:
                workers.remove(worker)
                worker.stop()
            yield job, facts


class _Worker:
    """A compiling process and the Job that it has at hand."""

    job: Job

    def __init__(self, groups: Sequence[Sequence[Job]], compiler: Compile) -> None:
        self._groups = groups
        self.pipe, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_serve, args=(theirs, groups, compiler), daemon=True)
        self._process.start()
        theirs.close()  # the pipe ends with the process
        self.alive = True

    def begin(self, group: int, place: int) -> None:
        """Give it the next Job: its place in the groups, since a kernel does not go through a pipe."""
        self._at = group, place
        self.job, self._started = self._groups[group][place], time.monotonic()
        with contextlib.suppress(ConnectionError):  # it died meanwhile: its facts will say so
            self.pipe.send(self._at)

    def rest(self) -> tuple[int, int] | None:
        """Place of the Job that follows in the group, None if the one at hand is the last."""
        group, place = self._at
        return (group, place + 1) if place + 1 < len(self._groups[group]) else None

    def facts(self) -> dict[str, Any] | None:
        """What became of the Job at hand, None while it is compiled."""
        made = self.job.stem
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


def _serve(pipe: Connection, groups: Sequence[Sequence[Job]], compiler: Compile) -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None
    assert starter.pid is not None
    os.setpgrp()  # with the assembler that it starts it is stopped as one
    die_with_parent(starter.pid)  # and with it goes its copy of the lock
    kept, last = Kept(), None
    while True:
        group, place = pipe.recv()
        if group != last:
            kept, last = Kept(), group
        _compile(compiler, groups[group][place], kept)
        pipe.send(place)


def _compile(compiler: Compile, job: Job, kept: Kept) -> None:
    made = job.stem
    log = os.open(made.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)  # MLIR and LLVM write to the descriptors themselves
    os.dup2(log, 2)
    os.close(log)
    try:
        compiler(job.build, job.arch, made, kept)
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
