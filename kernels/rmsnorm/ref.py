"""RMSNorm: see :func:`rmsnorm`."""

from torch import Tensor

from kernels.rounding import Round, exact


def rmsnorm(x: Tensor, weight: Tensor | None, *, eps: float, out: Round = exact) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last axis.

    Parameters
    ----------
    x : (..., D) floating
    weight : (D,) or None
        None: unweighted, as q's per-head norm and mHC's flat norm are.
    eps : float
        ``rms_norm_eps``.
    out : Round
        Rounding of the result; FP32 without one.

    Returns
    -------
    (..., D) FP32
    """
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = wide * scale
    return out((y if weight is None else y * weight.double()).float())
