"""The hook writes what was judged into a message in a real repository, or says why not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4.__main__ import main as dsv4_main
from dsv4.code_inputs import closure
from dsv4.commits import evidence, hook
from dsv4.commits.conftest import ROOT, Repository
from dsv4.commits.test_evidence import audited, judge_commit, parsed

__all__ = ["audited"]  # a fixture


@pytest.fixture
def repo(audited, tmp_path) -> Repository:
    """A repository with the files that P5 runs, and the hook."""
    repo = with_code(tmp_path / "repo")
    hook.install(repo.folder, audited.config, audited.results)
    repo.git("config", "audit.variant", "P5")
    return repo


def with_code(folder: Path) -> Repository:
    """A repository whose one commit holds the files that a rung runs, as they are here."""
    repo = Repository(folder)
    for file in closure("dsv4.run.variant"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, folder / file)
    repo.commit("The project")
    return repo


def message(repo: Repository) -> str:
    return repo.git("log", "-1", "--format=%B")


def test_a_commit_carries_the_evidence_of_the_configured_rung(audited, repo):
    repo.commit("Fuse mHC", "Why it is good.")
    expected = evidence.of_rung(audited.results, audited.config, "P5")
    assert parsed(message(repo)) == expected
    assert message(repo).startswith("Fuse mHC\n\nWhy it is good.\n\nAudit-Variant: P5\n")
    for key in ("Audit-Variant", "audit-variant"):
        repo.git("commit", "--quiet", "--amend", "--allow-empty", "-m", f"Fuse mHC, reworded\n\n{key}: P4")
        assert parsed(message(repo)) == {key: "P4"}


def test_files_that_were_not_judged_get_no_evidence(repo):
    """What counts is what is staged: not what lies beside it, and not what the rung does not run."""
    path = repo.folder / "kernels/route/ref.py"
    judged = path.read_text()
    path.write_text(judged + "\n")
    done = commit(repo, "-m", "An edit", "--all")
    assert done.returncode == 0
    assert done.stderr.startswith(
        "audit: these staged files are not those that were judged: kernels/route/ref.py\n"
    )
    assert message(repo) == "An edit"
    path.write_text(judged)
    (repo.folder / "README.md").write_text("What this is.")
    repo.git("add", "--all")
    path.write_text(judged + "\n")
    commit(repo, "-m", "As it was judged")
    assert parsed(message(repo))["Audit-Variant"] == "P5"


def test_another_repository_gets_no_evidence(audited, tmp_path):
    repo = Repository(tmp_path / "other")
    hook.install(repo.folder, audited.config, audited.results)
    done = commit(repo, "-m", "Of something else", AUDIT_VARIANT="P5")
    assert done.returncode == 0
    assert "audit: these staged files are not those that were judged: dsv4/" in done.stderr
    assert message(repo) == "Of something else"


def test_the_hook_stays_out_of_amends_rebases_and_merges(repo):
    repo.commit("Fuse mHC")
    before = message(repo)
    repo.git("commit", "--quiet", "--amend", "--no-edit", "--allow-empty")
    assert message(repo) == before
    repo.git("config", "--unset", "audit.variant")
    repo.git("checkout", "--quiet", "-b", "side")
    repo.commit("Plain")
    assert "Audit" not in message(repo)
    repo.git("config", "audit.variant", "P5")
    repo.git("checkout", "--quiet", "main")
    repo.git("commit", "--quiet", "--allow-empty", "--no-verify", "-m", "Beside it\n\nAudit-Variant: P4")
    repo.git("cherry-pick", "--allow-empty", "side")
    assert message(repo) == "Plain"
    repo.git("merge", "--quiet", "--no-ff", "-m", "Merge", "side")
    assert message(repo) == "Merge"
    repo.git("checkout", "--quiet", "side")
    repo.git("rebase", "--quiet", "--force-rebase", "--empty=keep", "main~2")
    assert message(repo) == "Plain"


def commit(repo: Repository, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Commit nothing, with the hooks; the result as the user sees it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    who = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    command = ["git", *who, "commit", "--allow-empty", *options]
    return subprocess.run(command, cwd=repo.folder, env=clean | env, capture_output=True, text=True)


def test_an_editor_that_writes_nothing_ends_the_commit(repo, tmp_path):
    done = commit(repo, GIT_EDITOR="true")
    assert done.returncode == 1
    assert "evidence and nothing else" in done.stderr
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\n{ echo Subject; cat "$1"; } > "$1.new" && mv "$1.new" "$1"\n')
    editor.chmod(0o755)
    done = commit(repo, "-v", GIT_EDITOR=str(editor))
    assert done.returncode == 0, done.stderr
    assert message(repo).startswith("Subject\n\nAudit-Variant: P5\n")
    assert "#" not in message(repo)


def test_a_hook_that_fails_says_one_line_and_lets_the_commit_go_on(audited, repo):
    done = commit(repo, "-m", "No such rung", AUDIT_VARIANT="B77")
    assert done.returncode == 0
    assert "no commit 'B77'; give a branch, a tag or a hash" in done.stderr
    (audited.results / "gates/P5.json").unlink()
    done = commit(repo, "-m", "Not judged")
    assert done.returncode == 0
    assert "audit: P5 was not judged" in done.stderr
    assert "Traceback" not in done.stderr
    path = hook.hook_path(repo.folder, hook.PREPARE)
    path.write_text(path.read_text().replace(sys.executable, "/gone/python"))
    done = commit(repo, "-m", "No interpreter")
    assert done.returncode == 0
    assert "no evidence of P5 was added, the commit goes on" in done.stderr
    assert message(repo) == "No interpreter"


def test_a_commit_that_was_judged_gets_its_evidence_by_an_amend(audited, repo):
    """Of its own files alone: what is staged beside them was not judged."""
    repo.git("config", "--unset", "audit.variant")
    (repo.folder / "code.py").write_text("x = 1\n")
    sha = repo.commit("A change")
    judge_commit(audited, repo, sha)
    (repo.folder / "code.py").write_text("x = 2\n")
    done = commit(repo, "--amend", "--no-edit", "--all", AUDIT_VARIANT="HEAD")
    assert "HEAD holds other files than this commit" in done.stderr
    assert message(repo) == "A change"
    repo.git("reset", "--quiet", "--hard", sha)
    done = commit(repo, "--amend", "--no-edit", AUDIT_VARIANT="HEAD")
    assert parsed(message(repo)) == evidence.of_rung(audited.results, audited.config, "P5"), done.stderr


def test_installing_twice_is_installing_once_and_uninstalling_leaves_nothing(audited, repo):
    path = hook.hook_path(repo.folder, hook.PREPARE)
    before = path.read_text()
    hook.install(repo.folder, audited.config, audited.results)
    assert path.read_text() == before
    assert os.access(path, os.X_OK)
    hook.uninstall(repo.folder)
    assert not path.exists()
    assert not hook.hook_path(repo.folder, hook.CHECK).exists()
    assert "not there" in hook.uninstall(repo.folder)[0]


def test_the_command_installs_and_removes(audited, tmp_path, monkeypatch, capsys):
    repo = Repository(tmp_path / "other")
    words = ["dsv4", "install-hook", "--repo", str(repo.folder), "--config", str(audited.config.path)]
    paths = [hook.hook_path(repo.folder, name) for name in hook.SCRIPTS]
    for more, there in (([], True), (["--uninstall"], False)):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        assert dsv4_main() == 0
        assert [path.exists() for path in paths] == [there, there]
        assert capsys.readouterr().out.splitlines()[0].endswith("installed" if there else "removed")


def test_a_hook_of_somebody_else_stays(audited, tmp_path):
    repo = Repository(tmp_path / "other")
    repo.git("config", "core.hooksPath", "tools")
    path = repo.folder / "tools" / hook.PREPARE
    path.parent.mkdir()
    path.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(hook.HookError, match="another hook is there, and it stays"):
        hook.install(repo.folder, audited.config)
    hook.uninstall(repo.folder)
    assert path.read_text() == "#!/bin/sh\nexit 0\n"
    assert not hook.hook_path(repo.folder, hook.CHECK).exists()


def test_the_line_for_another_hook_works_there(audited, tmp_path):
    repo = with_code(tmp_path / "other")
    repo.git("config", "audit.variant", "P5")
    path = hook.hook_path(repo.folder, hook.PREPARE)
    path.write_text("#!/bin/sh\n")
    with pytest.raises(hook.HookError) as error:
        hook.install(repo.folder, audited.config, audited.results)
    line = str(error.value).partition("put this line into it: ")[2]
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    repo.commit("Fuse mHC")
    assert parsed(message(repo))["Audit-Variant"] == "P5"


def test_no_repository_is_one_sentence(audited, tmp_path):
    with pytest.raises(hook.HookError, match="not a git repository"):
        hook.install(tmp_path, audited.config)
