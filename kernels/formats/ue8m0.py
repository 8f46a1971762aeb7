"""UE8M0: a byte that is a power of two. Byte b is 2^(b - 127) for 0 to 254; 0xff is NaN; there is no zero.

Source: OCP Microscaling formats (MX), revision 1.0, section 5.4.1. Everything here is integer work on the
float32 bits: log2 in float32 is wrong next to powers of two, and byte 0 is a float32 subnormal.
"""

import math

import torch
from torch import Tensor

from kernels.formats._args import check_uint8, to_float32

NAN_CODE = 0xFF


def scale_for(amax: Tensor, limit: float) -> Tensor:
    """Smallest power of two ``s`` with ``limit * s >= amax``, exactly, and never under 2^-127.

    Parameters
    ----------
    amax : (...) floating
        Largest magnitudes; a sign is ignored.
    limit : float
        Largest value of the element format, such as 448 or 6.

    Returns
    -------
    (...) float32
        2^-127 for zero; NaN for NaN and infinity.

    Raises
    ------
    ValueError
        ``limit`` is under 2, so that a finite amax could need 2^128.
    """
    if not 2.0 <= limit < math.inf:
        raise ValueError(f"limit must be finite and at least 2, got {limit}")
    exponent, mantissa = _split(to_float32(amax))
    fraction, limit_exponent = math.frexp(limit)  # limit = fraction * 2^limit_exponent, 0.5 <= fraction < 1
    limit_mantissa = math.floor((2 * fraction - 1) * 2**23)
    power = exponent - (limit_exponent - 1) + (mantissa > limit_mantissa).to(torch.int32)
    byte = (power + 127).clamp(0, 254)
    return _from_bytes(byte.masked_fill(~amax.isfinite(), NAN_CODE))


def encode(scale: Tensor) -> Tensor:
    """Byte of each scale.

    Parameters
    ----------
    scale : (...) floating
        Powers of two from 2^-127 to 2^127, or NaN.

    Returns
    -------
    (...) uint8
        0xff for NaN.

    Raises
    ------
    ValueError
        A scale is no power of two of that range: rounding it here would part it from its codes.
    """
    wide = to_float32(scale)
    exponent, mantissa = _split(wide)
    byte = exponent + 127
    good = (mantissa == 0) & (byte >= 0) & (byte <= 254) & (wide > 0)
    missing = wide.isnan()
    if not bool((good | missing).all()):
        raise ValueError(
            f"scales of shape {tuple(scale.shape)} must be powers of two in [2^-127, 2^127] or NaN"
        )
    return byte.masked_fill(missing, NAN_CODE).to(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """Scales of UE8M0 bytes, exactly.

    Parameters
    ----------
    codes : (...) uint8

    Returns
    -------
    (...) float32
        2^-127, a subnormal, for byte 0; NaN for 0xff.
    """
    return _from_bytes(check_uint8(codes).to(torch.int32))


def _split(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Exponent e and 23-bit mantissa m, int32, with ``|x| = 2^e (1 + m / 2^23)``; zero gives e = -276."""
    bits = wide.view(torch.int32) & 0x7FFFFFFF
    # A subnormal is an integer times 2^-149; that integer, as a float32, is exact and normal.
    tiny = (bits & 0x7FFFFF).to(torch.float32).view(torch.int32)
    subnormal = bits < 0x800000
    exponent = torch.where(subnormal, (tiny >> 23) - 127 - 149, (bits >> 23) - 127)
    return exponent, torch.where(subnormal, tiny, bits) & 0x7FFFFF


def _from_bytes(byte: Tensor) -> Tensor:
    """float32 of int32 bytes: the byte is the exponent field, but for 0 (subnormal) and 255 (NaN)."""
    bits = (byte << 23).masked_fill(byte == 0, 0x00400000)
    return bits.masked_fill(byte == NAN_CODE, 0x7FC00000).view(torch.float32)
