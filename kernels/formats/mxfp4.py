"""MXFP4: E2M1 values, one power-of-two scale per 32.

Five choices:

1. Floor: amax is raised to 6 * 2^-126, so a block of zeros has the scale 2^-126.
2. Scale: the smallest power of two s with 6 s >= amax, by exponent bits. (The MX specification's own rule
   rounds down and saturates; this one never saturates.)
3. Division: by s, exact.
4. Values: to nearest, ties to the even mantissa.
5. Overflow: none, since |x| / s <= 6.

A NaN or an infinity in a group makes its scale, hence the whole group, NaN (UE8M0 byte 0xff), and codes 0.
Magnitudes from 1.75 * 2^127 on come back infinite: E2M1 rounds them up to 2^128.
"""

from torch import Tensor

from kernels.formats import e2m1, ue8m0
from kernels.formats._args import abs_max, scale_groups, split_groups, to_float32

AMAX_FLOOR = 6 * 2.0**-126
GROUP = 32


def quantise(x: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Store each run of ``group`` values as E2M1 with one power-of-two scale.

    Parameters
    ----------
    x : (..., D) floating
        float64 is rounded to float32 first.
    group : int

    Returns
    -------
    codes : (..., D) uint8
        0 to 15, unpacked; :func:`kernels.formats.e2m1.pack` puts two in a byte.
    scale : (..., D / group) float32
        ``decode(codes) * scale`` is within ``max(|x| / 4, scale / 4)`` of ``x``.

    Raises
    ------
    ValueError
        ``group`` does not divide D.
    """
    groups = split_groups(to_float32(x), group)
    scale = ue8m0.scale_for(abs_max(groups).clamp_min(AMAX_FLOOR), e2m1.MAX)
    return e2m1.encode(groups / scale[..., None]).flatten(-2), scale


def dequantise(codes: Tensor, scale: Tensor, group: int = GROUP) -> Tensor:
    """Values of unpacked codes and scales, exact in float32 while in its range.

    Parameters
    ----------
    codes : (..., D) uint8
    scale : (..., D / group) floating
    group : int

    Returns
    -------
    (..., D) float32

    Raises
    ------
    ValueError
        ``group`` does not divide D, or the scales are not one per group.
    """
    return scale_groups(e2m1.decode(codes), scale, group)


def round(x: Tensor, group: int = GROUP) -> Tensor:
    """Round to what the format can hold: :func:`quantise`, then :func:`dequantise`. Idempotent.

    Parameters
    ----------
    x : (..., D) floating
    group : int

    Returns
    -------
    (..., D) float32

    Raises
    ------
    ValueError
        ``group`` does not divide D.
    """
    codes, scale = quantise(x, group)
    return dequantise(codes, scale, group)
