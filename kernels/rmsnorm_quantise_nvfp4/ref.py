"""RMSNorm and the NVFP4 quantiser as one op: the refs that it fuses, and what passes between them."""

from typing import NamedTuple

from torch import Tensor

from kernels.nvfp4_quantise.ref import Nvfp4Rows, quantise
from kernels.rmsnorm.ref import rmsnorm
from kernels.rounding import Round, exact


class NormedRows(NamedTuple):
    """``rows``: the norm in NVFP4. ``copy``: the norm (T, D) for readers of wider values, or None."""

    rows: Nvfp4Rows
    copy: Tensor | None


def rmsnorm_quantise(
    x: Tensor, weight: Tensor | None, *, eps: float, between: Round = exact, copy: Round = exact
) -> NormedRows:
    """Normalise rows and store them as NVFP4.

    Parameters
    ----------
    x : (T, D) floating
    weight : (D,) or None
    eps : float
    between : Round
        Store between norm and quantiser: BF16 in two launches, none in one.
    copy : Round
        Store of the copy.

    Returns
    -------
    NormedRows of (T, D)
    """
    y = rmsnorm(x, weight, eps=eps, out=between)
    return NormedRows(quantise(y), copy(y))
