"""Files that appear whole or not at all, and what is said where one cannot be written."""

import errno
import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

ADVICE: Mapping[int, str] = {
    errno.EACCES: "the folder is read-only; make it writable or choose another results folder",
    errno.EROFS: "the file system is read-only; choose another results folder",
    errno.ENOSPC: "the disk is full; free space and run again, what is finished is kept",
    errno.EDQUOT: "the quota is used up; free space and run again, what is finished is kept",
}


class WriteError(ValueError):
    """A file that the system did not take; names the file and what to do."""


def cannot_write(path: Path, error: OSError) -> str:
    """Explain a write that the system refused."""
    return f"{path}: cannot be written: {ADVICE.get(error.errno or 0, error)}"


def write_whole(path: Path, content: bytes) -> None:
    """Put a whole file at ``path``, or leave what is there.

    Its folder is made. Until all bytes are on the disk they stand under a name that no other
    writer has; what killed writers of ``path`` left under such names is removed.

    Raises
    ------
    WriteError
        Full or read-only disk, no permission; nothing is left behind.
    """
    temporary = temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(path)
        temporary.write_bytes(content)
        fsync(temporary)
        temporary.replace(path)
    except OSError as error:
        raise WriteError(cannot_write(path, error)) from error
    finally:
        with suppress(OSError):  # gone, or never made: a read-only disk refuses the removal too
            temporary.unlink()


def write_json(path: Path, content: Any) -> None:
    """Write JSON; see :func:`write_whole`."""
    write_whole(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def write_parquet(path: Path, table: "pa.Table") -> None:
    """Write a table; see :func:`write_whole`."""
    import pyarrow as pa  # here, since most stages write no table
    import pyarrow.parquet as pq

    stream = pa.BufferOutputStream()
    pq.write_table(table, stream)
    write_whole(path, stream.getvalue().to_pybytes())


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that no other writer has, on this machine or another."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def remove_stale(path: Path) -> None:
    """Remove temporary files that killed writers of ``path`` left on this machine."""
    prefix = f".{path.name}.{socket.gethostname()}."
    for old in path.parent.glob(f"{prefix}*.tmp"):
        pid = old.name.removeprefix(prefix).split(".")[0]
        if pid.isdigit() and not alive(int(pid)):
            old.unlink(missing_ok=True)


def newest(path: Path, below: Sequence[Path]) -> bool:
    """Whether ``path`` and what it rests on are there, and nothing of that is newer."""
    if not path.is_file() or not all(other.is_file() for other in below):
        return False
    return max((other.stat().st_mtime_ns for other in below), default=0) <= path.stat().st_mtime_ns


def alive(pid: int) -> bool:
    """Whether a process of this machine lives."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def fsync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
