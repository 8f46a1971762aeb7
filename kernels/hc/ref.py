"""mHC, all FP32. Source: DeepSeek-V4's report, section on manifold-constrained hyper-connections."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.matmul.ref import matmul
from kernels.rmsnorm.ref import rmsnorm
from kernels.rounding import Round, exact


class Mix(NamedTuple):
    """Weights of one site: pre (T, N), post (T, N), comb (T, N, N) with comb[from, to], FP32."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> Mix:
    """Mixing weights of a site from its streams.

    ``logits = rmsnorm(flat(X)) @ fn.T``; ``pre = sigmoid(l*s0+b) + hc_eps``,
    ``post = 2 sigmoid(l*s1+b)``, ``comb = sinkhorn(l*s2+b)``.

    Parameters
    ----------
    streams : (T, N, D) FP32
    fn : (N*(N+2), N*D), base : (N*(N+2),), scale : (3,), FP32
    norm_eps, hc_eps : float
        ``rms_norm_eps`` of the flat norm; ``hc_eps`` of pre and of every Sinkhorn divisor.
    iterations : int
        ``hc_sinkhorn_iters``.

    Returns
    -------
    Mix
    """
    count = streams.shape[1]
    flat = rmsnorm(streams.flatten(1), None, eps=norm_eps)
    logits = matmul(flat, fn.double().T)  # [T, N*(N+2)]
    pre, post, comb = logits.split((count, count, count * count), dim=-1)
    pre_base, post_base, comb_base = base.double().split((count, count, count * count))
    s0, s1, s2 = scale.double().unbind()
    return Mix(
        pre=(torch.sigmoid(pre * s0 + pre_base) + hc_eps).float(),
        post=(2 * torch.sigmoid(post * s1 + post_base)).float(),
        comb=sinkhorn(
            (comb * s2 + comb_base).unflatten(-1, (count, count)), hc_eps=hc_eps, iterations=iterations
        ).float(),
    )


def sinkhorn(logits: Tensor, *, hc_eps: float, iterations: int) -> Tensor:
    """Near-doubly-stochastic matrices: row softmax + eps, columns once, then rows and columns.

    Parameters
    ----------
    logits : (T, N, N) FP64
    iterations : int
        ``hc_sinkhorn_iters``: one column pass, then ``iterations - 1`` times (rows, columns).

    Returns
    -------
    (T, N, N) FP64
    """
    comb = torch.softmax(logits, dim=-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return comb


def collapse(streams: Tensor, pre: Tensor, *, out: Round = exact) -> Tensor:
    """Block input ``x = sum_j pre_j X_j``: (T, N, D), (T, N) -> (T, D) FP32."""
    return out((streams.double() * pre.double()[..., None]).sum(1).float())


def expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, *, out: Round = exact) -> Tensor:
    """Next streams ``X'_k = post_k y + sum_j comb[j, k] X_j`` (over comb's first index).

    Parameters
    ----------
    streams : (T, N, D), y : (T, D), post : (T, N), comb : (T, N, N)
    out : Round
        How the residual is stored.

    Returns
    -------
    (T, N, D) FP32
    """
    wide, weights = streams.double(), comb.double()[..., None]
    mixed = post.double()[..., None] * y.double()[:, None, :]  # [T, N(to), D]
    for source in range(streams.shape[1]):
        mixed.addcmul_(weights[:, source], wide[:, source, None])
    return out(mixed.float())


def head_collapse(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    out: Round = exact,
) -> Tensor:
    """Final sigmoid-weighted collapse before the last norm: (T, N, D) -> (T, D) FP32."""
    flat = rmsnorm(streams.flatten(1), None, eps=norm_eps)
    pre = torch.sigmoid(matmul(flat, fn.double().T) * scale.double() + base.double()) + hc_eps
    return collapse(streams, pre.float(), out=out)
