"""Whose numbers these are: the code's commit and the versions of what it runs on. Imports no torch."""

import hashlib
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "triton", "numpy", "h5py", "snakemake")


def git_state(folder: Path = Path(__file__).parent) -> tuple[str, bool]:
    """Commit of a folder's working tree and whether it has uncommitted changes; ``unknown`` outside git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit, bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", False


def tree_sha256(folder: Path) -> str:
    """Hash of a folder as it stands: its commit, what is changed since, and new files that git does not ignore.

    Outside git it is the hash of nothing.
    """
    digest = hashlib.sha256()
    try:
        for arguments in (("rev-parse", "HEAD"), ("diff", "HEAD", "--binary")):
            digest.update(_git(folder, *arguments).encode())
        for name in sorted(_git(folder, "ls-files", "--others", "--exclude-standard").splitlines()):
            digest.update(name.encode() + (folder / name).read_bytes())
    except (OSError, subprocess.CalledProcessError):
        pass
    return digest.hexdigest()


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def versions() -> dict[str, str]:
    """Versions of the interpreter and of the packages that numbers depend on."""
    return {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}
