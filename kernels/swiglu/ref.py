"""Clamped SwiGLU: see :func:`swiglu`."""

import torch
from torch import Tensor

from kernels.rounding import Round, exact


def swiglu(gate: Tensor, up: Tensor, *, limit: float, out: Round = exact) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``.

    Parameters
    ----------
    gate, up : (T, F) FP32
    limit : float
        ``swiglu_limit``.
    out : Round

    Returns
    -------
    (T, F) FP32
    """
    g = gate.double().clamp(max=limit)
    return out((g * torch.sigmoid(g) * up.double().clamp(-limit, limit)).float())
