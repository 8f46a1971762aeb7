"""mHC's weighted sum, RMSNorm and a GEMM's quantiser as one op: the refs that it fuses."""

from torch import Tensor

from kernels.hc.ref import collapse
from kernels.rmsnorm_quantise_nvfp4.ref import Form, NormedRows, rmsnorm_quantise
from kernels.rounding import Round, exact


def mhc_rmsnorm_quantise(
    streams: Tensor,
    pre: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    form: Form = "nvfp4",
    collapsed: Round = exact,
    between: Round = exact,
    copy: Round = exact,
) -> NormedRows:
    """Sum the streams, normalise, and store the rows as a GEMM reads them.

    Parameters
    ----------
    streams : (T, N, D) floating
    pre : (T, N) FP32
    weight : (D,) or None
    eps : float
    form : "nvfp4" or "fp8"
    collapsed, between, copy : Round
        Stores of the sum, of the norm before the quantiser, and of the copy.

    Returns
    -------
    NormedRows of (T, D)
    """
    x = collapse(streams, pre, out=collapsed)
    return rmsnorm_quantise(x, weight, eps=eps, form=form, between=between, copy=copy)
