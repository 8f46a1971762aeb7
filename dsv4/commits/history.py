"""The commits of a branch, read through git itself; nothing of the user's repository is changed. Imports no torch."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dsv4.config import ConfigError

TRAILER = "Audit-Variant"  # names the rung whose plan a commit implements, from then on
FIELDS = ("%H", "%P", "%s", f"%(trailers:key={TRAILER},valueonly,separator=%x2C)")


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One commit.

    Attributes
    ----------
    sha : all 40 digits.
    parents : hashes of its parents, the branch that it was made on first; none of a root commit.
    subject : first line of its message.
    rung : value of its trailer ``Audit-Variant``, or "".
    """

    sha: str
    parents: tuple[str, ...]
    subject: str
    rung: str

    @property
    def short(self) -> str:
        """The digits that people read."""
        return self.sha[:10]


def environment() -> dict[str, str]:
    """The environment without what git sets for its hooks, which would lead every git into that repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}


def git(repo: Path, *arguments: str) -> str:
    """Run git in a repository.

    Raises
    ------
    ConfigError
        Git refused; with its own words.
    """
    settings = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")
    command = ["git", *settings, "-C", str(repo), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment())
    if done.returncode:
        raise ConfigError(f"{repo}: git {arguments[0]}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout


def resolve(repo: Path, name: str) -> str:
    """Hash of the commit that a branch, tag or hash names.

    Raises
    ------
    ConfigError
        There is none of that name.
    """
    try:
        return git(repo, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}").strip()
    except ConfigError as error:
        raise ConfigError(f"{repo}: no commit {name!r}; give a branch, a tag or a hash") from error


def read(repo: Path, sha: str) -> Commit:
    """One commit by its hash."""
    return _log(repo, "-1", sha)[0]


def fork_point(repo: Path, base: str, head: str) -> str:
    """Hash of the newest commit that two branches share: ``base`` itself, unless it moved on since.

    Raises
    ------
    ConfigError
        They share none.
    """
    start, end = resolve(repo, base), resolve(repo, head)
    try:
        return git(repo, "merge-base", start, end).strip()
    except ConfigError as error:
        raise ConfigError(f"{repo}: {base} and {head} share no commit; correct base and head") from error


def commits(repo: Path, base: str, head: str) -> list[Commit]:
    """What ``head`` holds above its fork from ``base``, parents before their children.

    Raises
    ------
    ConfigError
        There is nothing.
    """
    found = _log(repo, "--reverse", "--topo-order", f"{fork_point(repo, base, head)}..{resolve(repo, head)}")
    if not found:
        raise ConfigError(f"{repo}: {head} holds no commit that {base} does not; correct base and head")
    return found


def is_ancestor(repo: Path, sha: str, of: str) -> bool:
    """Whether a commit is ``of`` or one that it was made on."""
    return sha == of or not git(repo, "rev-list", "-1", sha, f"^{of}").strip()


def canonical(key: str) -> str:
    """A trailer's key as the audit writes it; git matches keys whatever their case."""
    return key.strip().title()


def trailers(repo: Path, sha: str) -> list[tuple[str, str]]:
    """Canonical key and value of each trailer of a commit, as git parses them."""
    text = git(repo, "log", "-1", "--format=%(trailers:only=true,unfold=true)", sha)
    pairs = [line.partition(":") for line in text.splitlines() if line]
    return [(canonical(key), value.strip()) for key, _, value in pairs]


def rung_of(repo: Path, sha: str, default: str) -> str:
    """Rung whose plan a commit implements: the nearest trailer of the commit and its first parents, or ``default``."""
    anywhere = ("--regexp-ignore-case", f"--grep=^{TRAILER}[[:space:]]*:")  # in any line, a trailer or not
    named = _log(repo, "--first-parent", *anywhere, sha)
    return next((commit.rung for commit in named if commit.rung), default)


def _log(repo: Path, *arguments: str) -> list[Commit]:
    text = git(repo, "log", f"--format={'%x00'.join(FIELDS)}%x01", *arguments)
    lines = [line.strip("\n").split("\0") for line in text.split("\1") if line.strip("\n")]
    return [
        Commit(sha=sha, parents=tuple(parents.split()), subject=subject, rung=_last(values))
        for sha, parents, subject, values in lines
    ]


def _last(values: str) -> str:
    """Of several trailers the last counts."""
    return values.strip().rpartition(",")[2].strip()
