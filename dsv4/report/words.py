"""Verdicts in words that a person can act on; nothing here computes a number."""

import re
from collections.abc import Mapping
from typing import Any

from dsv4.ladder import OWN, State, Variant
from dsv4.report.load import Audit

PLACED = re.compile(r"^(layer \d+|after the last layer), \w+ \(\w+\):?\s*")
HEADS = re.compile(r"^(not needed: |not exercised: )+")
CLAUSE_ENDS = re.compile(r"[:;] ")
LIMIT_NAME = re.compile(r"(, what its formats explain)? \([\w.]+\)$")
WORDS = {
    State.PASS: "pass",
    State.FAIL: "fail",
    State.BLOCKED: "blocked",
    State.NOT_NEEDED: "not needed",
    State.NOT_RUN: "not run",
    State.CANNOT_MEASURE: "cannot measure",
}
PHRASES = {
    ("norm_quant", "unfused"): "norm and quantiser apart",
    ("norm_quant", "fused"): "gsa per row",
    ("norm_quant", "fused_scalar_gsa"): "the launch's largest gsa undone from every row",
    ("norm_quant", "fused_launch_gsa"): "one gsa for all rows",
    ("mhc_quant", "unfused"): "the mHC stream sum apart",
    ("mhc_quant", "fused"): "the fused mHC pre",
    ("q_a_norm", "unfused"): "q_a's norm apart",
    ("kv_read", "gather_bf16"): "the BF16 gather",
    ("kv_read", "in_place"): "KV read in place",
    ("kv_format", "fp8"): "FP8 KV",
    ("kv_format", "nvfp4"): "NVFP4 KV",
    ("kv_record", "seven_scales"): "one scale per 64",
    ("kv_record", "aligned"): "the aligned record",
    ("q_format", "bf16"): "BF16 q",
    ("q_format", "fp8"): "q in one FP8 term",
    ("q_format", "fp8x2"): "q in two FP8 terms",
    ("rope_format", "bf16"): "BF16 rope",
    ("rope_format", "fp8"): "FP8 rope",
    ("pv_format", "bf16"): "BF16 PV",
    ("pv_format", "fp8"): "FP8 PV",
    ("index_score", "einsum_fp32"): "the FP32 indexer einsum",
    ("index_score", "fp8"): "FP8 index scores",
    ("index_score", "fp4"): "FP4 index scores",
    ("kv_norm", "unfused"): "kv's norm apart",
    ("residual", "bf16"): "the BF16 residual",
    ("engine", OWN): "our own model",
    ("commit", OWN): "our own model",
    ("rounding", "plan"): "the plan's rounding",
    ("rounding", "none"): "no rounding",
}


def phrase(field: str, value: str) -> str:
    """A plan value as an engineer says it."""
    return PHRASES.get((field, value), f"{field.removeprefix('casts.')} {value}")


def place(culprit: Mapping[str, Any] | None) -> str:
    """Where a rung fails, in words, or an empty text."""
    if not culprit:
        return ""
    layer, stage, tap = culprit.get("layer"), culprit.get("stage"), culprit.get("tap")
    at = "the model's head" if layer in (-1, "model") else f"layer {layer}" if layer is not None else ""
    op = stage or tap or ""
    named = f"{op} ({tap})" if tap and tap != op else op
    return ", ".join(text for text in (at, named) if text)


def reason(verdict: Mapping[str, Any] | None, width: int = 200) -> str:
    """The first reason of a verdict without the place, which stands beside it; or an empty text."""
    first = ((verdict or {}).get("reasons") or [""])[0]
    text = LIMIT_NAME.sub("", PLACED.sub("", first)).removeprefix("is ")
    return text if len(text) <= width else text[: width - 1].rsplit(" ", 1)[0].rstrip(",;:") + " …"


def broken(verdict: Mapping[str, Any] | None) -> bool:
    """Whether a rung's text is broken, which its first reason says then."""
    return bool((((verdict or {}).get("e2e") or {}).get("text") or {}).get("broken"))


def advice(audit: Audit, variant: Variant) -> str:
    """What to do about a rung."""
    verdict = audit.verdicts.get(variant.id)
    why = reason(verdict, 110)
    tail = f": {why}" if why else ""
    field, (old, new) = next(iter(variant.change.items()), ("", ("", "")))
    match audit.state(variant):
        case State.PASS if broken(verdict):
            return f"passes its gate{tail}"
        case State.PASS if not variant.change:
            return "the bottom of the ladder holds"
        case State.PASS:
            equal = ((verdict or {}).get("vs_parent") or {}).get("bit_equal")
            said = "safe to stack" if variant.spine else f"may adopt {phrase(field, new)}"
            return said + (f": bit-equal to {variant.parent}" if equal else "")
        case State.FAIL:
            return f"keep {phrase(field, old)}{tail}" if variant.change else f"mend this first{tail}"
        case State.BLOCKED:
            return why.removeprefix("blocked: ") or f"blocked by {_blocker(audit) or 'a rung below'}"
        case State.CANNOT_MEASURE:
            return f"not shown to be safe{tail}"
        case State.NOT_NEEDED:
            return _clause(reason(verdict)) or "not needed"
    otherwise = (
        f"on request: snakemake {variant.id}" if variant.on_request else "the run stopped before this gate"
    )
    return why or otherwise


