"""NVFP4: E2M1 values, an E4M3 scale per 16, an FP32 factor, gsa, per row (activations) or tensor (weights).

Five choices:

1. Floor: none. gsa = amax / 2688 (6 * 448); where gsa is 0, scales and codes are 0.
2. Scale: E4M3 nearest even of (amax_16 / 6) / gsa, two float32 divisions, clamped to 448. Where it rounds
   to 0 (amax_16 up to about amax / 458752), the codes are 0.
3. Division: x / (scale * gsa), one float32 product and one float32 division.
4. Values: to nearest, ties to the even mantissa.
5. Overflow: codes saturate at 6. A scale rounded down leaves up to 6.4 (9 where the scale is an E4M3
   subnormal), and more if a gsa that is passed in is too small for the tensor.

A NaN or an infinity makes its block's scale NaN, and a gsa taken from that row NaN, so the whole row is NaN.
Under amax 3.2e-35 a row's gsa is subnormal and imprecise; up to 1.8e-42 it is 0 and the row becomes 0.
"""

import torch
from torch import Tensor

from kernels.formats import e2m1, e4m3
from kernels.formats._args import abs_max, divide, scale_groups, split_groups, to_float32

GROUP = 16
AMAX_PER_GSA = e2m1.MAX * e4m3.MAX


def row_gsa(x: Tensor) -> Tensor:
    """Factor of each row: its largest magnitude / 2688, rounded once.

    Parameters
    ----------
    x : (..., D) floating

    Returns
    -------
    (..., 1) float32
        0 for a row of zeros; NaN where the row holds a NaN or an infinity.
    """
    return divide(abs_max(to_float32(x)), AMAX_PER_GSA)[..., None]


def quantise(x: Tensor, gsa: Tensor | float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Store each run of 16 values as E2M1 with an E4M3 scale, under a factor per row.

    Parameters
    ----------
    x : (..., D) floating
        float64 is rounded to float32 first.
    gsa : number or tensor that expands to (..., 1), optional
        Not negative. None takes :func:`row_gsa`. Shape [] or [E, 1, 1] for weights.

    Returns
    -------
    codes : (..., D) uint8
        0 to 15, unpacked.
    scale_codes : (..., D / 16) uint8
        E4M3.
    gsa : (..., 1) float32

    Raises
    ------
    ValueError
        16 does not divide D, or ``gsa`` does not expand to (..., 1).
    """
    wide = to_float32(x)
    groups = split_groups(wide, GROUP)
    gsa = _expand_gsa(row_gsa(wide) if gsa is None else gsa, wide)
    amax = abs_max(groups)  # [..., D/16]
    live = gsa != 0
    ideal = torch.where(live, divide(amax, e2m1.MAX) / gsa, amax * 0)  # amax * 0 keeps NaN
    scale_codes = e4m3.encode(ideal)
    step = (e4m3.decode(scale_codes) * gsa)[..., None]
    return e2m1.encode(torch.where(step != 0, groups / step, 0.0)).flatten(-2), scale_codes, gsa


def scaled_values(codes: Tensor, scale_codes: Tensor) -> Tensor:
    """E2M1 value x E4M3 scale, without gsa: exact in float32, and in BF16 (six significant bits).

    Parameters
    ----------
    codes : (..., D) uint8
    scale_codes : (..., D / 16) uint8

    Returns
    -------
    (..., D) float32
        NaN where the scale is.

    Raises
    ------
    ValueError
        16 does not divide D, or the scales are not one per 16.
    """
    return scale_groups(e2m1.decode(codes), e4m3.decode(scale_codes), GROUP)


def dequantise(codes: Tensor, scale_codes: Tensor, gsa: Tensor | float) -> Tensor:
    """Value x scale x gsa: the first product is exact, the second rounded to float32.

    Parameters
    ----------
    codes : (..., D) uint8
    scale_codes : (..., D / 16) uint8
    gsa : number or tensor that expands to (..., 1)

    Returns
    -------
    (..., D) float32

    Raises
    ------
    ValueError
        16 does not divide D, or a shape does not match.
    """
    values = scaled_values(codes, scale_codes)
    return values * _expand_gsa(gsa, values)


def round(x: Tensor, gsa: Tensor | float | None = None) -> Tensor:
    """Round to what the format can hold: :func:`quantise`, then :func:`dequantise`. Not idempotent.

    Parameters
    ----------
    x : (..., D) floating
    gsa : number or tensor that expands to (..., 1), optional

    Returns
    -------
    (..., D) float32

    Raises
    ------
    ValueError
        16 does not divide D, or ``gsa`` does not expand to (..., 1).
    """
    return dequantise(*quantise(x, gsa))


def _expand_gsa(gsa: Tensor | float, x: Tensor) -> Tensor:
    """``gsa`` as float32 of shape (..., 1) for ``x`` of shape (..., D)."""
    factor = torch.as_tensor(gsa, dtype=torch.float32, device=x.device)
    want = (*x.shape[:-1], 1)
    pairs = zip(factor.shape[::-1], want[::-1], strict=False)
    if factor.ndim > x.ndim or any(have not in (1, size) for have, size in pairs):
        raise ValueError(f"gsa of shape {tuple(factor.shape)} does not expand to {want}")
    return factor.expand(want)
