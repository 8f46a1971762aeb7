"""Beneath the dumps: bits of BF16, hashes, and a dump's hash beside it."""

import hashlib
from pathlib import Path

import numpy as np

from dsv4.files import fsync


class DumpError(ValueError):
    """A dump that cannot be written or must not be read; names both sides and what to do."""


def to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """Bits of float32 values that BF16 holds exactly; NaN becomes the quiet NaN.

    Raises
    ------
    ValueError
        A value would be rounded.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nan = np.isnan(values)
    lost = (bits & 0xFFFF != 0) & ~nan
    if lost.any():
        where = np.unravel_index(int(np.argmax(lost)), lost.shape)
        raise ValueError(
            f"{int(lost.sum())} values are not BF16, first {values[where]!r} at {tuple(map(int, where))}"
        )
    return np.where(nan, np.uint16(0x7FC0), (bits >> 16).astype(np.uint16))


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    """Widen BF16 bits (uint16) to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def sidecar(path: Path) -> Path:
    """Where the whole-file hash of ``path`` stands."""
    return path.with_name(path.name + ".sha256")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_sha256(stored: np.ndarray) -> str:
    """SHA-256 of an array's dtype, shape and bytes."""
    digest = hashlib.sha256(f"{stored.dtype.str}{stored.shape}".encode())
    digest.update(np.ascontiguousarray(stored).data if stored.size else b"")
    return digest.hexdigest()


def same_bytes(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal in every bit: -0 is not 0, a NaN equals itself."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def publish(temporary: Path, path: Path) -> None:
    """Make ``temporary`` durable as ``path``; until its hash stands beside it, it is refused."""
    fsync(temporary)
    note = temporary.with_suffix(".sha256")
    try:
        note.write_text(f"{file_sha256(temporary)}  {path.name}\n")
        fsync(note)
        temporary.replace(path)
        note.replace(sidecar(path))
        fsync(path.parent)
    finally:
        note.unlink(missing_ok=True)
