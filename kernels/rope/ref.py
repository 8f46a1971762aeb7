"""RoPE with YaRN: tables and rotation. Source: DeepSeek-V4's config keys; Peng et al. 2023 (YaRN)."""

import math

import torch
from torch import Tensor

from kernels.rounding import Round, exact


def inverse_frequencies(
    dim: int,
    theta: float,
    *,
    factor: float = 1.0,
    original_max_position: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Tensor:
    """Rotation per position of each of the ``dim / 2`` pairs.

    Computed in FP32, as the published inference code does: at position 4000 one FP32 ulp of a
    frequency is worth 1e-4 rad, so these roundings are part of the model.

    Parameters
    ----------
    dim : int
        Rope dimensions (64).
    theta : float
        ``rope_theta`` on window layers, ``compress_rope_theta`` on compressed layers.
    factor : float
        YaRN's stretch; 1 is plain RoPE.
    original_max_position : int
        Context length before stretching; pairs that turn more than ``beta_fast`` times in it
        keep their frequency, fewer than ``beta_slow``: divided by ``factor``, ramp between.

    Returns
    -------
    (dim / 2,) FP32, rad per position
    """
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    plain = 1.0 / powers
    if factor == 1.0:
        return plain
    low, high = (
        dim * math.log(original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (beta_fast, beta_slow)
    )
    first, last = max(math.floor(low), 0), float(min(math.ceil(high), dim - 1))
    if first == last:
        last += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (factor * powers)) * (1 - keep) + plain * keep


def cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of ``position * frequency``; the angle is an FP32 product (see above).

    Parameters
    ----------
    positions : (T,) integer
    frequencies : (P / 2,) FP32

    Returns
    -------
    cos, sin : (T, P / 2) FP32
    """
    angle = (positions[:, None].float() * frequencies).double()
    return angle.cos().float(), angle.sin().float()


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False, out: Round = exact) -> Tensor:
    """Rotate the last ``P`` dims of each row as pairs (2i, 2i+1); the rest passes through.

    Parameters
    ----------
    x : (T, ..., D) FP32, D >= P
    cos, sin : (T, P / 2) FP32
    inverse : bool
        Rotate back: the attention output, at the query's position.
    out : Round
        Rounding of the whole result.

    Returns
    -------
    (T, ..., D) FP32
    """
    pairs = cos.shape[-1]
    shape = (cos.shape[0], *[1] * (x.dim() - 2), pairs)
    c = cos.double().view(shape)
    s = -sin.double().view(shape) if inverse else sin.double().view(shape)
    nope, rotary = x[..., : -2 * pairs], x[..., -2 * pairs :].double().unflatten(-1, (pairs, 2))
    even, odd = rotary[..., 0], rotary[..., 1]
    turned = torch.stack((even * c - odd * s, odd * c + even * s), dim=-1).flatten(-2)
    return out(torch.cat((nope.float(), turned.float()), dim=-1))
