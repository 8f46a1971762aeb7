"""Whose numbers these are: the code's commit and the versions of what it runs on. Imports no torch."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "triton", "numpy", "h5py", "snakemake")


def git_state() -> tuple[str, bool]:
    """Commit of the working tree and whether it has uncommitted changes; ``unknown`` outside git."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit, bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", False


def _git(*arguments: str) -> str:
    root = Path(__file__).parent
    return subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()


def versions() -> dict[str, str]:
    """Versions of the interpreter and of the packages that numbers depend on."""
    return {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}
