"""Run an engine's command on a job: once, in its folder, its progress shown, never longer than it may."""

import os
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from dsv4.engine.spec import Engine, EngineError
from kernels.process import die_with_parent, end_group

TAIL = 12  # lines of its output that an error quotes


def run(engine: Engine, job: Path) -> None:
    """Start the command with the job's folder as its last argument and wait for its end.

    It runs in a process group of its own, which is ended with it: no rank or child outlives a
    timeout, an error or an interrupt. If the audit is killed, the system kills the engine (Linux).

    Raises
    ------
    EngineError
        It cannot be started, takes too long, or ends with another status than 0; with the last
        lines that it wrote.
    """
    command = [*engine.command, str(job.absolute())]
    try:
        process = subprocess.Popen(
            command,
            cwd=engine.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    except OSError as error:
        raise EngineError(
            f"engine {engine.name}: {' '.join(engine.command)} cannot be started in {engine.folder.absolute()}:"
            f" {error.strerror}; correct {engine.key} in config.yaml"
        ) from error
    assert process.stdout is not None
    tail: deque[str] = deque(maxlen=TAIL)
    reader = threading.Thread(target=_show, args=(engine.name, process.stdout, tail), daemon=True)
    reader.start()
    try:
        status = process.wait(engine.timeout)
    except subprocess.TimeoutExpired as error:
        what = f"did not end within {engine.timeout:g} s ({engine.key}.timeout)"
        raise EngineError(_words(engine, job, what, tail)) from error
    finally:
        end_group(process)
        reader.join(1.0)
        process.stdout.close()
    if status:
        what = f"ended with signal {-status}" if status < 0 else f"ended with exit status {status}"
        raise EngineError(_words(engine, job, what, tail))


def _show(name: str, stream: IO[str], tail: deque[str]) -> None:
    with suppress(ValueError):  # closed under our hands, after the engine's end
        for line in stream:
            tail.append(line.rstrip("\n"))
            print(f"{name}: {line}", end="", file=sys.stderr, flush=True)


def _words(engine: Engine, job: Path, what: str, tail: deque[str]) -> str:
    said = " | ".join(line.strip() for line in tail if line.strip()) or "nothing"
    return (
        f"engine {engine.name} {what}; its last lines: {said}; to run it again by hand, in"
        f" {engine.folder.absolute()}: {' '.join(engine.command)} {job.absolute()}"
    )
