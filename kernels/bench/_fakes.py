"""A case whose paths take what they are told, for tests of the harness without a GPU."""

from collections.abc import Callable
from typing import Any

from kernels.bench_case import OURS, REPLACED, Case


class Fake:
    """A path that takes what it is told, one sample after the other."""

    def __init__(self, samples: tuple[float, ...]) -> None:
        self.samples, self.taken = samples, 0

    def replay(self) -> float:
        self.taken += 1
        return self.samples[(self.taken - 1) % len(self.samples)]

    def eager(self) -> float:
        return 30.0


def prepare(launch: Callable[[int], Any], copies: int) -> Any:
    """Launching a fake path gives its sampler, or raises."""
    return launch(copies)


def path(*samples: float) -> Callable[[int], Any]:
    """A path that takes these microseconds, in turns."""
    return lambda _copies: Fake(samples)


def case(**fields: Any) -> Case:
    """A case of two paths; ``fields`` replace its own."""
    given: dict[str, Any] = {"group": "topk", "name": "1 x 32K", "copies": 3, "bytes": 4.0e6}
    given["paths"] = {OURS: path(10.0), REPLACED: path(40.0)}
    return Case(**given | fields)
