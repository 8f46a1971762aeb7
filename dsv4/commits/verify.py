"""Run the commits of a branch again and refuse those whose trailers are missing or do not come out again.

``snakemake verify_commits --config base=main head=my-branch`` runs base and commits in a fresh folder: of
earlier runs it takes the references and the noise floors and nothing else. What must agree:

* Emulation on a CPU is deterministic. Where the message names the device and the versions that run now,
  every printed digit of every cosine must come again, and the hash of all that was measured.
* Otherwise, and for kernels on a GPU, cosines may differ by what the noise floor's draws explain; see
  :mod:`dsv4.commits.band`. Such a commit is *within noise* and never called reproduced, for device, time and
  hash, and which row was the worst, are not checked: the message may say of them what it likes, in their form.
* Variant, parent, verdict, fidelity, culprit, taps and reference (checkpoint, prompts, settings) must be
  the same in any case.
* A time is not measured again. It is refused where the numbers beside it are those of no GPU, or of another.
* What is not in the form of :data:`dsv4.commits.evidence.FORMATS`, from the first word to the last, is refused.

A commit that moves no number needs no trailers: its code is its parent's, or all its taps are bit for bit.
What it carries all the same is compared.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from dsv4.commits import audit, history
from dsv4.commits import options as branch_options
from dsv4.commits.band import Band, band
from dsv4.commits.branch import Branch, repository
from dsv4.commits.evidence import FORMATS, EvidenceError, of_verdict
from dsv4.config import Config, ConfigError
from dsv4.console import main_guard
from dsv4.files import write_json
from dsv4.ladder import State
from dsv4.plan import flatten

SHARED = ("reference", "plain", "floor", "checkpoint.json")
FRESH = ".verify"
COSINES = ("Audit-Cosine", "Audit-Cosine-Min", "Audit-Cosine-Mean")
OF_ONE_MACHINE = ("Audit-Device", "Audit-Time", "Audit-Report")  # not checked where that is another one
STATES = ("reproduced", "within noise", "needs none", "refused")
EVERY_DIGIT = "every digit must come again on the same device and versions"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A trailer that is not there or does not come out again.

    Attributes
    ----------
    key : of the trailer.
    claimed, found : what the message says and what the run gave; None: nothing.
    why : more, or "".
    """

    key: str
    claimed: str | None
    found: str | None
    why: str = ""

    @property
    def text(self) -> str:
        """One sentence."""
        more = f" ({self.why})" if self.why else ""
        if self.claimed is None:
            return f"{self.key} is missing, found {self.found}{more}"
        return f"{self.key}: claimed {self.claimed}, found {self.found or 'nothing of the kind'}{more}"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What became of a commit's trailers.

    Attributes
    ----------
    commit, subject, kind : of the commit.
    state : one of :data:`STATES`.
    problems : why it is refused.
    note : how it was compared.
    """

    commit: str
    subject: str
    kind: str
    state: str
    problems: list[Problem] = field(default_factory=list)
    note: str = ""

    @property
    def lines(self) -> list[str]:
        """The commit in sentences."""
        head = f"{self.commit[:10]} {self.subject}: {self.state}"
        if not self.problems:
            return [f"{head}: {self.note}"]
        return [head, *(f"  {problem.text}" for problem in self.problems)]


def claims(repo: Path, sha: str) -> list[tuple[str, str]]:
    """The audit's trailers of a commit, as git parses them."""
    return [(key, value) for key, value in history.trailers(repo, sha) if key.startswith("Audit-")]


