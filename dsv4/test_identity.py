"""A folder's hash sees every change that an engine could run on, and touches nothing."""

import os
import subprocess
from pathlib import Path

import pytest

from dsv4 import identity
from dsv4.identity import git_state, tree_sha256


def git(folder, *words):
    about = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *about, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "engine"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "run.py").write_text("1\n")
    (folder / ".gitignore").write_text("ignored\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


@pytest.fixture(params=["git", "no git"])
def folder(request, repo, tmp_path, monkeypatch):
    if request.param == "git":
        return repo
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (repo / ".git").rename(tmp_path / "elsewhere")
    return repo


def changes(folder, *steps):
    """Hashes before the steps and after each."""
    found = [tree_sha256(folder)]
    for step in steps:
        step()
        found.append(tree_sha256(folder))
    return found


def test_changed_and_new_files_are_seen_under_any_name(folder):
    late, accent = folder / "zz.py", folder / "caf\u00e9.py"
    latin = os.fsencode(folder) + b"/na\xefve.py"
    found = changes(
        folder,
        lambda: (folder / "run.py").write_text("2\n"),
        lambda: accent.write_text("1\n"),
        lambda: late.write_text("1\n"),
        lambda: late.write_text("2\n"),
        lambda: accent.write_text("2\n"),
        lambda: Path(os.fsdecode(latin)).write_text(""),
        lambda: (folder / "a b").write_text(""),
        lambda: (folder / "a b").rename(folder / "a\nb"),
    )
    assert len(set(found)) == len(found)
    assert tree_sha256(folder) == found[-1]


def test_a_byte_that_is_no_utf8_is_a_change_like_another(folder):
    run = folder / "run.py"
    found = changes(folder, lambda: run.write_bytes(b"# \xe9\n"), lambda: run.write_bytes(b"# \xe8\n"))
    assert len(set(found)) == 3


def test_folders_links_and_what_cannot_be_read_hide_nothing(folder):
    inner = folder / "inner"
    found = changes(
        folder,
        lambda: inner.mkdir() or git(inner, "init", "--quiet") or (inner / "x").write_text("1"),
        lambda: (inner / "x").write_text("2"),
        lambda: (folder / "link").symlink_to("nowhere"),
        lambda: (folder / "link").unlink() or (folder / "link").symlink_to("inner"),
        lambda: (folder / "zz").write_text("1"),
        lambda: (folder / "zz").write_text("2"),
    )
    assert len(set(found)) == len(found)


def test_a_file_that_cannot_be_read_does_not_hide_the_next(folder, monkeypatch):
    (folder / "gone").write_text("1")
    (folder / "next").write_text("1")
    plain = identity._content

    def refuses(path):
        if path.name == "gone":
            raise PermissionError(13, "no")
        return plain(path)

    monkeypatch.setattr(identity, "_content", refuses)
    assert len(set(changes(folder, lambda: (folder / "next").write_text("2")))) == 2


def test_beyond_the_bound_size_and_time_are_taken(folder, monkeypatch):
    monkeypatch.setattr(identity, "HASHED", 4)
    (folder / "weights").write_text("12345")
    os.utime(folder / "weights", ns=(0, 0))

    def same_size(stamp):
        (folder / "weights").write_text("54321")
        os.utime(folder / "weights", ns=(0, stamp))

    found = changes(folder, lambda: same_size(0), lambda: same_size(1))
    assert found[0] == found[1] != found[2]


def test_what_git_ignores_and_what_python_leaves_is_no_change(repo, tmp_path):
    found = changes(repo, lambda: (repo / "ignored").write_text("1"))
    assert len(set(found)) == 1
    plain = tmp_path / "plain"
    (plain / "__pycache__").mkdir(parents=True)
    assert len(set(changes(plain, lambda: (plain / "__pycache__" / "x.pyc").write_text("1")))) == 1


def test_the_index_is_left_as_it_is(repo):
    before = (repo / ".git" / "index").read_bytes()
    os.utime(repo / "run.py", ns=(0, 0))  # git would note the new time
    tree_sha256(repo)
    assert git_state(repo)[1] is False
    assert (repo / ".git" / "index").read_bytes() == before
    assert len(set(changes(repo, lambda: os.utime(repo / "run.py", ns=(1, 1))))) == 1


def test_a_change_in_the_instant_of_the_commit_is_seen(repo):
    """Same size, same time as the index: git compares the bytes then, by the index's own time."""
    run, index = repo / "run.py", repo / ".git" / "index"
    git(repo, "config", "core.trustctime", "false")
    stamp = 10**18
    os.utime(run, ns=(stamp, stamp))
    git(repo, "update-index", "--refresh")

    def rewrite():
        run.write_text("2\n")
        for path in (run, index):
            os.utime(path, ns=(stamp, stamp))

    os.utime(index, ns=(stamp, stamp))
    assert len(set(changes(repo, rewrite))) == 2
