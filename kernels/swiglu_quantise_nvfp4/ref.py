"""Clamped SwiGLU and a GEMM's quantiser as one op: the refs that it fuses."""

from torch import Tensor

from kernels.rmsnorm_quantise_nvfp4.ref import QUANTISERS, Form, Rows
from kernels.rounding import Round, exact
from kernels.swiglu.ref import swiglu


def swiglu_quantise(gate_up: Tensor, *, limit: float, form: Form = "nvfp4", between: Round = exact) -> Rows:
    """Gate a row's second half by its first, and store it as a GEMM reads it.

    Parameters
    ----------
    gate_up : (T, 2 F) floating
        Gate first.
    limit : float
        ``swiglu_limit``.
    form : "nvfp4" or "fp8"
    between : Round
        Store between SwiGLU and quantiser: BF16 in two launches, none in one.

    Returns
    -------
    Nvfp4Rows or Fp8Rows of (T, F)
    """
    gate, up = gate_up.float().chunk(2, -1)
    return QUANTISERS[form](swiglu(gate, up, limit=limit, out=between))
