"""Commits that run at the same time take turns on the GPUs: a run has one for itself, an engine has them all."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from dsv4.device import VISIBLE, visible

WAIT = 0.2  # seconds


@contextmanager
def own_gpu(folder: Path, *, every: bool = False) -> Iterator[None]:
    """Wait until a GPU is free, and let what is started meanwhile see no other; nothing where there is none.

    Parameters
    ----------
    folder : where the GPUs' locks lie; whoever shares it takes turns, and a lock goes with its owner's process.
    every : take all of them, for an engine that may spread over several.
    """
    names = visible()
    locks = [FileLock(folder / f".gpu{number}.lock") for number in range(len(names))]
    with ExitStack() as held:
        if every or len(names) < 2:
            for lock in locks:  # always in this order, so that no two wait for one another
                held.enter_context(lock)
        else:
            held.enter_context(_seen(names[_first_free(locks, held)]))
        yield


def _first_free(locks: list[FileLock], held: ExitStack) -> int:
    """Take the first lock that is free; its number."""
    while True:
        for number, lock in enumerate(locks):
            try:
                held.enter_context(lock.acquire(timeout=0))
                return number
            except Timeout:
                continue
        time.sleep(WAIT)


@contextmanager
def _seen(name: str) -> Iterator[None]:
    """Children see this GPU alone; this process keeps what it sees."""
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = name
    try:
        yield
    finally:
        os.environ.pop(VISIBLE)
        if before is not None:
            os.environ[VISIBLE] = before