def needs_none(verdict: Mapping[str, Any]) -> bool:
    """Whether a commit moves no number of its parent's."""
    merged = verdict["kind"] == "merge" and not verdict["sites"] and verdict["status"] == State.PASS
    return verdict["kind"] == "no_numerics" or merged


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A message's trailers beside those of the second run.

    Attributes
    ----------
    problems : why the message is refused.
    state : "reproduced", "within noise" or "refused".
    note : how they were compared, and what was not.
    """

    problems: list[Problem]
    state: str
    note: str


def compare(
    said: Sequence[tuple[str, str]],
    found: Mapping[str, str],
    noise: Callable[[], Band],
    *,
    optional: bool = False,
) -> Compared:
    """Compare what a message says with what the second run gave.

    Parameters
    ----------
    said : see :func:`claims`.
    found : trailers of the second run.
    noise : gives the band; called where the two were not computed alike.
    optional : what is missing is no problem.
    """
    claimed = dict(said)
    problems = list(_twice(said, found))
    here = found["Audit-Device"]
    device = claimed.get("Audit-Device", here)
    alike = device == here and here.startswith("emulated")
    for key in dict.fromkeys([*found, *claimed]):
        own, again = claimed.get(key), found.get(key)
        if own is None:
            problems += [] if optional else [Problem(key=key, claimed=None, found=again)]
        elif own == again:
            continue
        elif key in COSINES and alike:
            problems += _cosines(key, own, found, None)
        elif key in FORMATS and not alike:
            problems += _elsewhere(key, own, found, device, noise)
        else:
            problems.append(Problem(key=key, claimed=own, found=again))
    if alike:
        note, state = "every trailer comes out again, digit for digit", "reproduced"
    else:
        left = ", ".join(key for key in OF_ONE_MACHINE if key != "Audit-Device" or device != here)
        note = f"cosines within the noise floor, for they were computed on {device}; not checked here: {left}"
        state = "within noise"
    return Compared(problems=problems, state="refused" if problems else state, note=note)


def _twice(said: Sequence[tuple[str, str]], found: Mapping[str, str]) -> Iterator[Problem]:
    """Keys that stand twice."""
    for key in dict(said):
        values = [value for name, value in said if name == key]
        if len(values) > 1:
            claimed = " and ".join(values)
            yield Problem(key=key, claimed=claimed, found=found.get(key), why="it stands twice")


def _elsewhere(
    key: str, claimed: str, found: Mapping[str, str], device: str, noise: Callable[[], Band]
) -> Iterator[Problem]:
    """Check what another machine says: its form, its cosines, and a time's device."""
    form, again = FORMATS[key].fullmatch(claimed), found[key]
    if not form:
        yield Problem(key=key, claimed=claimed, found=again, why="it is not in the form of such a value")
    elif key in COSINES:
        yield from _cosines(key, claimed, found, noise())
    elif key == "Audit-Time" and form["gpu"]:  # else it says why there is none
        on = FORMATS["Audit-Device"].fullmatch(device)
        if not on or not (on["number"] or "").startswith("sm_"):
            yield Problem(key=key, claimed=claimed, found=again, why="only what runs on a GPU is timed")
        elif on["gpu"] != form["gpu"]:
            yield Problem(key=key, claimed=claimed, found=again, why=f"Audit-Device names {on['gpu']}")


def _cosines(key: str, claimed: str, found: Mapping[str, str], noise: Band | None) -> Iterator[Problem]:
    """Compare the cosines of one trailer: as text without a band, else as numbers."""
    again = found[key]
    if noise is None and key != "Audit-Cosine":
        if claimed != again:
            yield Problem(key=key, claimed=claimed, found=again, why=EVERY_DIGIT)
        return
    own, other = claimed.split(), again.split()
    if key == "Audit-Cosine":
        if own[:1] != other[:1] or len(own) != len(other):
            yield Problem(key=key, claimed=claimed, found=again, why="another tap, or other layers")
            return
        own, other = own[1:], other[1:]
    else:
        own, other = own[:1], other[:1]
    lowest = min(_number(each) for each in found["Audit-Cosine"].split()[1:])
    for layer, (one, two) in enumerate(zip(own, other, strict=False)):
        why = _refusal(key, one, two, noise, lowest)
        if why:
            name = f"{key}, layer {layer}" if key == "Audit-Cosine" else key
            yield Problem(key=name, claimed=one, found=two, why=why)
    if not own:
        yield Problem(key=key, claimed=claimed, found=again)


