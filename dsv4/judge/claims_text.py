"""Claims about generation: from the texts of the audit, and from how its trees read prompts in a batch."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsv4.dump import DumpError
from dsv4.engine.spec import ONE_BF16
from dsv4.generate.stops import KINDS
from dsv4.judge.evidence import Evidence, Outcome
from dsv4.judge.gate import read_verdict
from dsv4.judge.guard import OWN
from dsv4.judge.text import Texts
from dsv4.judge.text_said import end, ended
from dsv4.ladder import State

ROOT = Path(__file__).resolve().parents[2]
LONG = 512  # tokens from which the plan asks whether a text still stops


def batched_prefill(evidence: Evidence) -> Outcome:
    """Entry point of our own model and a batch against its prompts alone; of each rung, what the guard found."""
    module, name = OWN.rsplit(".", 1)
    source = ROOT / f"{module.replace('.', '/')}.py"
    tree = ast.parse(source.read_text()) if source.exists() else ast.Module([], [])
    if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
        return False, f"absent: there is no {OWN}"
    ops = {key: evidence.ops[f"batched_prefill.{key}"] for key in ("prompts", "longest", "logits")}
    unlike = {plan: int(evidence.ops[f"batched_prefill.{plan}"]) for plan in ("trained", "B0_unfused")}
    counts = ", ".join(f"{count} as {plan}" for plan, count in unlike.items())
    batch = f"{ops['prompts']:g} prompts of up to {ops['longest']:g} tokens in one batch"
    text = (
        f"present: {OWN}; {batch} against each alone, on refs with random weights: of {ops['logits']:g} logits after"
        f" the prompts and after a step on their caches there differ {counts}"
    )
    said: dict[str, list[str]] = {}
    there = True
    for rung, found in _guards(evidence):
        there &= found is not None and found.get("rel_l2", 0.0) <= ONE_BF16
        said.setdefault(_compared(found), []).append(rung)
    lines = [f"{_named(rungs)}: {words}" for words, rungs in said.items()]
    return there and not any(unlike.values()), "; ".join([text, *lines])


def _guards(evidence: Evidence) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """What the guard of each judged rung says of batched prefill; None: it is absent."""
    for rung in evidence.judged():
        guard = (read_verdict(evidence.results, rung) or {}).get("guard")
        if guard:
            yield rung, guard["batched_prefill"]


def _compared(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "absent"
    if "compared" in found:
        return str(found["compared"])
    like = "bit-equal to" if found["bit_equal"] else f"relative L2 {found['rel_l2']:.2g} from"
    return f"present: {found['entry_point']}, {like} each alone"


def _named(rungs: list[str]) -> str:
    return ", ".join(rungs) if len(rungs) < 4 else f"{len(rungs)} rungs"


def stop_512(evidence: Evidence) -> Outcome:
    """How texts ended, the reference's and each rung's, by kind of prompt; those of 512 tokens and more decide."""
    heads, refused = _free(evidence)
    if not heads:
        return None, refused or "no rung of this run has generated text"
    reference = {name: each["reference"] for name, each in next(iter(heads.values())).items()}
    kinds = {name: each["kind"] for name, each in next(iter(heads.values())).items()}
    lines, unlike = list[str](), 0
    for kind in KINDS:
        names = [name for name in kinds if kinds[name] == kind]
        for name in names:
            line, count = _ends({rung: each[name] for rung, each in heads.items()})
            lines.append(f"{kind.replace('_', ' ')} `{name}`: {line}")
            unlike += count
        lines += [] if names else [f"{kind.replace('_', ' ')}: no prompt"]
    past = [
        f"{rung} ({name})"
        for rung, head in heads.items()
        for name, each in head.items()
        if any(text["ran_past"] is not None for text in (each["own"], each["reference"]))
    ]
    lines.append(f"a stop id was passed in {', '.join(past)}" if past else "no stop id was passed")
    text = "; ".join(lines)
    if past or unlike:
        return False, text
    if not any(each["reason"] == "stop_id" and each["length"] >= LONG for each in reference.values()):
        return None, f"no text of the reference stops after {LONG} tokens or more: {text}"
    return True, text


def _free(evidence: Evidence) -> tuple[dict[str, Mapping[str, Any]], str]:
    """Of the rungs that passed, rung -> ``prompts`` of its ``text/<id>.json``; and why the first has none."""
    judge, found, refused = Texts(evidence.results, evidence.config), {}, list[str]()
    for rung in evidence.judged():
        if (read_verdict(evidence.results, rung) or {}).get("status") != State.PASS:
            continue
        try:
            prompts = judge.read(rung).head["prompts"]
        except DumpError as error:
            refused.append(str(error))
            continue
        if all(each["own"] for each in prompts.values()):
            found[rung] = prompts
    return found, refused[0] if refused else ""


def _ends(texts: Mapping[str, Mapping[str, Any]]) -> tuple[str, int]:
    """How a prompt's texts ended, and how many of 512 tokens and more did not end as the reference's."""
    each = next(iter(texts.values()))
    reference, budget = each["reference"], each["budget"]
    own = {rung: each["own"] for rung, each in texts.items()}
    like = [text["length"] for text in own.values() if end(text) == end(reference)]
    other = {rung: text for rung, text in own.items() if end(text) != end(reference)}
    spread = f" (after {min(like)} to {max(like)})" if like and min(like) < max(like) else ""
    said = f"the reference {ended(reference, budget)}, so do {len(like)} of {len(own)} rungs{spread}"
    lines = [said, *(f"{rung} {ended(text, budget)}" for rung, text in other.items())]
    return ", but ".join(lines), sum(
        max(text["length"], reference["length"]) >= LONG for text in other.values()
    )
