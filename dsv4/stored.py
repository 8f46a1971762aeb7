"""Beneath the dumps: bits of BF16, hashes, and files that appear whole or not at all."""

import errno
import hashlib
import os
import socket
from pathlib import Path

import numpy as np


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


def alive(pid: int) -> bool:
    """Whether a process of this machine lives."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(temporary: Path, path: Path) -> None:
    """Make ``temporary`` durable as ``path``; until its hash stands beside it, it is refused."""
    _fsync(temporary)
    note = temporary.with_suffix(".sha256")
    try:
        note.write_text(f"{file_sha256(temporary)}  {path.name}\n")
        _fsync(note)
        temporary.replace(path)
        note.replace(sidecar(path))
        _fsync(path.parent)
    finally:
        note.unlink(missing_ok=True)


def cannot_write(path: Path, error: OSError) -> DumpError:
    """Explain a write that the system refused."""
    advice = {
        errno.EACCES: "the folder is read-only; make it writable or choose another results folder",
        errno.EROFS: "the file system is read-only; choose another results folder",
        errno.ENOSPC: "the disk is full; free space and run again, finished dumps are kept",
        errno.EDQUOT: "the quota is used up; free space and run again, finished dumps are kept",
    }
    return DumpError(f"{path}: cannot be written: {advice.get(error.errno or 0, error)}")


def owner() -> str:
    """Machine and process, for temporary names."""
    return f"{socket.gethostname()}.{os.getpid()}"


def remove_stale(path: Path) -> None:
    """Remove temporary files that killed writers of ``path`` left on this machine."""
    prefix = f".{path.name}.{socket.gethostname()}."
    for old in path.parent.glob(f"{prefix}*.tmp"):
        pid = old.name.removeprefix(prefix).split(".")[0]
        if pid.isdigit() and not alive(int(pid)):
            old.unlink(missing_ok=True)
