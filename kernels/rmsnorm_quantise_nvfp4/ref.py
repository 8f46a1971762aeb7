"""RMSNorm and a GEMM's quantiser as one op: the refs that it fuses, and what passes between them."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from torch import Tensor

from kernels.fp8_quantise.ref import Fp8Rows
from kernels.fp8_quantise.ref import quantise as quantise_fp8
from kernels.nvfp4_quantise.ref import Nvfp4Rows, quantise
from kernels.rmsnorm.ref import rmsnorm
from kernels.rounding import Round, exact

Form = Literal["nvfp4", "fp8"]
Rows = Nvfp4Rows | Fp8Rows
QUANTISERS: Mapping[Form, Callable[[Tensor], Rows]] = {"nvfp4": quantise, "fp8": quantise_fp8}


class NormedRows(NamedTuple):
    """``rows``: the norm in NVFP4 or FP8. ``copy``: the norm (T, D) for readers of wider values, or None."""

    rows: Rows
    copy: Tensor | None


def rmsnorm_quantise(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    form: Form = "nvfp4",
    between: Round = exact,
    copy: Round = exact,
) -> NormedRows:
    """Normalise rows and store them as a GEMM reads them.

    Parameters
    ----------
    x : (T, D) floating
    weight : (D,) or None
    eps : float
    form : "nvfp4" or "fp8"
    between : Round
        Store between norm and quantiser: BF16 in two launches, none in one.
    copy : Round
        Store of the copy.

    Returns
    -------
    NormedRows of (T, D)
    """
    y = rmsnorm(x, weight, eps=eps, out=between)
    return NormedRows(QUANTISERS[form](y), copy(y))
