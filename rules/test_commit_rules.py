"""The rules of commits, on stubs: a job a commit, once; references and floors at most once."""

import pytest

from dsv4.commits.conftest import Repository
from dsv4.config import load
from rules.stubs import Workflow
from rules.test_rules import LIMIT

pytestmark = pytest.mark.xdist_group("branched")  # one worker: the branch is judged once
RANGE = ("--config", "base=base", "head=main", "--", "commits")


@pytest.fixture(scope="module")
def branched(tmp_path_factory):
    """Return a workflow whose folder is a repository with a base and two commits on top, which were judged."""
    workflow = Workflow(tmp_path_factory.mktemp("branched"))
    repo = Repository.__new__(Repository)
    repo.folder = workflow.folder
    repo.git("init", "--quiet", "--initial-branch=main")
    (workflow.folder / ".gitignore").write_text("results\nreports\n.snakemake\n*.txt\n__pycache__\n")
    workflow.shas = [repo.commit("Base")]
    repo.git("tag", "base")
    workflow.shas += [repo.commit("One"), repo.commit("Two", "Audit-Variant: P4")]
    workflow.repo = repo
    result = workflow.run("commits", "--config", "base=base", "head=main")
    assert result.returncode == 0, result.text
    workflow.first = workflow.ran()
    return workflow


def test_on_two_cores_one_worker_judges_the_branch(request):
    # Not every pytest lets pytest-xdist group tests; then each worker makes every fixture of the suite anew.
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@branched")


def test_a_new_commit_is_one_job_and_nothing_else_runs_again(branched):
    ran = branched.first
    assert ran["audit"] == {*branched.shas, ""}
    assert ran["commits"] == {""}
    rungs = {rung.id for rung in branched.ladder.lineage("B4_head")}
    assert (ran["reference"], ran["floor"]) == ({""}, rungs)  # once, and the floors of one line
    assert not {"variant", "measure", "gate"} & set(ran)

    assert branched.run(*RANGE).returncode == 0
    assert branched.ran() == {}

    branched.shas.append(branched.repo.commit("Three"))
    assert branched.run(*RANGE).returncode == 0
    assert branched.ran() == {"audit": {branched.shas[-1], ""}, "commits": {""}, "enforce": {""}}
    assert branched.repo.git("status", "--porcelain") == ""


def test_an_edited_judge_judges_again_and_runs_no_reference(branched):
    branched.edit("dsv4/judge/limits.py", *LIMIT)
    jobs = {
        "commit": len(branched.shas),
        "collect_commits": 1,
        "commits_page": 1,
        "enforce_commits": 1,
        "commits": 1,
    }
    assert branched.planned(*RANGE) == jobs
    branched.repo.git("checkout", "--quiet", "dsv4")


def test_a_foreign_reference_is_compared_before_verdicts_of_commits_are_collected(branched):
    branched.edit("config.yaml", "ladder:", "reference: {command: [their_engine], of: plain}\nladder:")
    asked = branched.planned(*RANGE)
    assert {"cross_check", "collect_commits", "enforce_commits"} <= set(asked)
    assert not {"make_reference", "commit"} & set(asked)
    branched.repo.git("checkout", "--quiet", "config.yaml")


def test_a_commit_that_fails_ends_in_exit_status_1_and_a_page(branched):
    branched.script(status={"some": "fail"})
    (branched.results / "commits.ok").unlink(missing_ok=True)
    (branched.folder / "reports/commits.html").unlink()
    result = branched.run(*RANGE)
    assert result.returncode == 1
    assert "commits did not pass" in result.text
    assert "the run stopped" not in result.text  # the page of the ladder is not this call's
    assert (branched.folder / "reports/commits.html").is_file()
    branched.script()
    branched.ran()


MINE = """ladder:
  Mine: {parent: B0_unfused, commit: main, why: the branch}
"""


def test_a_rung_that_names_a_branch_runs_with_all_and_again_once_that_moved(branched):
    branched.edit("config.yaml", "ladder:\n", MINE)
    branched.ladder = load(branched.folder / "config.yaml").ladder
    branched.script()
    result = branched.run("Mine")
    assert result.returncode == 0, result.text
    assert branched.ran()["variant"] == {"B0_unfused", "Mine"}
    others = branched.planned("all")["variant"]
    branched.shas.append(branched.repo.commit("A change of the branch"))
    assert branched.planned("all")["variant"] == others + 1
    assert branched.planned("Mine")["variant"] == 1
    branched.edit("config.yaml", MINE, "ladder:\n")
    branched.ladder = load(branched.folder / "config.yaml").ladder
    branched.script()


@pytest.mark.parametrize(("target", "stage"), [("bisect", "bisect"), ("verify_commits", "verify")])
def test_what_answers_on_the_terminal_runs_each_time_and_fails_without_a_page(branched, target, stage):
    asked = ("--config", "base=base", "head=main", "tap=index_topk", "limit=0.9", "--", target)
    result = branched.run(*asked)
    assert result.returncode == 0, result.text
    assert branched.ran()[stage] == {""}
    assert ("bisect  index_topk 0.9" in result.text) == (target == "bisect")
    branched.script(crash=[[stage, ""]])
    result = branched.run(*asked)
    assert result.returncode == 1
    assert branched.ran() == {stage: {""}}
    assert "the run stopped" not in result.text  # nothing is said of the ladder
    branched.script()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("commits",), "which commits? snakemake commits --config base=main head=my-branch"),
        (("commits", "--config", "base=base", "head=nowhere"), "no commit 'nowhere'"),
        (("bisect", "--config", "base=base"), "which commits?"),
        (("verify_commits",), "which commits?"),
        (("commits", "--config", "base=base", "haed=main"), "--config haed: is not read"),
    ],
)
def test_what_cannot_be_judged_is_refused_before_any_job(branched, arguments, message):
    result = branched.run(*arguments)
    assert result.returncode == 1
    assert message in result.text
    assert branched.ran() == {}
