"""How far a cosine may lie from the one in a message, where the two were not computed alike.

On a CPU the emulation is deterministic: with the same versions every printed digit must come again. That
holds for another CPU too: ops sum in FP64 and round once, and references and B1 on nano's prompts ``capital``
and ``chat`` were equal in every bit of every tap with AVX-512 and with SSE alone
(``ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=COMPATIBLE``).

Other versions, another device, or kernels on a GPU sum in another order, and what may follow from that is
what the noise floor measures: its draws move every sum by FP32's rounding error before it is rounded.

Let e be the emulation of the plan, v and w two implementations of it, r the reference (computed in FP64 on
a CPU for either, so the same), and d a bound of ``|v - e| / |e|``. The angle between v and e is then at
most ``asin(d)``. Angles obey the triangle inequality, so the angles of v and of w to r differ by
``2 asin(d)`` at most; and so do the largest of several such angles, which is what the lowest cosine of a
layer is. Of a mean of cosines the same bound gives ``sin(a + 2 asin(d)) * 2 asin(d)``, with a the largest
angle of any tensor.

d is the judge's own (:mod:`dsv4.judge.verdict`): a tensor of correct code exceeds the largest of M draws
n-fold in its squared distance with probability ``(M + 1)^-n`` at most. For the worst row one step of the
coarsest code on its path comes on top, for a code on a tie may flip in a run and in none of the draws.
n is such that all comparisons of a call together refuse a correct commit with probability FAMILY at most.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsv4.commits.evidence import DIGITS
from dsv4.dump import DumpReader
from dsv4.judge.summary import SHOWN
from dsv4.judge.tails import unseen
from dsv4.judge.verdict import FAMILY, FP32, STEP, codes
from dsv4.taps import PHASES

HALF = 0.5 * 10.0**-DIGITS  # what printing a cosine may take from it


@dataclass(frozen=True, kw_only=True)
class Band:
    """Bounds in radians.

    Attributes
    ----------
    whole : between the angles of two whole tensors.
    row : between those of two worst rows.
    """

    whole: float
    row: float

    def refuses(self, claimed: float, found: float, *, row: bool = False) -> str:
        """Why a claimed cosine does not reproduce, or ""."""
        apart, bound = _apart(claimed, found), self.row if row else self.whole
        if apart <= bound:
            return ""
        return f"{apart:.3g} rad apart, and the noise floor explains {bound:.3g}"

    def refuses_mean(self, claimed: float, found: float, lowest: float) -> str:
        """The same of a mean; ``lowest`` is the lowest cosine of any tensor."""
        angle = min(math.acos(_clip(lowest)) + self.whole, math.pi / 2)
        bound = math.sin(angle) * self.whole + HALF
        if abs(claimed - found) <= bound:
            return ""
        return f"{abs(claimed - found):.3g} apart, and the noise floor explains {bound:.3g}"


def band(floors: Iterable[Path], plan: Mapping[str, Any], comparisons: int) -> Band:
    """Bounds from the draws of a plan's noise floor.

    Parameters
    ----------
    floors : its dumps, one a prompt.
    plan : flattened.
    comparisons : how many cosines are compared in all.
    """
    tap, alpha = SHOWN[0], FAMILY / max(comparisons, 1)
    far, worst, peaks = list[float](), list[float](), list[float]()
    for path in floors:
        with DumpReader(path) as floor:
            for phase, layer in _places(floor, tap):
                attrs = floor.dataset_attrs("isolated", phase, layer, tap)
                far += np.ravel(attrs["draw_distance"]).tolist()
                worst += np.ravel(attrs["draw_worst"]).tolist()
                peaks.append(peak(floor.get("isolated", phase, layer, tap)))
    fold = float(unseen(len(far), 1.0, alpha))
    step = STEP[codes(tap, plan)] * max(peaks) + FP32
    return Band(
        whole=_angles(math.sqrt(fold) * max(far)), row=_angles(math.sqrt(fold * max(worst) ** 2 + step**2))
    )


def _places(floor: DumpReader, tap: str) -> Sequence[tuple[str, Any]]:
    return [
        (phase, layer)
        for phase in PHASES
        for layer in floor.layers("isolated", phase)
        if floor.has("isolated", phase, layer, tap)
    ]


def peak(values: np.ndarray) -> float:
    """Largest magnitude of any row over that row's norm."""
    rows = values.reshape(len(values), -1).astype(np.float64)
    size = np.linalg.norm(rows, axis=1)
    shares = np.divide(np.abs(rows).max(axis=1, initial=0.0), size, out=np.zeros(len(rows)), where=size > 0)
    return float(shares.max(initial=0.0))


def _angles(distance: float) -> float:
    """Of two implementations that are each this far from the emulation."""
    return 2 * math.asin(min(distance, 1.0))


def _clip(cosine: float) -> float:
    return min(max(cosine, -1.0), 1.0)


def _apart(claimed: float, found: float) -> float:
    """Smallest difference of the angles, over all values that are printed like ``claimed``."""
    least, most, own = (math.acos(_clip(each)) for each in (claimed + HALF, claimed - HALF, found))
    return max(0.0, least - own, own - most)
