"""Launches of kernels, counted where Python launches them: ``op.function`` -> how many."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_counters: list[Counter[str]] = []
_paused = 0
_withheld = 0


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count every launch inside, compiled or interpreted."""
    counter = Counter[str]()
    before = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}
    if not _counters:
        for kind, run in before.items():
            kind.run = _counting(run)  # type: ignore[method-assign]
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)
        if not _counters:
            for kind, run in before.items():
                kind.run = run  # type: ignore[method-assign]


@contextmanager
def uncounted() -> Iterator[None]:
    """Leave out launches inside: taps ask for them, the model does not."""
    global _paused
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1


@contextmanager
def withheld() -> Iterator[Counter[str]]:
    """Count launches, and make none: what they would write stays as it is."""
    global _withheld
    _withheld += 1
    try:
        with counted() as counter:
            yield counter
    finally:
        _withheld -= 1


def _counting(run: Callable[..., Any]) -> Callable[..., Any]:
    def counting(self: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> Any:
        if not warmup and not _paused:
            for counter in _counters:
                counter[_name(self.fn)] += 1
        if _withheld:
            return None
        return run(self, *args, warmup=warmup, **kwargs)

    return counting


def _name(function: Any) -> str:
    """``rmsnorm._rmsnorm_kernel``: the op's folder and the function."""
    parts = function.__module__.split(".")
    return f"{parts[1] if len(parts) > 2 else parts[-1]}.{function.__name__}"