def _refusal(key: str, claimed: str, found: str, noise: Band | None, lowest: float) -> str:
    if claimed == found:
        return ""
    if noise is None:
        return EVERY_DIGIT
    one, two = _number(claimed), _number(found)
    if not (abs(one) <= 1.0 and abs(two) <= 1.0):  # not finite, or no number
        return "no number that can be compared"
    if key == "Audit-Cosine-Mean":
        return noise.refuses_mean(one, two, lowest)
    return noise.refuses(one, two, row=key == "Audit-Cosine-Min")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


class Verification:
    """Commits of a branch, judged anew in a folder of their own.

    Parameters
    ----------
    results : where references and noise floors lie.
    fresh : the folder for everything else.
    config : ``commits`` names repository, base and head.
    count : how many commits are compared.
    """

    def __init__(self, results: Path, fresh: Path, config: Config, count: int) -> None:
        self.config, self.fresh, self.count = config, fresh, count
        for name in SHARED:
            (fresh / name).symlink_to((results / name).resolve())

    def check(self, sha: str) -> Checked:
        """Run a commit and compare.

        Raises
        ------
        ConfigError
            No reference or noise floor yet.
        """
        verdict = audit.verdict(self.fresh, self.config, sha)
        said, optional = claims(repository(self.config), sha), needs_none(verdict)
        about = {"commit": sha, "subject": verdict["subject"], "kind": verdict["kind"]}
        if not said and optional:
            return Checked(**about, state="needs none", note=f"it moves no number: {verdict['reasons'][0]}")
        try:
            found = of_verdict(self.fresh, self.config, verdict)
        except EvidenceError as error:
            claimed = dict(said).get("Audit-Verdict")
            problem = Problem(key="Audit-Verdict", claimed=claimed, found=verdict["status"], why=str(error))
            return Checked(**about, state="refused", problems=[problem])
        compared = compare(
            said, found, lambda: self._band(sha, len(verdict["cos"]["per_layer"])), optional=optional
        )
        return Checked(**about, **vars(compared))

    def _band(self, sha: str, layers: int) -> Band:
        branch = Branch.of(self.fresh, self.config, sha)
        floors = [branch.floor(sha) / f"{prompt}.h5" for prompt in branch.prompts]
        return band(floors, flatten(branch.rung(sha).plan), self.count * (layers + 2))


def verify(results: Path, config: Config, say: Callable[[Checked], None] = lambda _: None) -> list[Checked]:
    """Check what is in head and not in base, oldest first.

    Raises
    ------
    ConfigError
        No base or head, no such commits, another verification runs, or references or floors are missing.
    """
    base, head = branch_options.ends(config, "verify_commits")
    shas = [commit.sha for commit in history.commits(repository(config), base, head)]
    fresh = results / FRESH
    try:
        with FileLock(results / f"{FRESH}.lock", timeout=0):
            shutil.rmtree(fresh, ignore_errors=True)  # of a verification that was killed
            fresh.mkdir(parents=True)
            try:
                verification, checked = Verification(results, fresh, config, len(shas)), []
                for sha in shas:
                    checked.append(verification.check(sha))
                    say(checked[-1])
                return checked
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
    except Timeout as error:
        raise ConfigError(f"{fresh}: another verification runs there; wait for it") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify a branch and write ``verified.json``; 1 if a commit is refused."""
    options = branch_options.parser(__doc__).parse_args(arguments)
    config = branch_options.configured(options)
    console = Console(stderr=True)

    def say(checked: Checked) -> None:
        console.print("\n".join(checked.lines), markup=False, highlight=False, soft_wrap=True)

    checked = verify(options.results, config, say)
    write_json(
        options.results / "verified.json", {"schema": 1, "commits": [asdict(each) for each in checked]}
    )
    console.print(counted(checked), highlight=False)
    return 1 if any(each.state == "refused" for each in checked) else 0


def counted(checked: Sequence[Checked]) -> str:
    """How many commits there are of each state, in a line."""
    states = Counter(each.state for each in checked)
    return f"{len(checked)} commits: " + ", ".join(f"{states[state]} {state}" for state in STATES)


if __name__ == "__main__":
    main_guard(main)
