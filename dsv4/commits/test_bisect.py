"""Bisection over commits: a fake judge for what it says, the six commits for what it finds."""

import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from dsv4.__main__ import main as dsv4_main
from dsv4.commits import bisect
from dsv4.commits.bisect import Bisection, say
from dsv4.commits.branch import Branch
from dsv4.commits.conftest import ROOT, Repository
from dsv4.commits.question import Judged, Question
from dsv4.commits.search import Answer
from dsv4.config import ConfigError, load
from dsv4.judge.evaluate import Finding

GOOD, CRASH = Judged(answer=Answer.GOOD, why="no finding"), Judged(answer=Answer.SKIP, why="does not run: x")
BAD = Judged(answer=Answer.BAD, why="layer 5 is wrong", layer=5, tap="topk", stage="index_topk")


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    """A repository with seven commits in a row, and their hashes."""
    repo = Repository(tmp_path_factory.mktemp("row") / "repo")
    return repo, [repo.commit(f"Commit {number}") for number in range(7)]


class Fake(Question):
    """Answers that are known, and a file as a run leaves it."""

    def judge(self, branch, sha):
        path = branch.folder(sha) / "run.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text("{}")
        return self.answers[sha]


def bisection(row, answers, tmp_path):
    repo, shas = row
    config = load(ROOT / "config.yaml")
    config = replace(config, commits=replace(config.commits, repo=repo.folder))
    question = Fake()
    object.__setattr__(question, "answers", dict(zip(shas, answers, strict=True)))
    return Bisection(Branch(tmp_path, config, shas[0]), question).run(shas[-1])


def test_it_names_commit_layer_and_op_and_counts_what_it_ran(row, tmp_path):
    answers = [GOOD] * 4 + [BAD] * 3
    found = bisection(row, answers, tmp_path)
    (first,) = found["first"]
    assert (first["commit"], first["layer"], first["stage"]) == (row[1][4], 5, "index_topk")
    assert say(found) == [
        f"first bad commit: {row[1][4][:10]} Commit 4 (4 of 7 commits asked, 4 of them run now)",
        "bad means: the gate fails",
        "at layer 5, topk (index_topk)",
        "layer 5 is wrong",
    ]
    assert bisection(row, answers, tmp_path)["ran"] == 0


def test_commits_that_do_not_run_are_skipped_and_named_where_they_hide_the_turn(row, tmp_path):
    found = bisection(row, [GOOD, GOOD, CRASH, CRASH, BAD, CRASH, CRASH], tmp_path)
    assert [each["commit"] for each in found["first"]] == row[1][2:5]
    lines = say(found)
    assert lines[0].startswith("one of 3 is the first bad commit, the others cannot be judged (7 of 7")
    assert lines[1] == f"  {row[1][2][:10]} Commit 2: does not run: x"


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([BAD] * 7, "the base {base} is bad already: layer 5 is wrong; give an older base"),
        ([CRASH, *[BAD] * 6], "the base {base} cannot be judged: does not run: x"),
        ([GOOD] * 7, "the head {head} is good: no finding"),
        ([GOOD] * 5 + [CRASH] * 2, "the last that can be judged (2 above it cannot), is good"),
    ],
)
def test_ends_that_do_not_differ_are_one_sentence(row, tmp_path, answers, says):
    found = bisection(row, answers, tmp_path)
    assert found["first"] == []
    (line,) = say(found)
    assert says.format(base=row[1][0][:10], head=row[1][-1][:10]) in line


def finding(layer, tap):
    return Finding(kind="limit", mode="isolated", layer=layer, tap=tap, text=f"{tap} is wrong")


def test_a_tap_or_a_stage_asks_about_findings_there_alone():
    found = [finding(0, "attn_out"), finding(5, "topk"), finding(-1, "logits")]
    for name in ("topk", "index_topk"):
        judged = Question.of(name, None, None).of_findings(found)
        assert (judged.answer, judged.layer, judged.why) == (Answer.BAD, 5, "topk is wrong")
        assert Question.of(name, None, None).of_findings(found[:1]).answer == Answer.GOOD
    assert Question().of_findings(found).layer == 0
    assert Question().of_findings(found[2:]).layer == "model"
    assert Question().of_findings([]).answer == Answer.GOOD


