"""Sparse MQA with a sink: see :func:`sparse_attn`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.matmul.ref import matmul
from kernels.rounding import Round, exact

ROWS = 64  # query rows at once: bounds the gathered [ROWS, S, K] buffer


@dataclass(frozen=True, kw_only=True)
class AttnRounding:
    """Rounding points of one attention call; the defaults are the equations.

    Attributes
    ----------
    q_nope, q_rope, k_nope, k_rope : operands of QK by part.
    p_nope, p_rope : probabilities (relative to the row's maximum) as PV reads them, by V's part.
    out : the store of the result.
    narrow : bool
        All operands of both products are narrow (see :func:`kernels.matmul.ref.matmul`).
    """

    q_nope: Round = exact
    q_rope: Round = exact
    k_nope: Round = exact
    k_rope: Round = exact
    p_nope: Round = exact
    p_rope: Round = exact
    out: Round = exact
    narrow: bool = False


EQUATIONS = AttnRounding()


def sparse_attn(
    q: Tensor,
    pool: Tensor,
    idx: Tensor,
    sinks: Tensor,
    *,
    n_rope: int,
    scale: float,
    at: AttnRounding = EQUATIONS,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each row over the pool rows that its index list names.

    ``out = sum_s e^(l_s - m) v_s / (sum_s e^(l_s - m) + e^(sink - m))`` with
    ``l_s = scale * q . k_s`` and K = V; ``lse = log(sum_s e^(l_s))`` without the sink.

    Parameters
    ----------
    q : (T, H, K) FP32
    pool : (N, K) FP32
        Rows as read from storage: [nope | rope].
    idx : (T, S) int64
        Rows of the pool, -1: no key. The order of slots is the order of the sum.
    sinks : (H,) FP32
    n_rope : int
        Rope dims, the last of K.
    scale : float
        ``head_dim ** -0.5``.
    at : AttnRounding

    Returns
    -------
    out : (T, H, K) FP32
        Zero for a row with no key.
    lse : (T, H) FP32
        -inf for a row with no key.
    """
    nope = slice(0, q.shape[-1] - n_rope)
    rope = slice(q.shape[-1] - n_rope, q.shape[-1])
    queries = torch.cat((at.q_nope(q[..., nope]), at.q_rope(q[..., rope])), dim=-1).double()
    values = pool.double()
    keys = torch.cat((at.k_nope(pool[:, nope]), at.k_rope(pool[:, rope])), dim=-1).double()
    same = torch.equal(keys, values)
    outs, lses = [], []
    for rows, chosen in zip(queries.split(ROWS), idx.split(ROWS), strict=True):
        v = values[chosen.clamp(min=0)]  # [t, S, K]
        k = v if same else keys[chosen.clamp(min=0)]
        logits = (matmul(rows, k.transpose(1, 2), narrow=at.narrow) * scale).float().double()  # [t, H, S]
        logits = logits.masked_fill((chosen < 0)[:, None, :], -torch.inf)
        peak = logits.amax(-1, keepdim=True)
        peak = peak.masked_fill(peak == -torch.inf, 0.0)
        p = (logits - peak).exp().float()
        total = p.double().sum(-1, keepdim=True)
        denominator = total + (sinks.double()[None, :, None] - peak).exp()
        out_nope = matmul(at.p_nope(p), v[..., nope], narrow=at.narrow)
        out_rope = matmul(at.p_rope(p), v[..., rope], narrow=at.narrow)
        outs.append((torch.cat((out_nope, out_rope), dim=-1) / denominator).float())
        lses.append((total.log() + peak).squeeze(-1).float())
    if not outs:
        return torch.empty_like(q), q.new_empty(q.shape[:2])
    return at.out(torch.cat(outs)), torch.cat(lses)
