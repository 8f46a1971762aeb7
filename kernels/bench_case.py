"""One row of the benchmark: what is launched, on how many input sets, and what it cannot be faster than."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

OURS, REPLACED = "ours", "replaced"  # paths by these names; any other name is a peer's
MARGIN = 1.5  # L2 caches' worth that is touched between two uses of the same bytes: which lines leave it is not told
L2_BYTES = 62_914_560  # of an H200, for a device that tells none
MOST_SETS = 64


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
    copies : sets of inputs and outputs, in rotation: :func:`rotation`.
    bytes : read and written at least once by any implementation of one launch.
    flops : multiply-adds x 2 of one launch by operand type: ``"bf16"``, ``"fp8"``.
    launches : kernels that each path launches.
    peers : names of the peers that belong to this row, here or not; those that are not in ``paths`` are shown as
        absent; the peer of the group's target need not be named.
    check : compares the paths' results on one input set and raises; run before timing.
    apart : bytes that are touched between two uses of the same bytes; None: those of all other sets, as no two sets
        share any.
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
    apart: float | None = None

    @property
    def reused_after(self) -> float:
        """Bytes that are touched between two uses of the same bytes."""
        return (self.copies - 1) * self.bytes if self.apart is None else self.apart


def rotation(size: float, device: "torch.device | str", most: int = MOST_SETS) -> int:
    """Sets of ``size`` bytes of which all but one are :data:`MARGIN` times the L2 cache of ``device``, 2 to ``most``.

    ``most`` sets of a decode step's few rows stay inside it, as they do in a model: the launch before wrote them.
    """
    import torch  # not for who only reads results

    cuda = torch.device(device).type == "cuda"
    held = torch.cuda.get_device_properties(device).L2_cache_size if cuda else L2_BYTES
    return int(min(most, max(2, 1 + math.ceil(MARGIN * held / size))))
