"""E2M1: 1 sign, 2 exponent, 1 mantissa bit. Magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; no infinity, no NaN.

Source: OCP Microscaling formats (MX), revision 1.0, section 5.3.3.
"""

import torch
from torch import Tensor

from kernels.formats._args import check_uint8, to_float32

MAX = 6.0


def encode(x: Tensor) -> Tensor:
    """Round to the nearest E2M1 value, ties to the even mantissa, saturating at +-6.

    Ties 0.25, 1.25, 2.5 and 5 go down; 0.75, 1.75 and 3.5 go up. -0 and negative values down to -0.25
    become code 8. E2M1 has no NaN: NaN becomes code 0, so the caller must keep it in the scale, as the
    quantisers here do.

    Parameters
    ----------
    x : (...) floating
        float64 is rounded to float32 first.

    Returns
    -------
    (...) uint8
        Codes 0 to 15, one a byte; see :func:`pack`.
    """
    wide = to_float32(x)
    size = wide.abs()
    code = (size > 0.25).to(torch.uint8)
    code += size >= 0.75
    code += size > 1.25
    code += size >= 1.75
    code += size > 2.5
    code += size >= 3.5
    code += size > 5.0
    negative = wide.signbit() & ~wide.isnan()
    return code | (negative.to(torch.uint8) << 3)


def decode(codes: Tensor) -> Tensor:
    """Values of unpacked E2M1 codes, exactly.

    Parameters
    ----------
    codes : (...) uint8
        0 to 15.

    Returns
    -------
    (...) float32

    Raises
    ------
    ValueError
        A code is over 15: packed bytes must be unpacked first.
    """
    code = _check_codes(codes).to(torch.int32)
    exponent, mantissa = (code >> 1) & 3, code & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    half = mantissa * 0x3F000000  # float32 bits of 0.5
    sign = -(code >> 3) & -0x80000000
    return (torch.where(exponent > 0, normal, half) | sign).view(torch.float32)


def pack(codes: Tensor, checked: bool = True) -> Tensor:
    """Put two codes in a byte, the one of even index in the low nibble.

    Parameters
    ----------
    codes : (..., n) uint8
        0 to 15.
    checked : bool
        False: ``codes`` are known to be codes, from :func:`encode`. The check waits for the device, which a
        captured step may not do.

    Returns
    -------
    (..., n / 2) uint8

    Raises
    ------
    ValueError
        n is odd, or a code is over 15.
    """
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(f"packing needs an even last axis, got shape {tuple(codes.shape)}")
    pairs = _check_codes(codes) if checked else check_uint8(codes)
    return pairs[..., 0::2] | (pairs[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Undo :func:`pack`.

    Parameters
    ----------
    packed : (..., m) uint8

    Returns
    -------
    (..., 2 m) uint8
        0 to 15.
    """
    pairs = check_uint8(packed)
    return torch.stack([pairs & 0xF, pairs >> 4], -1).flatten(-2)


def _check_codes(codes: Tensor) -> Tensor:
    """Return ``codes`` contiguous, refusing any over 15."""
    codes = check_uint8(codes)
    largest = int(codes.max()) if codes.numel() else 0
    if largest > 15:
        raise ValueError(f"E2M1 codes go up to 15, got {largest} in shape {tuple(codes.shape)}")
    return codes
