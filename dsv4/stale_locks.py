"""Lock files that a dead build of a foreign tree left: which may go, and why the others stay.

Our own build holds operating-system locks, which go with their owner. Other build systems leave files (PyTorch's
extension builder, JIT compilers), and wait for them for ever once their owner was killed.
"""

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

OLD = 600  # seconds; a younger file stays whoever made it
# filesystems that one machine mounts: on any other an owner without a host may be a process of another machine
LOCAL = ["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"]


def clear(folder: Path, patterns: Iterable[str], now: float | None = None) -> list[str]:
    """Remove the lock files of dead owners below a folder.

    Parameters
    ----------
    folder : the foreign tree.
    patterns : globs relative to it, such as ``"**/lock"``.
    now : seconds since the epoch; the clock's by default.

    Returns
    -------
    list of str
        A line a lock file: removed, or kept and why.
    """
    lines = []
    for path in sorted({found for pattern in patterns for found in folder.glob(pattern) if found.is_file()}):
        before = _state(path)
        kept = why_kept(path, time.time() if now is None else now)
        if kept is None and _state(path) != before:
            kept = "another build took it meanwhile"
        if kept is None:
            path.unlink(missing_ok=True)
        said = f"kept: {kept}" if kept else "removed: older than 10 minutes, and its owner is dead"
        lines.append(f"lock file {path}: {said}")
    return lines


def why_kept(path: Path, now: float) -> str | None:
    """Reason for which a lock file stays, or None if it is older than 10 minutes and its owner is dead.

    The owner is the process that the file names, or else one that has it open or locked. What cannot be proved
    dead is alive: an owner on another machine, or processes whose files may not be looked at. A file that names no
    host is this machine's (or container's) own if it was made since its start, on a disk of its own; of two
    containers that run at once on one disk, neither sees the other's processes, and this cannot tell.
    """
    try:
        made = path.stat().st_mtime
    except FileNotFoundError:
        return "gone meanwhile"
    if now - made < OLD:
        return f"{max(0, now - made):.0f} s old"
    pid, host = named_owner(path)
    if host and host != socket.gethostname():
        return f"its owner ran on {host}"
    if not host and made < _started():
        return "it is older than this machine's start, and names no host"
    if not host and filesystem(path) not in LOCAL:
        return f"it is on {filesystem(path)}, which other machines may share, and names no host"
    if pid is not None and _alive(pid, made):
        return f"its owner lives, process {pid}"
    holder = next(_holders(path), None)
    if holder is not None:
        return f"process {holder} has it open"
    if _locked(path):
        return "it is locked"
    if pid is None and not _all_visible():
        return "it names no owner, and other users' processes cannot be looked at"
    return None


def named_owner(path: Path) -> tuple[int | None, str | None]:
    r"""Process id and host that a lock file names: ``123``, ``123\nhost`` or ``host:123``; None where it does not."""
    try:
        text = path.read_text(errors="replace")[:400]
    except OSError:
        return None, None
    pid = re.search(r"(?<![\w.])(\d{1,10})(?![\w.])", text)
    host = re.search(r"(?<![\w.-])([A-Za-z][\w.-]*)", text)
    return int(pid[1]) if pid else None, host[1] if host and pid else None


def filesystem(path: Path) -> str:
    """Type of the file system that holds a file, such as ``ext4`` or ``nfs4``."""
    folders = {path.resolve(), *path.resolve().parents}
    mounts = [part for part in psutil.disk_partitions(all=True) if Path(part.mountpoint) in folders]
    # of mounts one over the other, the last is seen
    return max(reversed(mounts), key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"


def _started() -> float:
    """When this machine, or this container, started: no process that is seen here was there before."""
    try:
        return max(psutil.boot_time(), psutil.Process(1).create_time())
    except psutil.Error:
        return psutil.boot_time()


def _state(path: Path) -> tuple[int, int] | None:
    """What changes when another file takes a lock file's place, or its owner touches it; None: it is gone."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino


def _alive(pid: int, made: float) -> bool:
    """Whether a process lives that was there when the file was made; a later one only has its number."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= made + 1
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _holders(path: Path) -> Iterator[int]:
    """Processes that have the file open, as far as this user may see."""
    wanted = path.resolve()
    for process in psutil.process_iter():
        try:
            if any(Path(found.path) == wanted for found in process.open_files()):
                yield process.pid
        except psutil.Error:
            continue


def _locked(path: Path) -> bool:
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _all_visible() -> bool:
    return os.geteuid() == 0
