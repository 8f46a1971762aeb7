"""RoPE and quantisation of the indexer's query, its scale moved into the head weights; composed of the ops' refs."""

import torch
from torch import Tensor

from kernels.formats import e2m1, e4m3, fp8_scaled, mxfp4, ue8m0
from kernels.hadamard.ref import hadamard
from kernels.rope.ref import rope
from kernels.rounding import Round, exact

FOLD = 64.0  # 6 * 64 = 384 is E4M3's: the largest power of two that a group's E2M1 codes can take


def query_fp8(
    q: Tensor, cos: Tensor, sin: Tensor, weights: Tensor, *, scale: float, store: Round = exact
) -> tuple[Tensor, Tensor]:
    """E4M3 codes of each head, its scale in the head's weight, as it passes the ReLU.

    Parameters
    ----------
    q : (T, H, D) floating
        The projection's result.
    cos, sin : (T, P / 2) FP32
    weights : (T, H) BF16 values
    scale : float
        ``D^-0.5 * H^-0.5``.
    store : rounding of the rotated query before it is quantised

    Returns
    -------
    codes : (T, H, D) uint8
    weights : (T, H) FP32
    """
    codes, q_scale = fp8_scaled.quantise(rope(q.float(), cos, sin, out=store))
    return codes, _scaled(weights, scale) * q_scale.squeeze(-1)


def query_fp4(
    q: Tensor, cos: Tensor, sin: Tensor, weights: Tensor, *, scale: float, store: Round = exact
) -> tuple[Tensor, Tensor, Tensor]:
    """MXFP4 of the Hadamard-rotated query, as the model was trained; arguments as :func:`query_fp8`.

    Returns
    -------
    codes : (T, H, D / 2) uint8, packed
    scales : (T, H, D / 32) uint8, UE8M0
    weights : (T, H) FP32
    """
    codes, group_scale = mxfp4.quantise(hadamard(rope(q.float(), cos, sin, out=store)))
    return e2m1.pack(codes), ue8m0.encode(group_scale), _scaled(weights, scale)


def folded(codes: Tensor, scales: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 as E4M3 for hardware without FP4 products: a group's scale moves into its codes, what is common into w.

    Exact while the scales of a head lie within 2^14 of each other (groups of zeros aside); values below that are
    rounded to 2^-10 of the largest scale's unit, which is under 2^-17 of the head's largest value.

    Parameters
    ----------
    codes : (T, H, D / 2) uint8
    scales : (T, H, D / 32) uint8
    weights : (T, H) FP32

    Returns
    -------
    codes : (T, H, D) uint8, E4M3
    weights : (T, H) FP32
    """
    values, scale = e2m1.decode(e2m1.unpack(codes)), ue8m0.decode(scales)
    largest = torch.where(scale.isnan().any(-1), torch.nan, scale.amax(-1))
    unit = largest / FOLD
    groups = values.unflatten(-1, (-1, 32)) * (scale / unit[..., None])[..., None]
    return e4m3.encode(groups.flatten(-2)), weights * unit


def _scaled(weights: Tensor, scale: float) -> Tensor:
    return (weights.double() * scale).float()
