"""The equations of DSV4 in FP64, written once more and independently of ``kernels/<op>``."""

import math

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of (..., D) FP64."""
    y = x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return y if weight is None else y * weight.double()


def angles(
    positions: Tensor, dim: int, theta: float, yarn: tuple[float, float, float, float] | None
) -> Tensor:
    """Rotation angles (T, dim / 2) FP64; frequencies and products are FP32 as published.

    ``yarn`` is (factor, original context, beta_fast, beta_slow): pair i turns
    ``context * f_i / 2 pi`` times in the original context; more than beta_fast turns keep f_i,
    fewer than beta_slow get f_i / factor, and a linear ramp over the pair index joins them.
    """
    pair = torch.arange(dim // 2, dtype=torch.float32)
    base = torch.pow(torch.tensor(theta, dtype=torch.float32), 2 * pair / dim)
    frequency = torch.reciprocal(base)
    if yarn is not None:
        factor, context, fast, slow = yarn

        def index(turns: float) -> float:
            return dim / 2 * math.log(context / (2 * math.pi * turns)) / math.log(theta)

        start = max(math.floor(index(fast)), 0)
        stop = min(math.ceil(index(slow)), dim - 1)
        stretched = ((pair - start) / ((stop - start) or 0.001)).clamp(0.0, 1.0)
        kept = 1 - stretched
        frequency = torch.reciprocal(factor * base) * (1 - kept) + frequency * kept
    return (positions.to(torch.float32)[:, None] * frequency).double()


def rotate(x: Tensor, angle: Tensor, sign: int = 1) -> Tensor:
    """Multiply the last dims of (T, ..., D), read as complex numbers, by e^(i sign angle); FP32 cos and sin."""
    count = angle.shape[-1]
    turn = torch.complex(torch.cos(angle).float().double(), sign * torch.sin(angle).float().double())
    turn = turn.reshape(turn.shape[0], *[1] * (x.dim() - 2), count)
    tail = torch.view_as_complex(x[..., -2 * count :].unflatten(-1, (count, 2)).contiguous())
    return torch.cat((x[..., : -2 * count], torch.view_as_real(tail * turn).flatten(-2)), dim=-1)


def walsh(x: Tensor) -> Tensor:
    """Hadamard transform of (..., D) FP64 by its matrix: H[i, j] = (-1)^popcount(i & j) / sqrt(D)."""
    size = x.shape[-1]
    index = torch.arange(size)
    bits = (index[:, None] & index[None, :]).clone()
    parity = torch.zeros_like(bits)
    while bits.any():
        parity ^= bits & 1
        bits >>= 1
    # Signs first, the factor last: sums of stored codes are then exact, and what cancels is zero.
    return (x @ (1 - 2 * parity).double()) / math.sqrt(size)


def doubly_stochastic(logits: Tensor, eps: float, iterations: int) -> Tensor:
    """Sinkhorn of (T, N, N) FP64: softmax rows + eps, columns, then (rows, columns) again and again."""
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    comb = weights / weights.sum(-1, keepdim=True) + eps
    for axis in [1, *[2, 1] * (iterations - 1)]:
        comb = comb / (comb.sum(axis, keepdim=True) + eps)
    return comb


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function, FP64."""
    return 1 / (1 + torch.exp(-x))


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """``silu(min(gate, limit)) * clip(up, limit)``, FP64."""
    gate = torch.minimum(gate, torch.tensor(limit, dtype=torch.float64))
    return gate * sigmoid(gate) * torch.clip(up, -limit, limit)


def gated_mean(values: Tensor, gates: Tensor) -> Tensor:
    """Per channel softmax over slots: (slots, D), (slots, D) -> (D,), FP64."""
    weights = torch.exp(gates - gates.amax(0))
    return (weights * values).sum(0) / weights.sum(0)


def largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest of (C,), ties to the smaller index, ascending, -1 padded."""
    values = scores.tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    return torch.tensor(sorted(order) + [-1] * (count - len(order)), dtype=torch.int64)
