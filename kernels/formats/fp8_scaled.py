"""E4M3 with one FP32 scale per vector: the index keys, and the index queries.

Five choices, DeepGEMM's for index keys (``kv_cache_cast_to_fp8`` in tests/test_attention.py, read 2026-11):

1. Floor: amax is raised to 1e-4.
2. Scale: amax / 448, a float32 division, not rounded to a power of two.
3. Multiplication: x * (1 / scale), both rounded to float32.
4. Values: to nearest, ties to even.
5. Overflow: clamped to +-448, which x * (1 / scale) can pass by an ulp.

DeepGEMM's own line is ``amax / 448.0``, which torch on CUDA computes as amax * (1 / 448): its scales may be
an ulp off these.

A NaN or an infinity makes the scale, hence the vector, NaN.
"""

from torch import Tensor

from kernels.formats import e4m3
from kernels.formats._args import abs_max, divide, to_float32

AMAX_FLOOR = 1e-4


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Store each vector as E4M3 with one float32 scale.

    Parameters
    ----------
    x : (..., K) floating
        float64 is rounded to float32 first.

    Returns
    -------
    codes : (..., K) uint8
    scale : (..., 1) float32
    """
    wide = to_float32(x)
    scale = divide(abs_max(wide).clamp_min(AMAX_FLOOR), e4m3.MAX)[..., None]
    return e4m3.encode(wide * scale.reciprocal()), scale


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """Values of codes and scales, rounded once to float32.

    Parameters
    ----------
    codes : (..., K) uint8
    scale : (..., 1) floating

    Returns
    -------
    (..., K) float32

    Raises
    ------
    ValueError
        ``scale`` is not of shape (..., 1).
    """
    if tuple(scale.shape) != (*codes.shape[:-1], 1):
        raise ValueError(f"scale of shape {tuple(scale.shape)} is not one per vector of {tuple(codes.shape)}")
    return e4m3.decode(codes) * to_float32(scale)


def round(x: Tensor) -> Tensor:
    """Round to what the format can hold: :func:`quantise`, then :func:`dequantise`.

    Not idempotent: the second scale may be an ulp off the first.

    Parameters
    ----------
    x : (..., K) floating

    Returns
    -------
    (..., K) float32
    """
    return dequantise(*quantise(x))
