"""The dynamic half: what the casts of one decode step move, by source line, without a GPU and without weights.

A step of fixed shapes (:mod:`dsv4.backend.step`) at the checkpoint's sizes runs on the meta device: kernels are
not launched, torch's operators are dispatched with their shapes and dtypes, and nothing is computed. So this counts
what torch casts; a kernel's own casts happen in its registers and move nothing.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.ladder import Variant

CASTING = {"_to_copy", "copy_", "convert_element_type", "_to_copy_out"}


@dataclass(frozen=True, order=True)
class Spot:
    """Where a cast was run from: a file below the root, the line and column at which its expression ends."""

    file: str
    line: int
    end_line: int
    column: int


@dataclass(frozen=True, order=True)
class Moved:
    """A cast's dtypes."""

    source: str
    target: str


class Casts(TorchDispatchMode):
    """Counts bytes read and written, and calls, of every cast between floats.

    Attributes
    ----------
    bytes, calls : by spot and dtypes.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = f"{root.resolve()}/"
        self.bytes = Counter[tuple[Spot, Moved]]()
        self.calls = Counter[tuple[Spot, Moved]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator; count it if it is a cast."""
        made = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if name in CASTING:
            given = args[1] if name == "copy_" else args[0]
            if isinstance(given, torch.Tensor) and isinstance(made, torch.Tensor):
                self._count(given, made)
        return made

    def _count(self, given: torch.Tensor, made: torch.Tensor) -> None:
        floats = given.is_floating_point() and made.is_floating_point()
        if given.dtype == made.dtype or not floats or made.device.type == "cpu":
            return  # what is made on the CPU is the step's own bookkeeping
        spot = self._spot(sys._getframe(2))
        moved = Moved(*(str(each.dtype).removeprefix("torch.") for each in (given, made)))
        size = given.numel() * given.element_size() + made.numel() * made.element_size()
        if spot is not None and size:
            self.bytes[spot, moved] += size
            self.calls[spot, moved] += 1

    def _spot(self, frame: FrameType | None) -> Spot | None:
        """The innermost frame of the tree, to the column: a line may hold several casts."""
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self.root) and "site-packages" not in name and name != __file__:
                break
            frame = frame.f_back
        if frame is None:
            return None
        places = list(frame.f_code.co_positions())
        line, end_line, _, column = places[frame.f_lasti // 2]
        line = line or frame.f_lineno
        return Spot(frame.f_code.co_filename.removeprefix(self.root), line, end_line or line, column or 0)


@dataclass(frozen=True)
class Traced:
    """What one cast moved in a decode step."""

    spot: Spot
    moved: Moved
    calls: int
    bytes: int


def traced(
    root: Path, checkpoint: Path, rungs: Sequence[Variant], context: int
) -> Iterator[tuple[str, list[Traced] | str]]:
    """Casts of a decode step of each rung, at the sizes of the checkpoint's ``config.json``, behind ``context`` tokens.

    Yields
    ------
    The rung's id, and its casts; or why it has no step on kernels.
    """
    from dsv4.backend.count import step_of
    from dsv4.backend.launches import withheld
    from dsv4.backend.paths import NoKernelError
    from dsv4.model.config import load_config

    config = load_config(checkpoint)
    for rung in rungs:
        try:
            with torch.no_grad(), withheld():
                step = step_of(config, rung.plan, "meta", context=context)
                with Casts(root) as seen:
                    step.run()
        except NoKernelError as error:
            yield rung.id, str(error)
            continue
        items = sorted(seen.bytes.items())
        yield rung.id, [Traced(spot, moved, seen.calls[spot, moved], size) for (spot, moved), size in items]
