"""Feed-forward experts: see :func:`grouped_ffn` and :func:`dense_ffn`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear.ref import Activation, Weight, linear, quantise_activation
from kernels.rounding import Round, exact
from kernels.swiglu.ref import swiglu


@dataclass(frozen=True, kw_only=True)
class FfnRounding:
    """Rounding points inside an expert; the defaults are the equations.

    Attributes
    ----------
    gate_up : the first GEMM's store.
    hidden : SwiGLU's store, before its quantiser.
    quantise : whether the second GEMM's input is stored in the weight's format.
    out : the store of the layer's result (after the weighted sum, for routed experts).
    """

    gate_up: Round = exact
    hidden: Round = exact
    quantise: bool = False
    out: Round = exact


EQUATIONS = FfnRounding()


def grouped_ffn(
    x: Activation,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    limit: float,
    at: FfnRounding = EQUATIONS,
) -> Tensor:
    """``sum_k w[t, k] * expert[ids[t, k]](x[t])``, summed in FP64 by ascending expert.

    Parameters
    ----------
    x : Activation, (T, D)
    ids : (T, k) int64, ascending; weights : (T, k) FP32
    gate_up : Weight, (E, D, 2F): gate then up; down : Weight, (E, F, D)
    limit : float
        ``swiglu_limit``.

    Returns
    -------
    (T, D) FP32
    """
    total = torch.zeros(
        *x.values.shape[:-1], down.values.shape[-1], dtype=torch.float64, device=x.values.device
    )
    for expert in ids.unique().tolist():
        rows, slot = torch.where(ids == expert)
        y = _expert(x[rows], gate_up[expert], down[expert], limit=limit, at=at)
        total[rows] += y.double() * weights[rows, slot].double()[:, None]
    return at.out(total.float())


def dense_ffn(
    x: Activation, gate: Weight, up: Weight, down: Weight, *, limit: float, at: FfnRounding = EQUATIONS
) -> Tensor:
    """The shared expert: (T, D) -> (T, D) FP32."""
    hidden = swiglu(
        linear(x, gate, out=at.gate_up), linear(x, up, out=at.gate_up), limit=limit, out=at.hidden
    )
    return linear(quantise_activation(hidden, down.format, enabled=at.quantise), down, out=at.out)


def _expert(x: Activation, gate_up: Weight, down: Weight, *, limit: float, at: FfnRounding) -> Tensor:
    gate, up = linear(x, gate_up, out=at.gate_up).chunk(2, dim=-1)
    hidden = swiglu(gate, up, limit=limit, out=at.hidden)
    return linear(quantise_activation(hidden, down.format, enabled=at.quantise), down)
