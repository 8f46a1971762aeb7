"""E4M3 (the "fn" variant): 1 sign, 4 exponent, 3 mantissa bits, no infinity, largest value 448.

Bytes 0x7f and 0xff are NaN; the smallest subnormal is 2^-9. Source: OCP 8-bit floating point, revision 1.0.
"""

import torch
from torch import Tensor

from kernels.formats._args import check_uint8, may_hold_nan, to_float32

MAX = 448.0
NAN_CODE = 0x7F


def encode(x: Tensor) -> Tensor:
    """Round to the nearest E4M3 value, ties to even.

    Clamped to +-448 before the cast, infinities too: unclamped, casts disagree on 500 (NaN or 448).
    Every NaN becomes 0x7f; -0 is kept, and negative values below 2^-10 become it.

    Parameters
    ----------
    x : (...) floating
        float64 is rounded to float32 first.

    Returns
    -------
    (...) uint8
    """
    wide = to_float32(x)
    codes = wide.clamp(-MAX, MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(wide.isnan(), NAN_CODE) if may_hold_nan(wide) else codes


def decode(codes: Tensor) -> Tensor:
    """Values of E4M3 bytes, exactly.

    Parameters
    ----------
    codes : (...) uint8

    Returns
    -------
    (...) float32
        NaN for 0x7f and 0xff.
    """
    return check_uint8(codes).view(torch.float8_e4m3fn).to(torch.float32)  # cast: fixed(B2)
