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
    if ids.numel() == 0:
        return at.out(total.float())
    experts, counts = ids.unique(return_counts=True)
    pairs = ids.flatten().argsort(stable=True)  # of token and slot, by expert
    rows, weight = pairs // ids.shape[-1], weights.flatten()[pairs].double()[:, None]
    of = list(zip(experts.tolist(), rows.split(counts.tolist()), strict=True))
    # what an expert does to a row alone, the experts' rows do at once
    gate, up = torch.cat([linear(x[own], gate_up[e], out=at.gate_up) for e, own in of]).chunk(2, dim=-1)
    hidden = swiglu(gate, up, limit=limit, out=at.hidden)
    read = quantise_activation(hidden, down.format, enabled=at.quantise)
    ends = counts.cumsum(0).tolist()
    for (expert, own), end in zip(of, ends, strict=True):
        part = slice(end - len(own), end)
        total[own] += linear(read[part], down[expert]).double() * weight[part]
    return at.out(total.float())


def dense_ffn(
    x: Activation, gate: Weight, up: Weight, down: Weight, *, limit: float, at: FfnRounding = EQUATIONS
) -> Tensor:
    """The shared expert: (T, D) -> (T, D) FP32."""
    hidden = swiglu(
        linear(x, gate, out=at.gate_up), linear(x, up, out=at.gate_up), limit=limit, out=at.hidden
    )
    return linear(quantise_activation(hidden, down.format, enabled=at.quantise), down, out=at.out)
