"""A/B/A on commits: after a failure, run the parent's code again and then the commit's, and look at the culprit."""

from pathlib import Path
from typing import Any

import numpy as np

from dsv4.commits.adopt import RunError
from dsv4.commits.branch import Branch
from dsv4.commits.run import run_tree
from dsv4.commits.tree import checked_out
from dsv4.dump import DumpError, DumpReader
from dsv4.judge.evaluate import Finding
from dsv4.judge.gate import Confirm
from dsv4.model.transformer import Layer
from dsv4.run.aba import distance
from dsv4.stored import same_bytes
from dsv4.taps import BY_NAME, MODEL, PHASES

SKIPPED = "not confirmed by repeat, revert, re-apply"


def confirm_by_aba(branch: Branch, sha: str, against: str) -> Confirm:
    """Revert a commit to the one whose dumps it is compared with and re-apply it, on the prompt that failed."""

    def confirm(finding: Finding) -> tuple[dict[str, Any] | None, str]:
        if not finding.prompt or finding.mode != "isolated":
            return None, f"{SKIPPED}: it shows in no single op on the reference's inputs"
        layer: Layer = finding.layer if finding.layer >= 0 else MODEL
        at = finding.prompt, layer, finding.tap
        try:
            return _compared(branch, sha, against, at), ""
        except (RunError, DumpError) as error:
            return None, f"{SKIPPED}: {error}"

    return confirm


def _compared(branch: Branch, sha: str, against: str, at: tuple[str, Layer, str]) -> dict[str, Any]:
    """Both codes once more; the dumps that failed are the first A, so the commit's new run is what re-applies."""
    prompt, layer, tap = at
    other, own = (_again(branch, each, at) for each in (against, sha))
    before, stored = (tap_of(branch.folder(each) / f"{prompt}.h5", layer, tap) for each in (against, sha))
    truth = _reference(branch, prompt, layer, tap)
    revert, repeat, changed = same_bytes(other, before), same_bytes(own, stored), not same_bytes(own, other)
    return {
        "repeat": repeat,
        "revert": revert,
        "reapply": repeat,
        "changed": changed,
        "distance": None if truth is None else [distance(values, truth) for values in (own, other)],
        "confirmed": repeat and revert and changed,
    }


def _again(branch: Branch, sha: str, at: tuple[str, Layer, str]) -> np.ndarray:
    prompt, layer, tap = at
    with checked_out(branch.repo, sha, branch.results) as room:
        return tap_of(run_tree(branch.job(sha), room, [prompt]) / f"{prompt}.h5", layer, tap)


def tap_of(path: Path, layer: Layer, tap: str, mode: str = "isolated") -> np.ndarray:
    """One tap of a dump, prefill and decode together: (rows or entries, ...).

    Raises
    ------
    DumpError
        No such dump, or it does not hold the tap.
    """
    with DumpReader(path) as dump:
        phases = [phase for phase in PHASES if dump.has(mode, phase, layer, tap)]
        if not phases:
            raise DumpError(f"{path.name}: no {mode} {layer}/{tap}")
        return np.concatenate([dump.get(mode, phase, layer, tap) for phase in phases])


def _reference(branch: Branch, prompt: str, layer: Layer, tap: str) -> np.ndarray | None:
    name = BY_NAME[tap].reference
    return tap_of(branch.results / "reference" / f"{prompt}.h5", layer, name, "compounded") if name else None
