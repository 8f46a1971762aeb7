"""A commit's tree: the commit's own files, nothing in the user's repository, gone whatever became of its owner."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv4.commits.conftest import Repository
from dsv4.commits.tree import TREES, checked_out, remove_abandoned
from dsv4.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
# Checks a commit out and runs a child that would live for a minute, as an audit does.
OWNER = """
import subprocess, sys, time
from pathlib import Path
from dsv4.commits.run import _start
from dsv4.commits.tree import checked_out
repo, sha, results = sys.argv[1:]
with checked_out(Path(repo), sha, Path(results)) as room:
    child = "import os, time; open('../child', 'w').write(str(os.getpid())); time.sleep(60)"
    _start([sys.executable, "-c", child], room / "tree", 60)
"""


@pytest.fixture
def repo(tmp_path) -> Repository:
    """Two commits, and a work tree with a change that is not committed."""
    made = Repository(tmp_path / "repo")
    (made.folder / "a.txt").write_text("first")
    made.commit("First")
    (made.folder / "a.txt").write_text("second")
    made.commit("Second")
    (made.folder / "a.txt").write_text("not committed")
    return made


def state(repo: Repository) -> tuple[str, ...]:
    """All that a user would see of a change: status, branches, worktrees, configuration, files of .git."""
    files = sorted(str(path) for path in (repo.folder / ".git").rglob("*") if path.is_file())
    words = (
        ("status", "--porcelain", "--ignored"),
        ("branch", "-a"),
        ("worktree", "list"),
        ("config", "--list"),
    )
    return (*(repo.git(*each) for each in words), *files)


def test_a_tree_holds_its_commit_and_the_repository_is_only_read(repo, tmp_path):
    before, first = state(repo), repo.git("rev-parse", "HEAD~1")
    with checked_out(repo.folder, first, tmp_path / "results") as room:
        assert (room / "tree/a.txt").read_text() == "first"
        head = ["git", "-C", str(room / "tree"), "rev-parse", "HEAD"]
        assert subprocess.run(head, capture_output=True, text=True).stdout.strip() == first
    assert state(repo) == before
    assert (repo.folder / "a.txt").read_text() == "not committed"
    assert list((tmp_path / "results" / TREES).iterdir()) == []


def test_a_git_hooks_environment_does_not_lead_elsewhere(repo, tmp_path, monkeypatch):
    other = Repository(tmp_path / "other")
    other.commit("Another repository")
    monkeypatch.setenv("GIT_DIR", str(other.folder / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other.folder / ".git/index"))
    with checked_out(repo.folder, repo.git("rev-parse", "HEAD"), tmp_path / "results") as room:
        assert (room / "tree/a.txt").read_text() == "second"


def test_a_hook_of_the_users_templates_does_not_run(repo, tmp_path, monkeypatch):
    hook = tmp_path / "templates/hooks/post-checkout"
    hook.parent.mkdir(parents=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gitconfig").write_text(f"[init]\n  templateDir = {tmp_path}/templates\n")
    with checked_out(repo.folder, repo.git("rev-parse", "HEAD"), tmp_path / "results"):
        pass
    assert not (tmp_path / "ran").exists()


def test_an_error_inside_removes_the_tree(repo, tmp_path):
    with pytest.raises(ZeroDivisionError), checked_out(repo.folder, repo.git("rev-parse", "HEAD"), tmp_path):
        raise ZeroDivisionError
    assert list((tmp_path / TREES).iterdir()) == []


def test_no_such_commit_is_gits_own_word(repo, tmp_path):
    with pytest.raises(ConfigError, match="git checkout"), checked_out(repo.folder, "0" * 40, tmp_path):
        pass
    assert list((tmp_path / TREES).iterdir()) == []


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait(what, seconds: float = 30.0):
    """Return what a function gives, once that is true."""
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="no Linux: only there a child dies with its parent")
@pytest.mark.parametrize(
    "how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["Ctrl-C", "kill", "kill -9"]
)
def test_a_killed_audit_leaves_no_child_and_its_tree_goes_with_the_next_start(repo, tmp_path, how):
    before, sha, results = state(repo), repo.git("rev-parse", "HEAD"), tmp_path / "results"
    command = [sys.executable, "-c", OWNER, str(repo.folder), sha, str(results)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    reset = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731 - ignored in a background
    owner = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, preexec_fn=reset)

    def child():
        found = [path.read_text() for path in (results / TREES).glob("*/child")]
        return int(found[0]) if found and found[0] else 0

    pid = wait(child)
    assert remove_abandoned(results) == []  # its owner lives
    owner.send_signal(how)
    owner.wait(30)
    wait(lambda: not alive(pid))
    if how == signal.SIGINT:
        assert list((results / TREES).iterdir()) == []
    assert len(remove_abandoned(results)) == (0 if how == signal.SIGINT else 1)
    assert list((results / TREES).iterdir()) == []
    assert state(repo) == before
