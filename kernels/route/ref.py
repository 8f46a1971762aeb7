"""sqrt(softplus) routing, FP32. The choice and the weights are apart, so that choices can be replayed."""

import torch
from torch import Tensor

from kernels.matmul.ref import matmul


def router_scores(x: Tensor, weight: Tensor) -> Tensor:
    """``sqrt(softplus(x @ W.T))``: (T, D), (E, D) -> (T, E) FP32."""
    return torch.nn.functional.softplus(matmul(x, weight.double().T), threshold=100.0).sqrt().float()


def choose_experts(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """The k experts with the largest ``score + bias``, ties to the smaller index.

    Parameters
    ----------
    scores : (T, E) FP32
    bias : (E,) FP32
        Steers the choice alone, never the weights.

    Returns
    -------
    (T, k) int64, ascending
    """
    ranked = torch.argsort((scores + bias), dim=-1, descending=True, stable=True)
    return ranked[:, :k].sort(dim=-1).values


def hash_experts(tokens: Tensor, table: Tensor) -> Tensor:
    """Experts of a hash layer: (T,) token ids, (V, k) table -> (T, k) int64, ascending."""
    return table[tokens].long().sort(dim=-1).values


def expert_weights(scores: Tensor, ids: Tensor, *, scaling: float) -> Tensor:
    """Chosen scores over (their sum + 1e-20), times ``routed_scaling_factor``: (T, E), (T, k) -> (T, k) FP32."""
    chosen = scores.double().gather(1, ids)
    return (chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling).float()
