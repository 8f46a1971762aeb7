"""The verdict on a commit that ran: the gate's, against the commit that it stands on, and how many sites it moved."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsv4.commits import sites as of_sites
from dsv4.commits.branch import Branch
from dsv4.commits.run import fingerprint
from dsv4.commits.sites import Place
from dsv4.judge.claims_by_field import claimed
from dsv4.judge.evaluate import Finding, place
from dsv4.judge.gate import Confirm, found_in, judged
from dsv4.judge.measure import Folders, Measurer, measured
from dsv4.ladder import Ladder, State, Variant
from dsv4.plan import difference
from dsv4.taps import BY_NAME, MODEL, span


@dataclass(frozen=True)
class Against:
    """A commit that another is compared with.

    Attributes
    ----------
    sha : its hash.
    of : hash of the commit that its dumps are of: its own, or one whose code it has.
    moved : taps of the other commit that differ from its.
    findings : what is wrong with it on its own, by (kind, mode, layer, tap).
    """

    sha: str
    of: str
    moved: frozenset[Place]
    findings: Mapping[tuple[str, str, int, str], Finding]


def variant_of(branch: Branch, sha: str, against: str | None) -> Variant:
    """A commit as a variant of the ladder, on the commit that it is compared with."""
    plan = branch.rung(sha).plan
    change = difference(branch.rung(against).plan, plan) if against else {}
    return Variant(
        id=branch.commit(sha).short,
        parent=branch.commit(against).short if against else None,
        plan=plan,
        change=change,
        spine=True,
        needs=(),
        on_request=False,
        why=branch.commit(sha).subject,
    )


class Measured:
    """A commit's measurements, and everything that is wrong with it.

    Parameters
    ----------
    of : hash of the commit whose dumps are read.
    against, against_of : the commit that it is compared with and the one whose dumps that has, or None.
    """

    def __init__(
        self, branch: Branch, of: str, against: str | None = None, against_of: str | None = None
    ) -> None:
        self.variant = variant_of(branch, of, against)
        if against and against_of:
            parent = branch.commit(against_of).short  # the name in its dumps
            self.variant = replace(self.variant, parent=parent)
        below = [variant_of(branch, against_of, None)] if against_of else []
        self.config = replace(branch.config, ladder=Ladder.of([*below, self.variant]))
        folders = Folders(
            own=branch.folder(of),
            floor=branch.floor(of),
            parent=branch.folder(against_of) if against_of else None,
        )
        variants = len(branch.config.ladder.default())
        frame, self.notes = measured(
            Measurer(branch.results, self.variant, folders, variants), branch.prompts
        )
        self.frame = frame[frame["step"] < 0]
        error = self.notes.error
        self.findings = [] if error else found_in(self.config, self.variant, self.frame, self.notes)

    def keyed(self) -> dict[tuple[str, str, int, str], Finding]:
        """Findings by what and where they are."""
        return {(f.kind, f.mode, f.layer, f.tap): f for f in self.findings}


def judge(
    branch: Branch,
    sha: str,
    measured: Measured,
    against: list[Against],
    confirm: Confirm | None,
) -> dict[str, Any]:
    """Verdict on a commit that ran.

    Parameters
    ----------
    measured : its measurements against the first of ``against``.
    against : the commits that it is compared with: one, or each parent of a merge; none for the base.
    confirm : repeats a failure on the commit's and its parent's code.
    """
    merge = len(branch.commit(sha).parents) > 1
    change = measured.variant.change
    wrong = [finding for finding in measured.findings if _counts(finding, merge, against, bool(change))]
    inherited = {id(f): found for f in wrong if (found := _inherited(f, against))}
    own = [finding for finding in wrong if id(finding) not in inherited]
    verdict = judged(measured.config, measured.variant, measured.frame, measured.notes, own or wrong, None)
    found_sites: list[dict[str, Any]] = []
    two = unseen = ""
    if against:
        found_sites = of_sites.sites(against[0].moved)
        two = "" if merge else two_sites(branch, sha, against[0], change)
        unseen = "" if merge or two else unseen_site(branch, sha, against[0], change)
    kind = _kind(merge, against, bool(change), two)
    reasons = [] if wrong and not own else list(verdict["reasons"])
    status = verdict["status"]
    if two:
        reasons = [two, *(reasons if status != State.PASS else [])]
        status = State.FAIL
        placed = verdict["culprit"] and verdict["culprit"]["mode"] == "isolated"
        verdict["culprit"] = verdict["culprit"] if placed else _culprit(found_sites)
    elif wrong and not own:
        kind = kind if merge else "inherited"
        status, reasons = State.BLOCKED, [inherited[id(wrong[0])]]
    if own and confirm:
        verdict["confirmed"], note = confirm(own[0])
        reasons += [note] if note else []
    reasons += [unseen] if unseen else []
    verdict |= {"status": status, "reasons": reasons, "kind": kind, "sites": found_sites}
    verdict["blast_radius"] = None if not change else verdict["blast_radius"]
    verdict["findings"] = listed(wrong)
    return verdict


def listed(findings: Iterable[Finding]) -> list[list[Any]]:
    """Findings as a verdict stores them: what and where."""
    return [[f.kind, f.mode, f.layer if f.layer >= 0 else MODEL, f.tap] for f in findings]


def of_parent(finding: Finding) -> bool:
    """Whether a finding is about what moved against the parent, not about the commit on its own."""
    return finding.kind == "blast" or (finding.kind == "limit" and finding.limit.split(".")[-1] == "parent")


def _counts(finding: Finding, merge: bool, against: list[Against], changed: bool) -> bool:
    """Whether a finding is about the commit and not about what a commit may do.

    Without a changed field no stage is claimed: what it may move is the rule of sites. A budget against
    the parent does not hold for a merge, which takes over what others paid, nor for what repairs a failure.
    """
    if finding.kind == "blast":
        return changed and not merge
    return not of_parent(finding) or not (merge or (against and against[0].findings))


def _inherited(finding: Finding, against: list[Against]) -> str:
    """Say which of the commits below has this finding already, with the same bits; "" for none."""
    layer = finding.layer if finding.layer >= 0 else MODEL
    for below in against:
        same = (finding.mode, layer, finding.tap) not in below.moved
        if same and (finding.kind, finding.mode, finding.layer, finding.tap) in below.findings:
            where = place(finding.layer, finding.tap)
            return f"stands on {below.sha[:10]}, which fails at {where}, with the same bits"
    return ""


def _kind(merge: bool, against: list[Against], changed: bool, two: str) -> str:
    if not against:
        return "base"
    if merge:
        return "merge"
    if two:
        return "two_sites"
    return "one_site" if against[0].moved or changed else "no_numerics"


def two_sites(branch: Branch, sha: str, against: Against, change: Mapping[str, Any]) -> str:
    """Say which sites a commit moved, if it moved more than one; "" if it did not."""
    if len(change) > 1:
        fields = ", ".join(f"{name}: {old} -> {new}" for name, (old, new) in change.items())
        return f"two sites by declaration: its plan changes {fields}; split it into one commit a field"
    allowed = claimed(change)
    found = of_sites.sites(against.moved, allowed)
    if len(found) + bool(change) < 2:
        return ""
    units = _units(branch, sha, against)
    if len(units) < 2:
        return ""
    stages = "; ".join(f"{site['stage']} ({_where(site['layers'])})" for site in found)
    also = f"; and what {', '.join(change)} claims" if change else ""
    return (
        f"two sites: {stages}{also} moved against {against.sha[:10]}, and no single op explains it:"
        f" it touches {'; '.join(units)}; split it into one commit a site"
    )


def unseen_site(branch: Branch, sha: str, against: Against, change: Mapping[str, Any]) -> str:
    """Say where a second site would not show: in a stage that reads what the first one stores; "" if nowhere."""
    reading = of_sites.readers(against.moved, claimed(change))
    units = _units(branch, sha, against) if reading else []
    if len(units) < 2:
        return ""
    return (
        f"{', '.join(reading)} moved too, which reads what moved before it: whether by itself as well is not seen, and"
        f" the commit touches {'; '.join(units)}; if these are two changes, split it"
    )


def _units(branch: Branch, sha: str, against: Against) -> list[str]:
    """Ops and functions that a commit touched against another, each with who changed to call it."""
    old, new = (fingerprint(branch, each) or {} for each in (against.of, sha))
    files = [file for file in old.keys() | new.keys() if old.get(file) != new.get(file)]
    groups = of_sites.touched(branch.repo, against.of, sha, sorted(files))
    return [" with ".join(group) for group in groups]


def _where(layers: list[Any]) -> str:
    """The layers of a site in words, which may be none."""
    numbers = [layer for layer in layers if layer != MODEL]
    if not numbers:
        return "after the last layer"
    return f"layer{'s' if len(numbers) > 1 else ''} {span(numbers)}"


def _culprit(found: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first place that moved, where the number of sites is all that is wrong."""
    if not found:
        return None
    first, blank = found[0], dict.fromkeys(("prompt", "step", "row"))
    tap = first["taps"][0]
    where = {"layer": first["layers"][0], "stage": BY_NAME[tap].stage, "tap": tap}
    return where | {"kind": "two_sites", "mode": "isolated"} | blank
