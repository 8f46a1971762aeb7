"""Judge a rung's texts: what the audit says of them beside the verdict of its gate. Imports no torch.

Text is looked at only after the gate, and a worse text fails no rung: it is reported. A *broken* text is another
matter. A text that goes on after a stop id, or whose logits are not finite, is a fault of the code and none of
precision; :mod:`dsv4.judge.enforce` exits 1 for a rung of the spine.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from dsv4.config import Config
from dsv4.dump import DumpError
from dsv4.judge.onsets import onset
from dsv4.judge.summary import number
from dsv4.judge.text_change import Change, paired_change
from dsv4.judge.text_files import (
    Reference,
    Text,
    TextError,
    read_attribution,
    read_reference,
    read_text,
)
from dsv4.judge.text_said import end, not_finite, of_change, sentences
from dsv4.ladder import State, Variant

ABOUT = ("label", "device", "backend", "free", "same_bits_as", "tokens_per_second")  # of what the numbers are


class Texts:
    """The texts of a run, each judged against the reference's and its parent's.

    Parameters
    ----------
    results : folder of the run.
    config : its configuration.
    """

    def __init__(self, results: Path, config: Config) -> None:
        self.results, self.config = results, config
        self._reference: Reference | DumpError | None = None

    def reference(self) -> Reference:
        """The reference's texts, read once; DumpError as of :func:`~dsv4.judge.text_files.read_reference`."""
        if self._reference is None:
            try:
                self._reference = read_reference(self.results)
            except DumpError as error:
                self._reference = error
        if isinstance(self._reference, DumpError):
            raise self._reference
        return self._reference

    def read(self, name: str) -> Text:
        """A rung's texts; DumpError as of :func:`~dsv4.judge.text_files.read_text`."""
        return read_text(self.results, self.config.ladder[name], self.reference())

    def judged(self, variant: Variant) -> dict[str, Any]:
        """The ``e2e.text`` of a rung.

        Returns
        -------
        dict
            ``kl_nats`` mean over forced positions, ``kl_worst``, ``top1`` share, None where a position is not finite;
            ``positions``, ``not_finite`` of them; the same ``by_class`` of token and ``by_kind`` of prompt;
            ``own``: the paired change against the parent, None without one; ``prompts``: how the free texts ended
            beside the reference's, ``stops`` by kind, None and {} for a rung that generated none; ``reasons``:
            sentences, those first for which it is ``broken``, and of these first the ``faults``, that ``enforce``
            exits 1 for; ``attribution`` of a change.

        Raises
        ------
        DumpError
            Its files are not there or must not be read.
        """
        text = self.read(variant.id)
        change, unpaired = self._change(variant, text)
        faults, broken, other = sentences(text)
        if change:
            other += of_change(change, str(variant.parent))
        attribution = None
        if variant.parent is None or (change and change.moved):
            try:
                attribution = read_attribution(self.results, variant.id)
            except TextError as error:
                other.append(str(error))
        own = [each["own"] for each in text.head["prompts"].values() if each["own"]]
        return {
            **of_rows(text.table),
            "by_class": _grouped(text.table, "token_class"),
            "by_kind": _grouped(text.table, "kind"),
            "own": change.as_dict() if change else None,
            "prompts": {name: _prompt(each) for name, each in text.head["prompts"].items() if each["own"]}
            if own
            else None,
            "stops": _stops(text.head["prompts"]),
            "broken": bool(faults or broken),
            "faults": faults,
            "reasons": [*faults, *broken, *unpaired, *other],
            "attribution": attribution,
            **{name: text.head.get(name) for name in ABOUT},
        }

    def _change(self, variant: Variant, text: Text) -> tuple[Change | None, list[str]]:
        """Paired change against the parent, and why there is none."""
        if variant.parent is None:
            return None, []
        try:
            parent = self.read(variant.parent)
        except DumpError as error:
            return None, [f"not compared with {variant.parent}'s text: {error}"]
        lost = {variant.id: not_finite(text.table), variant.parent: not_finite(parent.table)}
        gaps = [
            f"{int(rows.sum())} positions of {name} are not finite"
            for name, rows in lost.items()
            if rows.any()
        ]
        if gaps:
            return None, [f"not compared with {variant.parent}'s text: {', '.join(gaps)}"]
        return paired_change(text.table, parent.table), []


def with_text(verdict: Mapping[str, Any], texts: Texts) -> dict[str, Any]:
    """Verdict with ``e2e.text``, or None there and in ``e2e.text_note`` why; a broken text is its first reason.

    Only of a rung that passed: text is looked at after the gate.
    """
    e2e = dict(verdict.get("e2e") or {})
    if verdict["status"] != State.PASS:
        note = f"text is looked at only after the gate, which says: {verdict['status'].replace('_', ' ')}"
        return dict(verdict) | ({"e2e": e2e | {"text": None, "text_note": note}} if e2e else {})
    try:
        block = texts.judged(texts.config.ladder[verdict["id"]])
    except DumpError as error:
        return dict(verdict) | {"e2e": e2e | {"text": None, "text_note": str(error)}}
    reasons = list(verdict.get("reasons") or [])
    if block["broken"]:
        reasons.insert(0, f"its text is broken: {block['reasons'][0]}")
    return dict(verdict) | {"e2e": e2e | {"text": block, "text_note": None}, "reasons": reasons}


def of_rows(rows: pd.DataFrame) -> dict[str, Any]:
    """Means of forced positions; no number is given that one which is not finite shares in."""
    lost = int(not_finite(rows).sum())
    sound = len(rows) and not lost
    return {
        "kl_nats": number(rows["kl_nats"].mean()) if sound else None,
        "kl_worst": number(rows["kl_nats"].max()) if sound else None,
        "top1": number(rows["top1"].mean()) if sound else None,
        "positions": len(rows),
        "not_finite": lost,
    }


def _grouped(table: pd.DataFrame, column: str) -> dict[str, Any]:
    found = {}
    for name, rows in table.groupby(column, sort=False, observed=True):
        means = of_rows(rows)
        found[str(name)] = {
            "kl_nats": means["kl_nats"],
            "top1": means["top1"],
            "n": len(rows),
            "not_finite": means["not_finite"],
        }
    return found


def _prompt(each: Mapping[str, Any]) -> dict[str, Any]:
    """How a prompt's free text ended, beside the reference's."""
    own, reference, divergence = each["own"], each["reference"], each["divergence"] or {}
    return {
        "kind": each["kind"],
        "stop": own["stop"],
        "stop_name": own["stop_name"],
        "reason": own["reason"],
        "length": own["length"],
        "reference_length": reference["length"],
        "reference_reason": reference["reason"],
        "stopped_as_reference": end(own) == end(reference),
        "onset": onset(own),
        "reference_onset": onset(reference),
        "divergence_step": divergence.get("step"),
        "near_tie": divergence.get("near_tie"),
        "distinct_4": own["distinct"]["4"],
        "ran_past": own["ran_past"],
    }


def _stops(prompts: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """How many free texts of each kind ended at which stop id, or for which other reason."""
    found: dict[str, Counter[str]] = {}
    for each in prompts.values():
        if own := each["own"]:
            end = own["reason"] if own["stop"] is None else str(own["stop"])
            found.setdefault(each["kind"], Counter())[end] += 1
    return {kind: dict(counts) for kind, counts in found.items()}
