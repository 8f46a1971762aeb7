"""The formats once more, in numpy and ml_dtypes, for the tests: shares no code with what it checks."""

import ml_dtypes
import numpy as np
import torch
from torch import Tensor


def bits32(x: Tensor) -> np.ndarray:
    """float32 bits, every NaN 0x7fc00000, so that equality means the same value, sign of zero included."""
    array = x.detach().cpu().numpy()
    assert array.dtype == np.float32
    return np.where(np.isnan(array), np.uint32(0x7FC00000), array.view(np.uint32))


def same_values(got: Tensor, want: np.ndarray) -> None:
    """Assert equal shapes and bits, any NaN equal to any other."""
    np.testing.assert_array_equal(bits32(got), bits32(torch.from_numpy(np.ascontiguousarray(want))))


def neighbours(values: np.ndarray) -> np.ndarray:
    """(3, n) float32: one ulp below, the value, one ulp above, for positive finite float32 values."""
    raw = values.astype(np.float32).view(np.uint32)
    return np.stack([raw - 1, raw, raw + 1]).view(np.float32)


def all_bf16() -> np.ndarray:
    """(65536,) float32, every BF16 value."""
    return (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)


def e4m3_encode(x: np.ndarray) -> np.ndarray:
    """Codes of clamped float32 values, NaN as 0x7f."""
    with np.errstate(invalid="ignore"):
        codes = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), codes)


def e4m3_decode(codes: np.ndarray) -> np.ndarray:
    """float32 values."""
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def e2m1_encode(x: np.ndarray) -> np.ndarray:
    """Codes of float32 values, NaN as 0."""
    with np.errstate(invalid="ignore"):
        codes = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0), codes)


def e2m1_decode(codes: np.ndarray) -> np.ndarray:
    """float32 values."""
    return codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def power_of_two(amax: np.ndarray, limit: float) -> np.ndarray:
    """Smallest 2^k, k >= -127, with limit * 2^k >= amax, by trying all of them; NaN for non-finite amax.

    ``limit`` has few bits, so that float64 products are exact.
    """
    powers = np.exp2(np.arange(-127, 128).astype(np.float64))  # [255]
    with np.errstate(invalid="ignore"):
        fits = limit * powers >= amax.astype(np.float64)[..., None]  # [..., 255]
    scale = powers[np.argmax(fits, axis=-1)].astype(np.float32)
    return np.where(np.isfinite(amax), scale, np.float32("nan"))


def block_round(x: np.ndarray, group: int, element: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and values of the FP8 block format ("e4m3") or MXFP4 ("e2m1")."""
    limit, floor = {"e4m3": (448.0, np.float32(1e-4)), "e2m1": (6.0, np.float32(6 * 2.0**-126))}[element]
    encode, decode = {"e4m3": (e4m3_encode, e4m3_decode), "e2m1": (e2m1_encode, e2m1_decode)}[element]
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    amax = np.abs(groups).max(-1)
    scale = power_of_two(np.maximum(amax, floor), limit)
    with np.errstate(all="ignore"):
        codes = encode((groups / scale[..., None]).astype(np.float32))
        values = decode(codes) * scale[..., None]
    return codes.reshape(x.shape), scale, values.reshape(x.shape)


def nasty_rows(num_rows: int, size: int, seed: int) -> np.ndarray:
    """(num_rows, size) float32 over many decades, with zeros, -0, a huge channel and equal values."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, size)) * 10.0 ** rng.uniform(-7, 4, (num_rows, 1))
    x *= 10.0 ** rng.uniform(-3, 0, (num_rows, size))
    x[rng.random(x.shape) < 0.05] = 0.0
    x[rng.random(x.shape) < 0.05] = -0.0
    kind = rng.integers(0, 8, num_rows)
    x[kind == 0, : size // 2] = 0.0  # whole groups of zeros
    x[kind == 1] = x[kind == 1, :1]  # all equal
    x[kind == 2, size // 3] *= 1e4  # one huge channel
    return x.astype(np.float32)
