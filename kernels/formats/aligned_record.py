"""KV record with one power-of-two scale a token: a kernel multiplies once per token, not once per 64 values.

Made from the values of :mod:`kernels.formats.kv_record`. With s_g the scale of 64 nope values and s the
largest of a token's, a nope byte is E4M3 of (code value * s_g / s), to nearest even, and rope is BF16 of
(rope in BF16) / s. The shift is exact unless the shifted value is under 2^-6; then it is off by 2^-10 s at
most, which is under 4.4e-6 of the token's largest nope. Rope is exact while rope / s is a normal BF16.

A NaN or an infinity among a token's nope makes its scale, hence the token, NaN; in rope it is kept.
"""

import torch
from torch import Tensor

from kernels.formats import bf16, e4m3, fp8_block
from kernels.formats._args import split_groups, to_float32
from kernels.formats.kv_record import GROUP, ROPE, rope_bytes, rope_values


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes and scale of each token.

    Parameters
    ----------
    x : (..., nope + 64) floating
        Rope last; nope is a positive multiple of 64.

    Returns
    -------
    data : (..., nope + 128) uint8
    scale : (..., 1) float32
        A power of two.

    Raises
    ------
    ValueError
        The last axis is not a multiple of 64 of at least 128.
    """
    if x.ndim == 0 or x.shape[-1] < GROUP + ROPE or x.shape[-1] % GROUP:
        raise ValueError(f"expected nope + {ROPE} values, nope by {GROUP}, got shape {tuple(x.shape)}")
    codes, group_scale = fp8_block.quantise(x[..., :-ROPE], GROUP)
    scale = group_scale.amax(-1, keepdim=True)
    shifted = split_groups(e4m3.decode(codes), GROUP) * (group_scale / scale)[..., None]
    rope = rope_bytes(bf16.round(x[..., -ROPE:]) / scale)
    return torch.cat([e4m3.encode(shifted).flatten(-2), rope], -1), scale


def decode(data: Tensor, scale: Tensor) -> Tensor:
    """Values of each token, exact in float32 while in its range.

    Parameters
    ----------
    data : (..., nope + 128) uint8
    scale : (..., 1) floating

    Returns
    -------
    (..., nope + 64) float32

    Raises
    ------
    ValueError
        ``scale`` is not one per token, or the last axis is too short.
    """
    if data.ndim == 0 or data.shape[-1] < GROUP + 2 * ROPE or data.shape[-1] % GROUP:
        raise ValueError(
            f"expected nope (multiple of {GROUP}) + {2 * ROPE} bytes, got shape {tuple(data.shape)}"
        )
    if tuple(scale.shape) != (*data.shape[:-1], 1):
        raise ValueError(f"scale of shape {tuple(scale.shape)} is not one per token of {tuple(data.shape)}")
    nope, rope = data[..., : -2 * ROPE], data[..., -2 * ROPE :]
    return torch.cat([e4m3.decode(nope), rope_values(rope)], -1) * to_float32(scale)


def round(x: Tensor) -> Tensor:
    """Round to what the record can hold: :func:`encode`, then :func:`decode`.

    Parameters
    ----------
    x : (..., nope + 64) floating

    Returns
    -------
    (..., nope + 64) float32

    Raises
    ------
    ValueError
        The last axis is not a multiple of 64 of at least 128.
    """
    return decode(*encode(x))
