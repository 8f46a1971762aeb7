"""BF16: the upper half of a float32. Rounded to nearest, ties to even, once, from any floating dtype.

Torch rounds float64 twice on its way to bfloat16 (through float32), so 1 + 2^-8 + 2^-40 would come out as 1.
"""

import torch
from torch import Tensor

from kernels.formats._args import may_hold_nan, to_float32


def round(x: Tensor) -> Tensor:
    """Round each value to the nearest BF16 value, ties to even.

    -0, infinities and NaN are kept; magnitudes from 2^128 - 2^119 (the tie above the largest BF16) on become
    infinite; subnormals are rounded, not flushed. float64 is rounded once, not through float32.

    Parameters
    ----------
    x : (...) floating

    Returns
    -------
    (...) float32
    """
    return _cast(x).to(torch.float32)


def bits(x: Tensor) -> Tensor:
    """Bits of each value rounded as by :func:`round`.

    Parameters
    ----------
    x : (...) floating

    Returns
    -------
    (...) uint16
        Every NaN is 0x7fc0.
    """
    return _cast(x).view(torch.uint16)


def from_bits(codes: Tensor) -> Tensor:
    """Values of BF16 bits, exactly.

    Parameters
    ----------
    codes : (...) uint16

    Returns
    -------
    (...) float32

    Raises
    ------
    TypeError
        ``codes`` is not uint16.
    """
    if codes.dtype != torch.uint16:
        raise TypeError(f"expected uint16 bits, got {codes.dtype} of shape {tuple(codes.shape)}")
    return codes.contiguous().view(torch.bfloat16).to(torch.float32)


def _cast(x: Tensor) -> Tensor:
    """Cast to bfloat16 with one rounding and one NaN."""
    wide = to_float32(x)
    if x.dtype == torch.float64:
        wide = _round_to_odd(x.contiguous(), wide)
    narrow = wide.to(torch.bfloat16)
    return narrow.masked_fill(wide.isnan(), float("nan")) if may_hold_nan(wide) else narrow


def _round_to_odd(exact: Tensor, nearest: Tensor) -> Tensor:
    """float32 of float64, inexact results truncated with the last bit set.

    Rounding that to BF16 equals rounding the float64 itself, since float32 has over two more bits
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to
    odd", IEEE Transactions on Computers 57(4), 2008).
    """
    back = nearest.to(torch.float64)
    raw = nearest.view(torch.int32)
    raw = raw - (back.abs() > exact.abs()).to(torch.int32)  # one step toward zero; infinity to the largest
    return (raw | (back != exact).to(torch.int32)).view(torch.float32)
