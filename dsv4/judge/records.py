"""Bytes of a KV record, decoded without any code of the model's: numpy and the formats' definitions."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dsv4.judge.metrics import Array
from dsv4.stored import from_bf16_bits


def _e4m3_values() -> Array:
    """Value of every E4M3 byte: sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7f and 0xff are NaN."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    size = np.where(
        exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, np.maximum(exponent, 1) - 7)
    )
    size[(byte & 0x7F) == 0x7F] = np.nan
    return np.copysign(size, np.where(byte >> 7, -1.0, 1.0)).astype(np.float32)


E4M3_VALUES = _e4m3_values()
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1_VALUES = np.concatenate((E2M1_VALUES, -E2M1_VALUES))
UE8M0_VALUES = np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan).astype(np.float32)


@dataclass(frozen=True)
class Decoded:
    """What the bytes of records say.

    Attributes
    ----------
    codes : (..., nope) float32, the elements' own values.
    scale : (..., blocks) FP64, of each block of codes.
    values : (..., K) float32, as a reader of the record computes them.
    """

    codes: Array
    scale: Array
    values: Array


class RecordError(ValueError):
    """Bytes that cannot be records of this plan; says how many a row there are and should be."""


def decode(stored: Array, plan: Mapping[str, str], nope: int, rope: int) -> Decoded:
    """Codes, scales and values of records: data, then scale bytes, one record a row.

    Parameters
    ----------
    stored : (..., bytes) uint8
    plan : flattened plan; ``kv_format`` and ``kv_record`` name the record.
    nope, rope : values of each part.

    Raises
    ------
    RecordError
        Another number of bytes a row.
    """
    four_bit, aligned = plan["kv_format"] == "nvfp4", plan["kv_record"] == "aligned"
    data = (nope // 2 if four_bit else nope) + 2 * rope
    tail = nope // 16 + 4 if four_bit else 4 if aligned else -(-(nope // 64) // 8) * 8
    if stored.shape[-1] != data + tail:
        raise RecordError(f"{stored.shape[-1]} bytes a row, a record of this plan has {data + tail}")
    halves = np.ascontiguousarray(stored[..., data - 2 * rope : data]).view("<u2")
    rope_values, scales = from_bf16_bits(halves), np.ascontiguousarray(stored[..., data:])
    if four_bit:
        packed = stored[..., : nope // 2]
        codes = np.stack((E2M1_VALUES[packed & 15], E2M1_VALUES[packed >> 4]), -1)
        codes = codes.reshape(*stored.shape[:-1], nope)
        block, gsa = E4M3_VALUES[scales[..., : nope // 16]], scales[..., nope // 16 :].copy().view("<f4")
        values = codes * np.repeat(block, 16, axis=-1) * gsa
        return Decoded(codes, block.astype(np.float64) * gsa, np.concatenate((values, rope_values), axis=-1))
    codes = E4M3_VALUES[stored[..., :nope]]
    if aligned:
        scale = scales.view("<f4")
        values = np.concatenate((codes, rope_values), axis=-1) * scale
        return Decoded(codes, scale.astype(np.float64), values)
    scale = UE8M0_VALUES[scales[..., : nope // 64]]
    values = codes * np.repeat(scale, 64, axis=-1)
    return Decoded(codes, scale.astype(np.float64), np.concatenate((values, rope_values), axis=-1))


def same_values(one: Array, other: Array) -> Array:
    """Element by element equal in every bit, float32; a NaN equals any NaN."""
    both = np.isnan(one) & np.isnan(other)
    return both | (np.ascontiguousarray(one).view(np.uint32) == np.ascontiguousarray(other).view(np.uint32))
