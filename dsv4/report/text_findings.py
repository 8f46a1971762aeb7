"""What a reader must know of the texts first: which rung changed one, where, and through which op."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsv4.ladder import State
from dsv4.report.digits import kl_change
from dsv4.report.load import Audit
from dsv4.report.text_cells import ended, first_difference, onset, same_end
from dsv4.report.written import (
    free_texts,
    judgement,
    longest_text,
    prompts_of,
    text_below,
    writers,
)

Finding = tuple[str, str, str]


@dataclass(frozen=True)
class Change:
    """A rung that writes another text than its parent: in which prompt, from which step on.

    ``back``: it writes the reference's text again, which its parent does not.
    """

    variant: str
    prompt: str
    step: int
    near_tie: bool
    back: bool

    def __str__(self) -> str:
        """Prompt, and what happens from where on."""
        if self.back:
            return f"{self.prompt} (the reference's again)"
        return f"{self.prompt} from step {self.step}{' (near tie)' if self.near_tie else ''}"


def findings(audit: Audit) -> list[Finding]:
    """What a reader must know first: (tone, topic, sentence) each on text, repetition, ends and KL."""
    changes, wrote = changed(audit), [rung.id for rung in writers(audit)]
    lines = [_on_text(changes, wrote)] if wrote else []
    lines += [*_on_repetition(audit), *_on_ends(audit)] if wrote else []
    return [*_on_broken(audit), *lines, _on_kl(audit)]


def changed(audit: Audit) -> list[Change]:
    """Texts that a rung changed, against its parent's: those that it inherits are its parent's doing."""
    found = []
    for rung in writers(audit):
        for prompt, entry in free_texts(audit, rung.id):
            before = text_below(audit, rung, prompt) or entry["reference"]
            step, leaves = first_difference(entry["own"], before), entry["divergence"]
            if step is not None:
                near = bool(leaves and leaves["near_tie"] and leaves["step"] == step)
                back = first_difference(entry["own"], entry["reference"]) is None
                found.append(Change(rung.id, prompt, step, near, back))
    return found


def chosen(audit: Audit) -> tuple[str, str]:
    """The text that the page opens with: the first that is changed and no near tie, else any changed, else the last."""
    changes = sorted(changed(audit), key=lambda change: (change.back, change.near_tie))
    if changes:
        return changes[0].variant, changes[0].prompt
    names = [rung.id for rung in (writers(audit) or audit.ladder) if rung.id in audit.texts.documents]
    prompts = prompts_of(audit.texts.documents)
    longest = max(prompts, key=lambda name: longest_text(audit, name), default="")
    return (names[-1] if names else ""), longest


def missing(audit: Audit) -> list[str]:
    """Rungs that passed and have no text that was judged, and why."""
    why: dict[str, list[str]] = {}
    for rung in audit.ladder:
        if audit.state(rung) is State.PASS and rung.id not in audit.texts.documents:
            note = (
                (audit.verdicts[rung.id].get("e2e") or {}).get("text_note")
                if rung.id in audit.verdicts
                else None
            )
            why.setdefault(note or "", []).append(rung.id)
    if not audit.texts.documents:  # all that can be said without a reason is said once
        why.pop("", None)
    return [
        f"Passed, and has no text: {', '.join(names)}"
        + (f": {note}" if note else f". Run snakemake {names[-1]}.")
        for note, names in why.items()
    ]


def _on_broken(audit: Audit) -> Iterator[Finding]:
    """Faults of the code, or texts that no rounding explains: the judge's words."""
    for rung in audit.ladder:
        judged = judgement(audit, rung.id)
        if rung.id in audit.texts.documents and judged.get("broken"):
            yield "fail", "Broken", f"{rung.id}: {judged['reasons'][0]}."


def _on_text(changes: list[Change], wrote: list[str]) -> Finding:
    if not changes:
        count = f"all {len(wrote)} rungs that wrote one write" if len(wrote) > 1 else f"{wrote[0]} writes"
        return "pass", "Text", f"no change: {count} what the reference writes, to the last token."
    by_rung: dict[str, list[str]] = {}
    for change in changes:
        by_rung.setdefault(change.variant, []).append(str(change))
    said = "; ".join(f"{name} in {', '.join(where)}" for name, where in by_rung.items())
    mild = all(change.near_tie or change.back for change in changes)
    return ("not_needed" if mild else "blocked"), "Text", f"changed by {said}."


def _on_repetition(audit: Audit) -> Iterator[Finding]:
    early: dict[tuple[str, int, int | None], list[str]] = {}
    for rung in writers(audit):
        for prompt, entry in free_texts(audit, rung.id):
            own, reference = onset(entry["own"]), onset(entry["reference"])
            if own is not None and (reference is None or own < reference):
                early.setdefault((prompt, own, reference), []).append(rung.id)
    for (prompt, own, reference), names in early.items():
        other = f"from {reference}" if reference is not None else "never"
        said = f"sets in early: {_span(names)} in {prompt} from step {own}, the reference {other}."
        yield "fail", "Repetition", said
    if not early:
        yield "pass", "Repetition", "nowhere earlier than in the reference's own text."


def _on_ends(audit: Audit) -> Iterator[Finding]:
    wrong: dict[tuple[str, str], list[str]] = {}
    for rung in writers(audit):
        for prompt, entry in free_texts(audit, rung.id):
            own, reference = entry["own"], entry["reference"]
            if own["ran_past"] is not None:
                said = f"goes on in {prompt} after a stop id at step {own['ran_past']}"
                wrong.setdefault(("fail", said), []).append(rung.id)
            if not same_end(own, reference):
                tone = "blocked" if own["reason"] in ("stop_id", "budget") else "fail"
                said = f"ends {prompt} with {ended(own)}, the reference with {ended(reference)}"
                wrong.setdefault((tone, said), []).append(rung.id)
    for (tone, said), names in wrong.items():
        yield tone, "Ends", f"{_span(names)} {said}."
    if not wrong:
        yield "pass", "Ends", "every text ends as the reference's does."


def _on_kl(audit: Audit) -> Finding:
    judged = {rung.id: judgement(audit, rung.id) for rung in audit.ladder if rung.id in audit.texts.documents}
    moved = [name for name, found in judged.items() if (found.get("own") or {}).get("moved")]
    if not any(found.get("own") for found in judged.values()):
        return "not_run", "KL", "not compared with any parent's: gates.json holds no judgement of it."
    if not moved:
        return "pass", "KL", "of the forced text: moved by no rung, against its parent."
    said = []
    for name in moved:
        where = (judged[name].get("attribution") or {}).get("words")
        said.append(f"{name}, {kl_change(judged[name]['own'])}{f' ({where})' if where else ''}")
    worse = any((judged[name]["own"]["kl_change"] or 0) > 0 for name in moved)
    return ("blocked" if worse else "not_needed"), "KL", f"of the forced text moved by {'; '.join(said)}."


def _span(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} above it"
