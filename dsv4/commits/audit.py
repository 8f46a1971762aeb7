"""Judge commits: each one's own code, the reference and the judge of the audit that was started.

``verdict`` runs what is missing of one commit and returns its verdict; the references and the noise
floor of its plan must be there. It may be called from several processes at once.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console

from dsv4.commits import history
from dsv4.commits import options as branch_options
from dsv4.commits.branch import Branch, TrailerError, default_rung, repository
from dsv4.commits.code import own_sha256
from dsv4.commits.confirm import confirm_by_aba
from dsv4.commits.judge import Against, Measured, judge, listed, of_parent
from dsv4.commits.run import Outcome, ensure
from dsv4.commits.sites import moved
from dsv4.config import Config, ConfigError
from dsv4.console import main_guard
from dsv4.files import write_json
from dsv4.judge.evaluate import Finding, place
from dsv4.judge.gate import SCHEMA
from dsv4.judge.reference_check import read_check
from dsv4.ladder import State
from dsv4.plan import flatten
from dsv4.stored import sidecar

# Of a verdict, as gates.json has it; a commit that does not run has no value for them.
NUMBERS = (
    "label",
    "device",
    "taps",
    "cos",
    "culprit",
    "fidelity",
    "vs_parent",
    "ledger",
    "e2e",
    "cost",
    "confirmed",
)


def verdict(results: Path, config: Config, sha: str) -> dict[str, Any]:
    """Verdict on a commit, made now if it is not there or rests on something else.

    Parameters
    ----------
    results : ``results/<run>``, with references and the floor of the commit's plan.
    config : the audit's configuration; ``commits`` names repository, rung and base.
    sha : hash, or another name of a commit.

    Returns
    -------
    dict
        An entry of ``gates.json`` with ``commit, subject, parents, against, kind, sites, plan, rung`` beside.

    Raises
    ------
    ConfigError
        No such commit, no reference or no floor yet; names what to run.
    """
    sha = history.resolve(repository(config), sha)
    return _cached(Branch.of(results, config, sha), sha)


def _cached(branch: Branch, sha: str) -> dict[str, Any]:
    path = branch.folder(sha) / "verdict.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.parent / ".verdict.lock"):
        rests = {"key": _key(branch, sha), "run": ensure(branch, sha).key}
        if all(rests.values()) and path.is_file():
            known = json.loads(path.read_text())
            if known.items() >= rests.items():
                return known
        found = _verdict(branch, sha) | rests
        write_json(path, found)
        return found


def _key(branch: Branch, sha: str) -> str:
    """What a verdict rests on beside its run: the commit, its floor, the judge, the configuration, the ground.

    "" if the commit's plan is unknown.
    """
    config = branch.config
    more: dict[str, Any] = {
        "judge": own_sha256("dsv4.commits.audit"),
        "tighten": dict(config.tighten),
        "ground": [branch.ground(each) for each in (sha, *branch.commit(sha).parents)],
        "draws": [config.seed, config.floor_draws],
        "ladder": len(config.ladder.default()),
    }
    try:
        floors = [sidecar(branch.floor(sha) / f"{prompt}.h5") for prompt in branch.prompts]
        more["floor"] = [path.read_text() if path.is_file() else "" for path in floors]
        return branch.key(sha, **more)
    except TrailerError:
        return ""


def need_floor(branch: Branch, sha: str) -> None:
    """Refuse to judge a commit whose plan has no noise floor yet.

    Raises
    ------
    ConfigError
        Names the file that is not there.
    """
    for prompt in branch.prompts:
        path = branch.floor(sha) / f"{prompt}.h5"
        if not path.is_file():
            raise ConfigError(f"{path}: no noise floor yet; run `snakemake {path}` first")


def _verdict(branch: Branch, sha: str) -> dict[str, Any]:
    outcome = ensure(branch, sha)
    if outcome.state == "failed":
        return _does_not_run(branch, sha, f"does not run: {outcome.error}")
    need_floor(branch, sha)
    if outcome.state == "equal":
        return _about(branch, sha) | _proved(branch, sha, outcome)
    below = [] if branch.ground(sha) else _below(branch, sha)
    against = [_against(branch, sha, each) for each in below]
    first = against[0] if against else None
    measured = Measured(branch, sha, first and first.sha, first and first.of)
    if measured.notes.error:
        return _does_not_run(branch, sha, f"its dumps cannot be compared: {measured.notes.error}")
    _keep_findings(branch, sha, measured)
    confirm = confirm_by_aba(branch, sha, first.of) if first else None
    found = _about(branch, sha) | judge(branch, sha, measured, against, confirm)
    found |= {"against": first and first.sha, "dump_of": sha}
    if not against and not branch.ground(sha):
        found["reasons"] = [*found["reasons"], "no commit below it runs: what it moves was not measured"]
        found["status"] = found["status"] if found["status"] == State.FAIL else State.CANNOT_MEASURE
    if first and first.sha != branch.commit(sha).parents[0]:
        found["reasons"] = [
            *found["reasons"],
            f"compared with {first.sha[:10]}: what is between does not run",
        ]
    return found


def _about(branch: Branch, sha: str) -> dict[str, Any]:
    """What a verdict says about the commit itself."""
    commit, rung = branch.commit(sha), branch.rung(sha)
    return {
        "id": commit.short,
        "commit": sha,
        "subject": commit.subject,
        "parents": list(commit.parents),
        "against": None,
        "plan": flatten(rung.plan),
        "rung": rung.id,
        "sites": [],
        "findings": [],
    }


def _does_not_run(branch: Branch, sha: str, reason: str) -> dict[str, Any]:
    commit = branch.commit(sha)
    try:
        about = _about(branch, sha)
    except TrailerError:
        about = {
            "id": commit.short,
            "commit": sha,
            "subject": commit.subject,
            "parents": list(commit.parents),
        }
        about |= {"against": None, "plan": {}, "rung": commit.rung, "sites": [], "findings": []}
    return (
        dict.fromkeys(NUMBERS)
        | about
        | {
            "parent": None,
            "change": {},
            "kind": "does_not_run",
            "status": State.CANNOT_MEASURE,
            "reasons": [reason],
            "dump_of": None,
        }
    )


def _below(branch: Branch, sha: str) -> list[str]:
    """The commits to compare with: of each parent itself or its nearest first parent that runs."""
    found = []
    for parent in branch.commit(sha).parents:
        each: str | None = parent
        while each and ensure(branch, each).state == "failed":
            above = branch.commit(each).parents
            each = above[0] if above and not branch.ground(each) else None
        if each:
            found.append(each)
    return list(dict.fromkeys(found))


def _against(branch: Branch, sha: str, below: str) -> Against:
    of = ensure(branch, below).of
    names = branch.commit(sha).short, branch.commit(of).short
    places = moved(branch.folder(sha), branch.folder(of), names, branch.prompts)
    return Against(sha=below, of=of, moved=frozenset(places), findings=keyed(own_findings(branch, of)[0]))


def own_findings(branch: Branch, sha: str) -> tuple[list[Finding], str]:
    """What is wrong with a commit that ran, whatever it stands on, in order; and why that cannot be told, or "".

    Kept beside its dumps.
    """
    path, key = branch.folder(sha) / "findings.json", _key(branch, sha)
    if not path.is_file() or json.loads(path.read_text())["key"] != key:
        _keep_findings(branch, sha, Measured(branch, sha))
    known = json.loads(path.read_text())
    return [Finding(**each, size=math.inf) for each in known["findings"]], known["error"]


def keyed(findings: Sequence[Finding]) -> dict[tuple[str, str, int, str], Finding]:
    """Findings by what and where they are."""
    return {(f.kind, f.mode, f.layer, f.tap): f for f in findings}


def _keep_findings(branch: Branch, sha: str, measured: Measured) -> None:
    own = [_storable(finding) for finding in measured.findings if not of_parent(finding)]
    content = {"key": _key(branch, sha), "error": measured.notes.error, "findings": own}
    write_json(branch.folder(sha) / "findings.json", content)


def _storable(finding: Finding) -> dict[str, Any]:
    return {name: value for name, value in asdict(finding).items() if name != "size"}


def _proved(branch: Branch, sha: str, outcome: Outcome) -> dict[str, Any]:
    """Verdict of a commit whose running code is a parent's: nothing was run, its numbers are the other's."""
    other = _cached(branch, outcome.of)
    taps = (other["taps"] or [0])[0]
    merge = len(branch.commit(sha).parents) > 1
    proof = f"proved: the {outcome.files} files that can run or be read are equal to {outcome.of[:10]}'s"
    found = other | _about(branch, sha) | {"kind": "merge" if merge else "no_numerics", "why": ""}
    found |= {"parent": other["id"], "change": {}, "against": outcome.of, "dump_of": outcome.of}
    found["vs_parent"] = {"taps_changed": 0, "of": taps, "bit_equal": True, "rel_l2_max": None}
    found["vs_parent"] |= {"codes_changed": {}, "worst": None}
    if wrong := own_findings(branch, outcome.of)[0]:  # its step, too far or not, is not this commit's
        kind = "merge" if merge else "inherited"
        stands = f"stands on {outcome.of[:10]}, which fails at {place(wrong[0].layer, wrong[0].tap)}"
        found |= {"status": State.BLOCKED, "reasons": [f"{stands}; {proof}"], "kind": kind}
        return found | {"findings": listed(wrong)}
    if other["status"] == State.CANNOT_MEASURE:
        return found | {"reasons": [*other["reasons"], proof]}
    return found | {"status": State.PASS, "reasons": [proof], "culprit": None, "confirmed": None}


def collect(results: Path, config: Config, base: str, head: str) -> dict[str, Any]:
    """Verdicts of a branch as ``commits.json`` holds them: its fork from the base, then what is above, oldest first."""
    repo = repository(config)
    shas = [history.fork_point(repo, base, head), *(each.sha for each in history.commits(repo, base, head))]
    return {
        "schema": SCHEMA,
        "base": shas[0],
        "head": shas[-1],
        "repo": str(repo),
        "rung": default_rung(config),
        "reference": read_check(results, config.reference is not None),
        "commits": [verdict(results, config, sha) for sha in shas],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge ``--commit``, or all and write ``commits.json``; exits 0 whatever it finds."""
    parser = branch_options.parser(__doc__)
    parser.add_argument("--commit", help="judge this one alone")
    options = parser.parse_args(arguments)
    config = branch_options.configured(options)
    console = Console(stderr=True)
    if options.commit:
        _say(console, verdict(options.results, config, options.commit))
        return 0
    found = collect(options.results, config, *branch_options.ends(config, "commits"))
    write_json(options.results / "commits.json", found)
    for each in found["commits"]:
        _say(console, each)
    return 0


def _say(console: Console, found: Mapping[str, Any]) -> None:
    state, kind = (str(found[name]).replace("_", " ") for name in ("status", "kind"))
    reason = found["reasons"][0].removeprefix(f"{kind}: ")
    text = f"{found['id']} {found['subject']}: {state}, {kind}: {reason}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main_guard(main)
