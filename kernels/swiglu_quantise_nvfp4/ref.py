"""Clamped SwiGLU and the NVFP4 quantiser as one op: the refs that it fuses."""

from torch import Tensor

from kernels.nvfp4_quantise.ref import Nvfp4Rows, quantise
from kernels.rounding import Round, exact
from kernels.swiglu.ref import swiglu


def swiglu_quantise(gate_up: Tensor, *, limit: float, between: Round = exact) -> Nvfp4Rows:
    """Gate a row's second half by its first, and store it as NVFP4.

    Parameters
    ----------
    gate_up : (T, 2 F) floating
        Gate first.
    limit : float
        ``swiglu_limit``.
    between : Round
        Store between SwiGLU and quantiser: BF16 in two launches, none in one.

    Returns
    -------
    Nvfp4Rows of (T, F)
    """
    gate, up = gate_up.float().chunk(2, -1)
    return quantise(swiglu(gate, up, limit=limit, out=between))
