"""One row of the benchmark: what is launched, on how many input sets, and what it cannot be faster than."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

OURS, REPLACED = "ours", "replaced"  # paths by these names; any other name is a peer's


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload and the ways to do it, timed interleaved in one process.

    Each ``kernels/<op>/bench.py`` has ``cases(device) -> Iterator[Case]``, built one at a time.

    Attributes
    ----------
    group : which of ``kernels.bench.targets.TARGETS`` it belongs to, such as ``"b1_flashmla"``; a group without a
        target is shown without one.
    name : the row, such as ``"B=64, 64 heads, topk 640, 584-byte record"``.
    paths : name -> function that launches it on input set ``i``; no allocation, no sync: it is captured in a CUDA
        graph. :data:`OURS` is there; :data:`REPLACED` is the path that it replaces; others are peers, absent
        when their package is.
    copies : input sets, rotated so that together they exceed the L2 cache (60 MB).
    bytes : read and written at least once by any implementation of one launch.
    flops : multiply-adds x 2 of one launch by operand type: ``"bf16"``, ``"fp8"``.
    launches : kernels that each path launches.
    peers : names of the peers that belong to this row, here or not; those that are not in ``paths`` are shown as
        absent; the peer of the group's target need not be named.
    check : compares the paths' results on one input set and raises; run before timing.
    """

    group: str
    name: str
    paths: Mapping[str, Callable[[int], None]]
    copies: int
    bytes: float
    flops: Mapping[str, float] = field(default_factory=dict)
    launches: Mapping[str, int] = field(default_factory=dict)
    peers: tuple[str, ...] = ()
    check: Callable[[], None] | None = None


def rotation(size: float) -> int:
    """Input sets of ``size`` bytes that together pass the L2 cache (120 MB), from 2 to 64.

    64 sets of a decode step's few rows stay inside it, as they do in a model: the launch before wrote them.
    """
    return int(min(64, max(2, -(-120e6 // size))))