def _clause(text: str) -> str:
    """The first clause of why a rung is not needed; four rungs in a row say the same, whole where one points at it."""
    return CLAUSE_ENDS.split(HEADS.sub("", text), maxsplit=1)[0]


def _spine(audit: Audit) -> list[Variant]:
    return [variant for variant in audit.ladder if variant.spine]


def _blocker(audit: Audit) -> str | None:
    stops = (State.FAIL, State.CANNOT_MEASURE)
    return next((rung.id for rung in _spine(audit) if audit.state(rung) in stops), None)


def headline(audit: Audit) -> tuple[str, State]:
    """The page's first sentence and the state that it reports; a broken text of a rung below is a sentence more."""
    text, found = _first(audit)
    first = next((rung for rung in _spine(audit) if broken(audit.verdicts.get(rung.id))), None)
    if first is None:
        return text, found
    more = f"{first.id} passes its gate, but {reason(audit.verdicts[first.id])}."
    if found is State.PASS:
        return f"{more} Nothing may be stacked on it.", State.FAIL
    return f"{text} {more}", found


def _first(audit: Audit) -> tuple[str, State]:
    spine = _spine(audit)
    leaf = audit.ladder[-1] if audit.target == audit.ladder[-1].id and not audit.ladder[-1].spine else None
    good = (State.PASS, State.NOT_NEEDED)
    stops = [number for number, rung in enumerate(spine) if audit.state(rung) not in good]
    if not stops:
        return _leaf(audit, leaf) if leaf else _all_pass(spine)
    first = spine[stops[0]]
    above = spine[stops[0] + 1] if stops[0] + 1 < len(spine) else None
    verdict = audit.verdicts.get(first.id)
    found = audit.state(first)
    if found is State.FAIL:
        at, why = place((verdict or {}).get("culprit")), reason(verdict)
        text = f"{first.id} fails" + (f" in {at}" if at else "") + (f": {why}" if why else "")
        return text + (f"; so {above.id} and above are blocked." if above else "."), found
    if found is State.CANNOT_MEASURE:
        why = reason(verdict)
        text = f"{first.id} cannot be measured" + (f": {why}" if why else "")
        return text + (f"; so {above.id} and above are blocked." if above else "."), found
    last = spine[stops[0] - 1].id
    below = f"{last} {'and below pass' if stops[0] > 1 else 'passes'}; " if stops[0] else ""
    return (
        f"The audit is not complete: {below}{first.id} {'and above were' if above else 'was'} not run.",
        State.NOT_RUN,
    )


def _all_pass(spine: list[Variant]) -> tuple[str, State]:
    count = f"All {len(spine)} rungs pass" if len(spine) > 1 else "The rung passes"
    return f"{count}; the next change may be stacked on {spine[-1].id}.", State.PASS


def _leaf(audit: Audit, leaf: Variant) -> tuple[str, State]:
    found = audit.state(leaf)
    if broken(audit.verdicts.get(leaf.id)):
        return f"{leaf.id} passes its gate, but {reason(audit.verdicts[leaf.id])}.", State.FAIL
    at = place((audit.verdicts.get(leaf.id) or {}).get("culprit"))
    verb = {State.PASS: "passes", State.FAIL: "fails"}.get(found, f"is {WORDS[found]}")
    verb = "cannot be measured" if found is State.CANNOT_MEASURE else verb
    return f"{leaf.id} {verb}{f' in {at}' if at else ''}; {advice(audit, leaf)}.", found


def summary(audit: Audit) -> str:
    """Counts behind the headline, and whether the culprit was confirmed."""
    spine, leaves = _spine(audit), [rung for rung in audit.ladder if not rung.spine]
    sentences = [f"Ladder: {_count(audit, spine)}."]
    if leaves:
        sentences.append(f"Leaves, tried and never stacked: {_count(audit, leaves)}.")
    texts = [rung.id for rung in audit.ladder if broken(audit.verdicts.get(rung.id))]
    if texts:
        sentences.append(f"Broken text: {', '.join(texts)}.")
    blocker = _blocker(audit)
    confirmed = audit.verdicts[blocker].get("confirmed") if blocker else None
    if confirmed:
        held = confirmed.get("confirmed", all(value is not False for value in confirmed.values()))
        sentences.append(f"Repeat, revert, re-apply {'confirms' if held else 'does not confirm'} {blocker}.")
    return " ".join(sentences)


def _count(audit: Audit, rungs: list[Variant]) -> str:
    found = [audit.state(rung) for rung in rungs]
    return ", ".join(f"{found.count(each)} {WORDS[each]}" for each in State if each in found)
