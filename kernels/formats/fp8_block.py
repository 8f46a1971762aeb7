"""FP8 block format: E4M3 values, one power-of-two scale per group of the last axis or per square of a weight.

Five choices fix the bits; published quantisers differ in each:

1. Floor: amax is raised to 1e-4, so a block of zeros has the scale 2^-22.
2. Scale: the smallest power of two s with 448 s >= amax, by exponent bits.
3. Division: by s, exact.
4. Values: to nearest, ties to even.
5. Overflow: none, since |x| / s <= 448; the clamp of :func:`kernels.formats.e4m3.encode` stands anyway.

A NaN or an infinity in a group makes its scale, hence the whole group, NaN. Magnitudes from 1.9375 * 2^127
on come back infinite: E4M3 rounds them up to 2^128.

The scale is that of DeepGEMM's ``ceil_to_ue8m0(amax.clamp(1e-4) / 448)`` (deep_gemm/utils/math.py) and,
above amax 448 * 2^-14 = 0.0273, of FlashMLA's tests/quant.py, whose floor of 2^-13 is on the scale (both read
2026-11).
"""

import torch
from torch import Tensor

from kernels.formats import e4m3, ue8m0
from kernels.formats._args import abs_max, scale_groups, split_groups, to_float32

AMAX_FLOOR = 1e-4
GROUP = 128  # of a linear layer: values of a row, and rows and columns of a weight, under one scale


def quantise(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Store each run of ``group`` values as E4M3 with one power-of-two scale.

    Parameters
    ----------
    x : (..., D) floating
        float64 is rounded to float32 first.
    group : int
        Values per scale along D: 64 for KV, :data:`GROUP` for activations.

    Returns
    -------
    codes : (..., D) uint8
    scale : (..., D / group) float32
        ``decode(codes) * scale`` is within ``max(|x| / 16, scale / 1024)`` of ``x``.

    Raises
    ------
    ValueError
        ``group`` does not divide D.
    """
    groups = split_groups(to_float32(x), group)
    scale = ue8m0.scale_for(abs_max(groups).clamp_min(AMAX_FLOOR), e4m3.MAX)
    return e4m3.encode(groups / scale[..., None]).flatten(-2), scale


def dequantise(codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """Values of codes and scales, exact in float32 while in its range.

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
    return scale_groups(e4m3.decode(codes), scale, group)


def round(x: Tensor, group: int) -> Tensor:
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


def quantise_weight(w: Tensor, block: int = GROUP) -> tuple[Tensor, Tensor]:
    """Store each ``block`` x ``block`` square of a weight as E4M3 with one power-of-two scale.

    Squares at the lower and right edges may be smaller.

    Parameters
    ----------
    w : (..., O, I) floating
    block : int

    Returns
    -------
    codes : (..., O, I) uint8
    scale : (..., ceil(O / block), ceil(I / block)) float32

    Raises
    ------
    ValueError
        ``w`` has fewer than two axes, or ``block`` is not positive.
    """
    if w.ndim < 2 or block < 1:
        raise ValueError(f"block {block} needs a weight of two axes or more, got shape {tuple(w.shape)}")
    wide = to_float32(w)
    rows, cols = wide.shape[-2:]
    padded = torch.nn.functional.pad(wide, (0, -cols % block, 0, -rows % block))
    squares = padded.unflatten(-1, (padded.shape[-1] // block, block))
    squares = squares.unflatten(-3, (padded.shape[-2] // block, block))  # [..., O/b, b, I/b, b]
    amax = abs_max(squares.transpose(-3, -2).flatten(-2))  # [..., O/b, I/b]
    scale = ue8m0.scale_for(amax.clamp_min(AMAX_FLOOR), e4m3.MAX)
    return e4m3.encode(wide / _spread(scale, rows, cols, block)), scale


def dequantise_weight(codes: Tensor, scale: Tensor, block: int = GROUP) -> Tensor:
    """Values of a weight's codes and scales, exact in float32 while in its range.

    Parameters
    ----------
    codes : (..., O, I) uint8
    scale : (..., ceil(O / block), ceil(I / block)) floating
    block : int

    Returns
    -------
    (..., O, I) float32

    Raises
    ------
    ValueError
        The scales are not one per square.
    """
    rows, cols = codes.shape[-2:]
    want = (*codes.shape[:-2], -(-rows // block), -(-cols // block))
    if tuple(scale.shape) != want:
        raise ValueError(
            f"scales of shape {tuple(scale.shape)} do not match a weight of shape {tuple(codes.shape)}"
            f" with block {block}: expected {want}"
        )
    return e4m3.decode(codes) * _spread(to_float32(scale), rows, cols, block)


def _spread(scale: Tensor, rows: int, cols: int, block: int) -> Tensor:
    """Repeat each scale over its square and cut the edges off: (..., rows, cols)."""
    tall = scale.repeat_interleave(block, -2)[..., :rows, :]
    return tall.repeat_interleave(block, -1)[..., :cols]
