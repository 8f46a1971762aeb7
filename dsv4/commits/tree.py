"""A work tree of its own for a commit: a clone that shares the objects, in the results folder.

The user's repository is only read: no worktree is registered in it and no file of its work tree is
touched. A tree goes when its owner is done with it; what a killed owner left goes when the next one
starts, for then nobody holds the tree's lock any more.
"""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from dsv4.commits.history import git

TREES = ".trees"


@contextmanager
def checked_out(repo: Path, sha: str, results: Path) -> Iterator[Path]:
    """Give a folder with ``tree/``, the commit's files and its own git, and room beside it.

    Parameters
    ----------
    repo : the user's repository.
    sha : hash of the commit.
    results : ``results/<run>``.

    Raises
    ------
    ConfigError
        Git cannot clone or check out; with its own words.
    """
    remove_abandoned(results)
    folder = results / TREES / f"{sha[:10]}-{secrets.token_hex(4)}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _held(_lock(folder)):
        try:
            folder.mkdir()
            tree = folder / "tree"
            source = Path(git(repo, "rev-parse", "--absolute-git-dir").strip())
            clone = (
                "clone",
                "--quiet",
                "--shared",
                "--no-checkout",
                "--template=",
                str(source),
                str(tree.resolve()),
            )
            git(repo, *clone)
            git(tree, "checkout", "--quiet", "--detach", sha)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            _lock(folder).unlink(missing_ok=True)


def remove_abandoned(results: Path) -> list[str]:
    """Remove trees whose owners live no more; return their names."""
    gone = []
    for path in sorted((results / TREES).glob("*.lock")):
        folder = path.with_suffix("")
        try:
            with FileLock(path, timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
                path.unlink(missing_ok=True)
                gone.append(folder.name)
        except Timeout:  # its owner lives
            continue
    return gone


def _held(path: Path) -> AcquireReturnProxy:
    """The lock of a new tree, taken; again if another start removed its file before it was ours."""
    while True:
        held = FileLock(path).acquire()
        if path.exists():
            return held
        held.lock.release()


def _lock(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")
