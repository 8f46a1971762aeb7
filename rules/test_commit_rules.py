"""The rules of commits, on stubs: a job a commit, once; references and floors at most once."""

import pytest

from dsv4.commits.conftest import Repository
from rules.stubs import Workflow


@pytest.fixture(scope="module")
def branched(tmp_path_factory):
    """Return a workflow whose folder is a repository with a base and two commits on top."""
    workflow = Workflow(tmp_path_factory.mktemp("branched"))
    repo = Repository.__new__(Repository)
    repo.folder = workflow.folder
    repo.git("init", "--quiet", "--initial-branch=main")
    (workflow.folder / ".gitignore").write_text("results\nreports\n.snakemake\n*.txt\n__pycache__\n")
    workflow.shas = [repo.commit("Base")]
    repo.git("tag", "base")
    workflow.shas += [repo.commit("One"), repo.commit("Two", "Audit-Variant: P4")]
    workflow.repo = repo
    return workflow


RANGE = ("--config", "base=base", "head=main", "--", "commits")


def test_a_new_commit_is_one_job_and_nothing_else_runs_again(branched):
    first = branched.run("commits", "--config", "base=base", "head=main")
    assert first.returncode == 0, first.text
    ran = branched.ran()
    assert ran["audit"] == {*branched.shas, ""}
    assert ran["commits"] == {""}
    rungs = {rung.id for rung in branched.ladder.lineage("B4_head")}
    assert (ran["reference"], ran["floor"]) == ({""}, rungs)  # once, and the floors of one line
    assert not {"variant", "measure", "gate"} & set(ran)

    assert branched.run(*RANGE).returncode == 0
    assert branched.ran() == {}

    branched.shas.append(branched.repo.commit("Three"))
    assert branched.run(*RANGE).returncode == 0
    assert branched.ran() == {"audit": {branched.shas[-1], ""}, "commits": {""}}
    assert branched.repo.git("status", "--porcelain") == ""


def test_an_edited_model_of_ours_runs_no_commit_again(branched):
    branched.run(*RANGE)
    branched.ran()
    branched.edit("dsv4/run/variant.py", "import argparse", "import argparse  # edited")
    assert branched.run("-n", *RANGE).returncode == 0
    assert "audit" not in branched.ran()
    branched.repo.git("checkout", "--quiet", "dsv4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("commits",), "which commits? snakemake commits --config base=main head=my-branch"),
        (("commits", "--config", "base=base"), "which commits?"),
        (("commits", "--config", "base=base", "head=nowhere"), "no commit 'nowhere'"),
        (("commits", "--config", "base=main", "head=base"), "holds no commit that main does not"),
        (("commits", "--config", "base=base", "haed=main"), "--config haed: is not read"),
        (("commits", "--config", "base=base", "head=main", "rung=B9"), "--config rung=B9: no such rung"),
    ],
)
def test_what_cannot_be_judged_is_refused_before_any_job(branched, arguments, message):
    result = branched.run(*arguments)
    assert result.returncode == 1
    assert message in result.text
    assert branched.ran() == {}