def test_a_number_is_bad_in_the_first_layer_beyond_its_limit():
    values = pd.Series([0.99, 0.7, 0.5], index=[(0, "attn_out"), (3, "attn_out"), (4, "attn_out")])
    question = Question.of("attn_out", 0.9, None)
    assert (question.metric, question.of_values(values).layer) == ("cos", 3)
    assert question.of_values(values).why == "cos 0.7 is under 0.9"
    assert question.of_values(values[:1]).why == "cos is 0.99 at worst"
    assert question.of_values(values[:1] * float("nan")).answer == Answer.BAD
    assert question.of_values(values[:0]).answer == Answer.SKIP
    question = Question.of("lse", 0.6, None)
    assert (question.metric, question.of_values(values).why) == ("max_abs", "max_abs 0.99 is over 0.6")
    assert question.of_values(values[2:]).answer == Answer.GOOD


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("topkk", None, None), "no such tap or stage; near it: topk"),
        ((None, 0.9, None), "a limit or a metric needs a tap"),
        (("topk", None, "overlap"), "give a limit too"),
        (("kv_bytes", 0.9, None), "the reference has none to measure against"),
        (("topk", 0.9, "cosine"), "no such number; there are: cos"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        Question.of(*options)


def test_it_walks_first_parents_from_the_fork_and_refuses_a_base_that_was_merged_in(tmp_path):
    repo = Repository(tmp_path / "repo")
    base = repo.commit("Base")
    repo.git("checkout", "--quiet", "-b", "side")
    side = repo.commit("Side")
    repo.git("checkout", "--quiet", "main")
    main = repo.commit("Main")
    repo.git("merge", "--quiet", "--no-ff", "-m", "Merge", "side")
    merge = repo.git("rev-parse", "HEAD")
    assert bisect.first_parents(repo.folder, base, merge) == [base, main, merge]
    assert bisect.first_parents(repo.folder, side, main) == [base, main]
    with pytest.raises(ConfigError, match="is no ancestor"):
        bisect.first_parents(repo.folder, side, merge)


@pytest.mark.xdist_group("commits")
def test_the_six_commits(small):
    """The head crashes, one changes two sites, one is a merge: the breaking one is found, by gate, tap and number."""
    shas, branch = small.shas, Branch(small.results, small.config, small.shas["base"])
    for options in ((None, None, None), ("index_topk", None, None), ("topk", 0.9, None)):
        found = Bisection(branch, Question.of(*options)).run(shas["crashes"])
        (first,) = found["first"]
        assert (first["commit"], first["layer"], first["stage"]) == (shas["breaks"], 5, "index_topk"), options
        assert [each["answer"] for each in found["asked"]][:3] == ["skip", "bad", "good"]
    assert found["ran"] == 0
    assert first["why"].startswith("overlap 0.")
    problem = Bisection(branch, Question.of("attn_out", 0.9, None)).run(shas["crashes"])["problem"]
    assert "(1 above it cannot), is good: cos is 0.99" in problem


@pytest.mark.parametrize(
    "words", [["--limit", "high"], ["--config", "nowhere.yaml"], ["--tap", "no_tap"], ["--what"]]
)
def test_a_step_with_a_mistake_cannot_judge(monkeypatch, tmp_path, words):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["dsv4", "bisect-step", "--repo", str(tmp_path), *words])
    try:
        status = dsv4_main()
    except SystemExit as stop:
        status = stop.code
    assert status == 125


@pytest.fixture
def clone(small, tmp_path) -> Path:
    """A clone of the repository with the six commits."""
    subprocess.run(
        ["git", "clone", "--quiet", str(small.repository.folder), str(tmp_path / "clone")], check=True
    )
    return tmp_path / "clone"


@pytest.mark.xdist_group("commits")
def test_a_step_exits_as_git_bisect_wants_it(small, clone, capsys):
    options = Namespace(repo=clone, results=small.results, tap=None, limit=None, metric=None)
    for name, status in (("merges", 0), ("breaks", 1), ("crashes", 125)):
        subprocess.run(["git", "-C", str(clone), "checkout", "--quiet", small.shas[name]], check=True)
        assert bisect.step(small.config, options) == status, name
    assert "skip: does not run" in capsys.readouterr().err
    options.repo = ROOT
    assert bisect.step(small.config, options) == 125
    assert "is the audit itself" in capsys.readouterr().err


@pytest.mark.xdist_group("commits")
def test_git_bisect_run_finds_it(small, clone):
    """Git's own search with our step, the way that the module shows."""
    audit = f"PYTHONPATH={ROOT} {sys.executable} -m dsv4 bisect-step --config {small.config.path}"
    step = f'cd {ROOT} && {audit} --results {small.results} --repo "$OLDPWD"'
    git = ["git", "-C", str(clone), "bisect"]
    start = [*git, "start", "--first-parent", small.shas["breaks"], small.shas["two sites"]]
    subprocess.run(start, check=True, capture_output=True)
    done = subprocess.run([*git, "run", "sh", "-c", step], capture_output=True, text=True)
    assert f"{small.shas['breaks']} is the first bad commit" in done.stdout, done.stdout + done.stderr
