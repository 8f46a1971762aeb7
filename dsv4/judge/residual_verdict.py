"""What an FP32 residual's A/B says in words; see :mod:`dsv4.judge.residual`, which measures it. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from dsv4.judge.onsets import Onsets, early
from dsv4.ladder import B5, State, Variant

FILE = "residual.json"
NEEDED_FROM = 256.0  # max abs X from which a BF16 ULP is 2: under it an FP32 residual is not exercised
PART_A = "Part A not applied"


class Verdict(StrEnum):
    """Whether a BF16 residual has a part in worse text."""

    CONTRIBUTOR = "contributor"
    RULED_OUT = "ruled_out"
    NOT_NEEDED = "not_needed"
    NOT_EXERCISED = "not_exercised"
    NOT_RUN = "not_run"


@dataclass(frozen=True)
class Tried:
    """A rung with an FP32 residual that passed and has a text.

    Attributes
    ----------
    variant : its id; ``value`` of the plan's ``residual``.
    kl_nats : mean over the forced positions, or None.
    change : of that against the BF16 parent, as :class:`dsv4.judge.text_change.Change` gives it; None without a pair.
    onsets : of its own text; empty if it was only forced.
    """

    variant: str
    value: str
    kl_nats: float | None = None
    change: Mapping[str, Any] | None = None
    onsets: Onsets = field(default_factory=dict)

    @property
    def closer(self) -> bool:
        """Whether its KL falls by more than chance."""
        return bool(self.change and self.change["moved"] and self.change["kl_change"] < 0)

    def back(self, parent: Onsets) -> list[str]:
        """Prompts that repeat early with the BF16 parent and not with this; none if another begins to.

        A text that any rounding sends another way may lose an early loop by chance. It may as well get one.
        """
        now, before = early(self.onsets), early(parent)
        return [] if now - before else sorted(before & self.onsets.keys() - now)

    def compared(self, parent: Onsets) -> bool:
        """Whether it can have moved anything."""
        return self.change is not None or bool(early(parent) & self.onsets.keys())

    def settles(self, parent: Onsets) -> bool:
        """Whether all that FP32 could move was looked at: every layer, the KL and every early repetition."""
        return self.value == "fp32" and self.change is not None and early(parent) <= self.onsets.keys()


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was measured.

    Attributes
    ----------
    peak : max abs X over all that was measured; None: nothing was. NaN where it is not finite.
    texts : passing rungs whose own texts were looked at.
    asked_by : those that repeat early, :func:`dsv4.judge.onsets.asked_by`.
    parent : the rung below the A/B, and the onsets of its text.
    tried : rungs with an FP32 residual.
    stopped : those that were judged and have no text, and their states.
    """

    peak: float | None = None
    texts: Sequence[str] = ()
    asked_by: Sequence[Mapping[str, Any]] = ()
    parent: tuple[str, Onsets] = ("", {})
    tried: Sequence[Tried] = ()
    stopped: Mapping[str, str] = field(default_factory=dict)


def decide(found: Found) -> tuple[Verdict, str]:
    """The verdict and a sentence that gives its reason.

    Measurements come before needs: an A/B that ran says contributor or ruled out, though nothing asked for it. Any of
    its rungs may show a contributor: with four, three standard errors are passed by chance about once in a hundred.
    Some of the layers, or of the texts, rule nothing out. Not needed takes a text of the rung that the A/B stands on.
    """
    tried = [each for each in found.tried if each.compared(found.parent[1])]
    moved = [each for each in tried if each.closer or each.back(found.parent[1])]
    if found.peak is not None and found.peak < NEEDED_FROM:
        cannot = "an FP32 residual can say nothing here"
        reason = (
            f"max abs X is {found.peak:.4g}, and a BF16 ULP reaches 2 from {NEEDED_FROM:.0f} on: {cannot}"
        )
        parts = [reason, _need(found), _measured(found, tried) if tried else _stopped(found)]
        return Verdict.NOT_EXERCISED, _sentence("not exercised", *parts)
    if moved:
        return Verdict.CONTRIBUTOR, _sentence("contributor", _measured(found, moved), _need(found))
    if any(each.settles(found.parent[1]) for each in tried):
        return Verdict.RULED_OUT, _sentence("ruled out", _measured(found, tried), _need(found))
    if found.parent[0] and not found.asked_by:
        return Verdict.NOT_NEEDED, _sentence("not needed", _need(found))
    ran = f"what ran rules nothing out, {_measured(found, tried)}" if tried else ""
    how = "" if found.stopped else f"snakemake {B5} runs it"
    return Verdict.NOT_RUN, _sentence("not run", ran, _need(found), _stopped(found), how)


def _sentence(head: str, *parts: str) -> str:
    return f"{head}: {'; '.join(part for part in parts if part)} ({PART_A})"


def _need(found: Found) -> str:
    """Whether a text asks for it."""
    if not found.texts:
        return "no passing rung has a text of its own to look at"
    if not found.asked_by:
        return "no passing rung repeats earlier than the reference's own text"
    first = found.asked_by[0]
    more = f", and {len(found.asked_by) - 1} more" if len(found.asked_by) > 1 else ""
    where = (
        f"from token {first['onset']} of {first['prompt']} on, the reference {_at(first['reference_onset'])}"
    )
    return f"{first['variant']} repeats {where}{more}"


def _at(onset: int | None) -> str:
    return "never" if onset is None else f"from {onset}"


def _stopped(found: Found) -> str:
    return ", ".join(f"{name}: {state.replace('_', ' ')}" for name, state in found.stopped.items())


def _measured(found: Found, rungs: Sequence[Tried]) -> str:
    """What each of these moved against the BF16 parent."""
    name, parent = found.parent
    said = [f"{rung.variant} {_change(rung)}{_onsets(rung, parent)}" for rung in rungs]
    held = "" if early(parent) else f"; {name} itself has no early repetition that could move back"
    return f"against {name} {', '.join(said)}{held}"


def _change(rung: Tried) -> str:
    if rung.change is None:
        return "has no KL to compare"
    amount, error = rung.change["kl_change"], rung.change["se"]
    spread = "" if error is None else f" with a standard error of {error:.1g}"
    return f"{'moves' if rung.change['moved'] else 'does not move'} the KL ({amount:+.2g} nats{spread})"


def _onsets(rung: Tried, parent: Onsets) -> str:
    if not early(parent):
        return ""
    if not rung.onsets:
        return " and has no text of its own"
    if prompts := rung.back(parent):
        moves = [
            f"{prompt} {_at(parent[prompt][0])}, now {_at(rung.onsets[prompt][0])}" for prompt in prompts
        ]
        return f" and moves the repetition back ({', '.join(moves)})"
    return " and does not move the repetition back"


def read_residual(results: Path) -> dict[str, Any] | None:
    """``residual.json``, or None where it was not asked for."""
    path = results / FILE
    return json.loads(path.read_text()) if path.exists() else None


def unjudged_residual(results: Path, variant: Variant) -> dict[str, Any]:
    """State and reason of a rung with an FP32 residual that has no verdict of its own."""
    found = read_residual(results) or {"verdict": Verdict.NOT_RUN, "words": ""}
    if found["verdict"] in (Verdict.NOT_NEEDED, Verdict.NOT_EXERCISED):
        words = found["words"].removeprefix("not needed: ")
        return {"status": State.NOT_NEEDED, "reasons": [f"not needed: {words}"]}
    how = f"on request: snakemake {variant.id}"
    return {"status": State.NOT_RUN, "reasons": [f"{how}; {found['words']}" if found["words"] else how]}
