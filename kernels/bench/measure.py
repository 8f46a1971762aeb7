"""A Case -> one row: checked, warmed up, sampled in turns. The timer is an argument, so that tests need no GPU."""

from collections.abc import Callable
from typing import Any, Protocol

from kernels.bench.statistics import order, ratio, spread
from kernels.bench.targets import TARGETS
from kernels.bench_case import OURS, REPLACED, Case

SAMPLES = 21  # replays of each path; 15 at least
EAGER_SAMPLES = 5


class Sampler(Protocol):
    """One path, ready to be timed."""

    def replay(self) -> float:
        """Microseconds of one launch, from one replay of the path's CUDA graph."""
        ...

    def eager(self) -> float:
        """Microseconds of one launch when each is launched from Python."""
        ...


Prepare = Callable[[Callable[[int], None], int], Sampler]


def measure(op: str, case: Case, prepare: Prepare, samples: int = SAMPLES) -> dict[str, Any]:
    """Check and time all paths of a case.

    Parameters
    ----------
    op : the folder that it comes from.
    case : what is measured.
    prepare : makes a sampler of a path and its number of input sets: :func:`kernels.bench.gpu.prepare`.
    samples : replays of each path.

    Returns
    -------
    dict
        ``op, group, name, copies, reused_after, bytes, flops, launches, absent, paths, ratios, error``. A path has
        ``us`` and ``eager_us`` (spreads) or an ``error``; ratios are ours / other. No path is timed if the check
        fails.
    """
    row = describe(op, case)
    if case.check is not None:
        try:
            case.check()
        except Exception as error:
            return row | {"error": f"check: {text(error)}"}
    samplers: dict[str, Sampler] = {}
    for name, launch in case.paths.items():
        try:
            samplers[name] = prepare(launch, case.copies)
        except Exception as error:  # a peer that does not run must not hide ours
            row["paths"][name] = {"error": text(error)}
    taken: dict[str, list[float]] = {name: [] for name in samplers}
    for turn in range(samples if samplers else 0):
        for name in order(list(samplers), turn):
            taken[name].append(samplers[name].replay())
    for name, sampler in samplers.items():
        eager = spread([sampler.eager() for _ in range(EAGER_SAMPLES)])
        row["paths"][name] = {"us": spread(taken[name]), "eager_us": eager}
    if OURS in taken:
        row["ratios"] = {name: ratio(taken[OURS], taken[name]) for name in taken if name != OURS}
    elif OURS in row["paths"]:
        row["error"] = f"{OURS}: {row['paths'][OURS]['error']}"
    else:
        row["error"] = f"the case has no path {OURS!r}"
    return row


def describe(op: str, case: Case) -> dict[str, Any]:
    """The row before anything was measured."""
    return {
        "op": op,
        "group": case.group,
        "name": case.name,
        "copies": case.copies,
        "reused_after": float(case.reused_after),
        "bytes": float(case.bytes),
        "flops": {kind: float(count) for kind, count in case.flops.items()},
        "launches": dict(case.launches),
        "absent": absent(case),
        "paths": {},
        "ratios": {},
        "error": None,
        "cases": False,
    }


def absent(case: Case) -> list[str]:
    """Peers that belong to a row, by its own word or its target's, and are not here."""
    target = TARGETS.get(case.group)
    wanted = [*case.peers, *([target.against] if target and target.against else [])]
    return [name for name in dict.fromkeys(wanted) if name not in (*case.paths, OURS, REPLACED)]


def failed(op: str, group: str, name: str, error: str, *, cases: bool = False) -> dict[str, Any]:
    """The row of a case whose process died; ``cases``: of an op's cases that were never reached."""
    empty: dict[str, Any] = {
        "copies": 0,
        "reused_after": 0.0,
        "bytes": 0.0,
        "flops": {},
        "launches": {},
        "absent": [],
        "paths": {},
    }
    return {"op": op, "group": group, "name": name, **empty, "ratios": {}, "error": error, "cases": cases}


def text(error: BaseException) -> str:
    """One line of an exception: its type and the first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
