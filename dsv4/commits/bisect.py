"""Find the first commit of a branch whose gate fails, by binary search over its first parents.

``snakemake bisect --config base=main head=my-branch`` asks about the gate as a whole; ``tap=topk`` (a
tap or a stage) about one place, ``tap=attn_out limit=0.9999`` about one number in every layer. Commits
that ran before are not run again; one that does not run is skipped, as ``git bisect`` does with exit
status 125.

Asked is what a commit computes, whatever it stands on: every finding of the gate but those against the
parent. A budget against the parent, a change outside what the plan claims, two sites in one commit are
faults of one step, which the next commit no longer has; ``snakemake commits`` judges these.

Bisection takes it that what is bad stays bad up to the head. In a history that was repaired and broken
again it finds one of several turns; which one, no binary search can say. Each answer is a true one all the
same: the commit below is good and this one is bad.

``python -m dsv4 bisect-step`` is the form for ``git bisect run``: it judges HEAD and exits 0 (good), 1
(bad) or 125 (cannot judge), also for a mistake in its options. It is called from the audit's folder::

    git bisect run sh -c 'cd /the/audit && .venv/bin/python -m dsv4 bisect-step --repo "$OLDPWD"'
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from dsv4.code_inputs import ROOT
from dsv4.commits import history
from dsv4.commits import options as branch_options
from dsv4.commits.branch import Branch, repository
from dsv4.commits.question import Judged, Question
from dsv4.commits.search import Answer, Found, search
from dsv4.config import Config, ConfigError, run_id
from dsv4.console import main_guard
from dsv4.files import write_json
from dsv4.judge.evaluate import place

CANNOT_JUDGE = 125  # git bisect run: neither good nor bad; from 128 on it would stop
STATUS = {Answer.GOOD: 0, Answer.BAD: 1, Answer.SKIP: CANNOT_JUDGE}


class Bisection:
    """One search over a branch.

    Parameters
    ----------
    branch : from the base on.
    question : what is asked of every commit.
    """

    def __init__(self, branch: Branch, question: Question) -> None:
        self.branch, self.question = branch, question
        self.judged: dict[str, Judged] = {}
        self.ran = 0  # commits that had to be run

    def ask(self, sha: str) -> Answer:
        """Judge a commit."""
        path = self.branch.folder(sha) / "run.json"
        before = _written(path)
        self.judged[sha] = self.question.judge(self.branch, sha)
        self.ran += _written(path) != before
        return self.judged[sha].answer

    def run(self, head: str) -> dict[str, Any]:
        """Search up to ``head``; return what ``bisect.json`` holds.

        ``first`` is empty if there is no turn, and ``problem`` says why.

        Raises
        ------
        ConfigError
            No such commits, base is no ancestor of head, or something to run first.
        """
        row = first_parents(self.branch.repo, self.branch.base, head)
        found = search(len(row), lambda at: self.ask(row[at]))
        return {
            "schema": 1,
            "base": row[0],
            "head": row[-1],
            "question": self.question.words,
            "first": [self._entry(row[at]) for at in found.first],
            "problem": "" if found.first else self._problem(row, found),
            "commits": len(row),
            "asked": [self._entry(row[at]) for at in found.asked],
            "ran": self.ran,
        }

    def _entry(self, sha: str) -> dict[str, Any]:
        judged = self.judged[sha]
        return {"commit": sha, "subject": self.branch.commit(sha).subject} | asdict(judged)

    def _problem(self, row: list[str], found: Found) -> str:
        base, top = self.judged.get(row[0]), self.judged[row[found.top]]
        if base and base.answer == Answer.BAD:
            return f"the base {row[0][:10]} is bad already: {base.why}; give an older base"
        if base and base.answer == Answer.SKIP:
            return f"the base {row[0][:10]} cannot be judged: {base.why}; give another base"
        above = len(row) - 1 - found.top
        skipped = f", the last that can be judged ({above} above it cannot)," if above else ""
        return (
            f"the head {row[found.top][:10]}{skipped} is good: {top.why}; there is nothing to find,"
            " unless the history was bad in between: then give that commit as head"
        )


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.is_file() else 0


def first_parents(repo: Path, base: str, head: str) -> list[str]:
    """Hashes from where head forks off base to the head, along first parents.

    Raises
    ------
    ConfigError
        No such commits, nothing between them, or head was not made on the fork but merged it in.
    """
    history.commits(repo, base, head)  # for its refusals
    start, end = history.fork_point(repo, base, head), history.resolve(repo, head)
    above = history.git(repo, "rev-list", "--first-parent", "--reverse", f"{start}..{end}").split()
    if history.git(repo, "rev-parse", f"{above[0]}^").strip() != start:
        raise ConfigError(f"{repo}: {base} is no ancestor of {head} along first parents; name a base that is")
    return [start, *above]


def say(found: dict[str, Any]) -> list[str]:
    """A bisection in sentences."""
    count = f"{len(found['asked'])} of {found['commits']} commits asked, {found['ran']} of them run now"
    if found["problem"]:
        return [f"{found['problem']} ({count})"]
    last = found["first"][-1]
    lines = [f"first bad commit: {last['commit'][:10]} {last['subject']} ({count})"]
    if len(found["first"]) > 1:
        lines = [
            f"one of {len(found['first'])} is the first bad commit, the others cannot be judged ({count}):"
        ]
        lines += [f"  {each['commit'][:10]} {each['subject']}: {each['why']}" for each in found["first"]]
    where = place(last["layer"] if isinstance(last["layer"], int) else -1, last["tap"]) if last["tap"] else ""
    lines.append(f"bad means: {found['question']}")
    if where:
        lines.append(f"at {where}")
    return [*lines, last["why"]]


def step(config: Config, options: argparse.Namespace) -> int:
    """Judge HEAD of a repository for ``git bisect run``; 0, 1 or 125, whatever happens."""
    try:
        repo = options.repo.resolve()
        if Path(history.git(repo, "rev-parse", "--show-toplevel").strip()) == ROOT:
            raise ConfigError(
                f"{repo}: is the audit itself, so that each commit would judge itself; run `snakemake bisect`,"
                " which checks nothing out, or call this from another clone"
            )
        config = replace(config, commits=replace(config.commits, repo=repo))
        results = options.results or Path("results") / run_id(config)
        question = Question.of(options.tap, options.limit, options.metric)
        sha = history.resolve(repo, "HEAD")
        judged = question.judge(Branch.of(results, config, sha), sha)
    except Exception as error:
        print(f"cannot judge: {error}", file=sys.stderr)
        return CANNOT_JUDGE
    print(f"{judged.answer}: {judged.why}", file=sys.stderr)
    return STATUS[judged.answer]


def main(arguments: Sequence[str] | None = None) -> int:
    """Bisect and write ``bisect.json``; 0 if a commit was found, else 1 and why not."""
    parser = branch_options.parser(__doc__)
    for name in ("tap", "metric"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--limit", type=float)
    options = parser.parse_args(arguments)
    config = branch_options.configured(options)
    base, head = branch_options.ends(config, "bisect")
    question = Question.of(options.tap, options.limit, options.metric)
    ground = history.resolve(repository(config), base)
    found = Bisection(Branch(options.results, config, ground), question).run(head)
    write_json(options.results / "bisect.json", found)
    console = Console(stderr=True)
    for line in say(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0 if found["first"] else 1


if __name__ == "__main__":
    main_guard(main)
