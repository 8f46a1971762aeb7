"""Whose numbers these are: the code's commit and the versions of what it runs on. Imports no torch."""

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGES = ("torch", "triton", "numpy", "h5py", "snakemake")
HASHED = 256 * 2**20  # bytes of files outside a commit that are read for a hash, so that a start stays cheap
OUTSIDE = (".git", "__pycache__")


def git_state(folder: Path = Path(__file__).parent) -> tuple[str, bool]:
    """Commit of a folder's working tree and whether it has uncommitted changes; ``unknown`` outside git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD").decode().strip()
        return commit, bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", False


def tree_sha256(folder: Path) -> str:
    """Hash of a folder as it stands: its commit, what is changed since, and new files that git does not ignore.

    Outside git, or before the first commit, it is the hash of all files. Left out there: ``.git`` and
    ``__pycache__``. Of what is no part of a commit, :data:`HASHED` bytes are read, in the order of names; of a file
    that does not fit or cannot be read, size and time of the last change count.
    """
    digest = hashlib.sha256()
    try:
        digest.update(_git(folder, "rev-parse", "HEAD"))
        digest.update(_changes(folder))
        new = _git(folder, "ls-files", "-z", "--others", "--exclude-standard").split(b"\0")
        paths = [folder / os.fsdecode(name) for name in new if name]
    except (OSError, subprocess.CalledProcessError):
        paths = list(_all_files(folder))
    room = HASHED
    for path in sorted(paths):
        digest.update(os.fsencode(path.relative_to(folder)) + b"\0")
        if path.is_dir() and not path.is_symlink():  # git names a repository inside by its folder
            digest.update(tree_sha256(path).encode())
            continue
        found, read = _one(path, room)
        digest.update(found)
        room -= read
    return digest.hexdigest()


def _all_files(folder: Path) -> Iterator[Path]:
    """Files and links below a folder; no pipe or socket."""
    for where, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(where) / name).is_symlink()]
        folders[:] = [name for name in folders if name not in OUTSIDE]
        paths = [Path(where) / name for name in (*links, *names)]
        yield from (path for path in paths if path.is_symlink() or path.is_file())


def _one(path: Path, room: int) -> tuple[bytes, int]:
    """What stands for a file or link in a hash, and how many bytes were read for it."""
    try:
        link = os.fsencode(path.readlink()) + b"\0" if path.is_symlink() else b""
        if link and not path.is_file():
            return link, 0
        size = path.stat().st_size
        if size <= room:
            return link + _content(path), size
    except OSError:  # gone since, or not ours to read: its time is all that there is
        pass
    try:
        about = path.lstat()
    except OSError:
        return b"gone", 0
    return f"{about.st_size} {about.st_mtime_ns}".encode(), 0


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _changes(folder: Path) -> bytes:
    """The diff to the commit, through a copy of the index: git writes the times that it finds into the one it reads."""
    index = os.fsdecode(_git(folder, "rev-parse", "--git-path", "index").rstrip(b"\n"))
    with TemporaryDirectory() as room:
        copy = shutil.copy2(folder / index, Path(room) / "index")  # with its time, by which git trusts it
        words = ("diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", "--no-color")
        return _git(folder, *words, GIT_INDEX_FILE=str(copy))


def _git(folder: Path, *arguments: str, **more: str) -> bytes:
    """What git prints; ``more`` goes into its environment."""
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"} | more  # status would refresh the user's index
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=True, env=environment)
    return done.stdout


def versions() -> dict[str, str]:
    """Versions of the interpreter and of the packages that numbers depend on."""
    return {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}
