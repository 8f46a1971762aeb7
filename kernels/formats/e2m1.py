"""E2M1: 1 sign, 2 exponent, 1 mantissa bit. Magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; no infinity, no NaN.

Source: OCP Microscaling formats (MX), revision 1.0, section 5.3.3.
"""

from functools import cache

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
    bits = to_float32(x).view(torch.int32)
    # the upper half, its lowest bit set for anything below it: so many bits tell on which side of a tie a value lies
    upper = (bits & 0xFFFF).add_(0xFFFF).bitwise_or_(bits).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    return _codes(upper.device).index_select(0, upper.flatten()).view(upper.shape)


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
    code = _check_codes(codes)
    return _values(code.device).index_select(0, code.flatten().int()).view(code.shape)


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


@cache
def _codes(device: torch.device) -> Tensor:
    """Code of each upper half of a float32: (65536,) uint8."""
    wide = (torch.arange(1 << 16, dtype=torch.int32, device=device) << 16).view(torch.float32)
    size = wide.abs()
    code = (size > 0.25).to(torch.uint8)
    code += size >= 0.75
    code += size > 1.25
    code += size >= 1.75
    code += size > 2.5
    code += size >= 3.5
    code += size > 5.0
    negative = wide.signbit() & ~wide.isnan()
    return (code | (negative.to(torch.uint8) << 3)).masked_fill_(wide.isnan(), 0)


@cache
def _values(device: torch.device) -> Tensor:
    """Value of each code: (16,) float32."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, MAX], device=device)
    return torch.cat((sizes, -sizes))
