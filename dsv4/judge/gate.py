"""Gate one variant: its measurements and the limits -> ``gates/<id>.json``. Exits 0 whatever it finds.

On failure the culprit is confirmed by repeat, revert and re-apply (``python -m dsv4.run.aba``).
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from dsv4.config import Config, ConfigError, load, model_config
from dsv4.console import main_guard
from dsv4.files import write_json
from dsv4.judge import summary
from dsv4.judge.claims_by_field import SILENT, claimed
from dsv4.judge.evaluate import Finding, blast, findings, other_path, place, select
from dsv4.judge.guard import guard, unlike_single
from dsv4.judge.launches import Sizes
from dsv4.judge.limits import Limit, LimitError, tightened
from dsv4.judge.measure import Notes, arguments, read
from dsv4.ladder import LadderError, State, Variant
from dsv4.plan import flatten
from dsv4.taps import BY_NAME

ABA = "dsv4.run.aba"
SCHEMA = 1
UNJUDGED = "whether the code computes its plan was not judged"
Confirm = Callable[[Finding], tuple[dict[str, Any] | None, str]]


def blocker(results: Path, config: Config, variant: Variant) -> tuple[str, State] | None:
    """What a rung waits for: the lowest rung below it that did not hold, else the nearest not run.

    A rung above a failure, however far, thus names the failure and not its neighbour that was blocked by it.
    All below it are asked: above a failure there may be passes of an earlier run.
    """
    unmet: list[tuple[str, State]] = []
    for rung in reversed(config.ladder.lineage(variant.id)[:-1]):
        verdict = read_verdict(results, rung.id)
        state = State(verdict["status"]) if verdict else State.NOT_RUN
        if state != State.PASS:
            unmet.append((rung.id, state))
    stopped = [(name, state) for name, state in unmet if state not in (State.NOT_RUN, State.BLOCKED)]
    return stopped[-1] if stopped else unmet[0] if unmet else None


def read_verdict(results: Path, name: str) -> dict[str, Any] | None:
    """Verdict of a variant, or None if it was not judged."""
    path = results / "gates" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def header(variant: Variant) -> dict[str, Any]:
    """What a verdict says about the rung itself."""
    return {
        "id": variant.id,
        "parent": variant.parent,
        "spine": variant.spine,
        "on_request": variant.on_request,
        "change": {name: list(pair) for name, pair in variant.change.items()},
        "engine": variant.engine,
        "why": variant.why,
    }


def gate(results: Path, config: Config, name: str, confirm: Confirm | None = None) -> dict[str, Any]:
    """Verdict of a variant.

    Parameters
    ----------
    confirm : called with the culprit of a failure; gives the A/B/A result, or None and why not.

    Raises
    ------
    LimitError, LadderError
        The configuration loosens a limit, or names an unknown variant.
    """
    variant = config.ladder[name]
    tightened(config.tighten)  # a loosened limit is an error even where nothing was measured
    below = blocker(results, config, variant)
    blocked = [f"blocked: it stands on {below[0]}, which is {below[1].replace('_', ' ')}"] if below else []
    path = results / "metrics" / f"{name}.parquet"
    if not path.exists():
        reasons = blocked or [f"no measurements: {path} is not there; run snakemake {name}"]
        return header(variant) | {"status": State.BLOCKED if below else State.NOT_RUN, "reasons": reasons}
    frame, notes = read(path)
    frame = frame[frame["step"] < 0]
    if notes.error:
        state = State.BLOCKED if below else State.CANNOT_MEASURE
        return header(variant) | {
            "status": state,
            "reasons": [*blocked, notes.error],
            "commit": _commit(notes),
        }
    found = found_in(config, variant, frame, notes)
    verdict = judged(config, variant, frame, notes, found, confirm)
    verdict["guard"] = guard(results, notes, variant)
    if below:
        verdict |= {"status": State.BLOCKED, "reasons": [*blocked, *verdict["reasons"]]}
    return verdict


def found_in(config: Config, variant: Variant, frame: Any, notes: Notes) -> list[Finding]:
    """Everything that is wrong with a variant, in order; ``frame`` without single decode steps.

    Raises
    ------
    LimitError
        The configuration loosens a limit.
    """
    plan, sizes = flatten(variant.plan), Sizes.of(model_config(config.checkpoint))
    applied = _applied(config, plan)
    found = findings(frame, notes, applied, plan, variant.change)
    return found + other_path(plan, sizes, notes) + unlike_single(notes)


def _applied(config: Config, plan: Mapping[str, str]) -> list[Limit]:
    return [limit for limit in tightened(config.tighten) if limit.applies(plan)]


def judged(
    config: Config,
    variant: Variant,
    frame: Any,
    notes: Notes,
    found: list[Finding],
    confirm: Confirm | None = None,
) -> dict[str, Any]:
    """Verdict of a variant on its own measurements, whatever it stands on.

    Parameters
    ----------
    frame : the table without single decode steps.
    found : see :func:`found_in`; the first names the culprit.
    """
    silent = _fallback(variant, frame)
    unjudged = _unjudged(variant, frame, notes)
    applied = _applied(config, flatten(variant.plan))
    verdict = header(variant) | describe(config, variant, frame, notes, applied)
    verdict["culprit"] = _culprit(found[0], notes) if found else None
    state, reasons = _state(found, silent, unjudged)
    if found and confirm:
        verdict["confirmed"], note = confirm(found[0])
        reasons += [note] if note else []
    if not reasons:
        reasons = [_good(variant, verdict)]
    if notes.declared:
        given, of = verdict["taps"]
        reasons = [*reasons, f"taps {given} of {of}: {verdict['label']} declares the others missing"]
    return verdict | {"status": state, "reasons": reasons}


def _state(found: list[Finding], silent: str, unjudged: list[str]) -> tuple[State, list[str]]:
    if found or silent:
        return State.FAIL, [finding.text for finding in found] + ([silent] if silent else [])
    return (State.CANNOT_MEASURE if unjudged else State.PASS), unjudged


def _unjudged(variant: Variant, frame: Any, notes: Notes) -> list[str]:
    """Sentences: what must be judged before a rung without a finding may pass, and was not."""
    lines = []
    if not notes.floor:
        lines.append(f"no noise floor: {UNJUDGED}")
    elif notes.unfloored:
        _, layer, tap = notes.unfloored[0]
        more = f" and at {len(notes.unfloored) - 1} more" if len(notes.unfloored) > 1 else ""
        lines.append(f"no noise floor at {place(layer, tap)}{more}: {UNJUDGED} there")
    elif summary.fidelity(frame)[0] in (None, "not_exercised"):
        lines.append(f"no tap holds anything: {UNJUDGED}")
    if variant.parent and select(frame, against="parent").empty:
        lines.append(f"no tap was compared with {variant.parent}'s: what the change moves was not measured")
    own = summary.own_path(variant.change, frame, notes)
    return lines + [f"not exercised on the changed op's own path: {text}" for text in own]


def _fallback(variant: Variant, frame: Any) -> str:
    """A change that must move values and moved none: the new path did not run."""
    fields = [field for field in variant.change if field not in SILENT]
    rows = select(frame, against="parent", part="all")
    if not fields or rows.empty or not bool(rows["equal"].all()):
        return ""
    return (
        f"silent fallback: {', '.join(fields)} changed, but no stored code or value of"
        f" {', '.join(sorted(claimed(fields)))} differs from {variant.parent}'s: the new path did not run"
    )


def _good(variant: Variant, verdict: Mapping[str, Any]) -> str:
    parent = verdict.get("vs_parent")
    if parent and parent["bit_equal"]:
        return f"bit-equal to {variant.parent}: no stored code or value changes"
    counts = verdict["fidelity_counts"]
    taps = f"{counts['bit_equal']} tensors bit-equal to the emulation, {counts['within']} within its noise"
    if not parent:
        return taps
    own = verdict["ledger"]["own"]["kl_nats"]
    cost = "" if own is None else f", at {own:.2g} nats of its own"
    return f"{taps}; it moves {parent['taps_changed']} of {parent['of']} taps against {variant.parent}{cost}"


def _culprit(finding: Finding, notes: Notes) -> dict[str, Any]:
    row = finding.row if finding.row >= 0 else None
    return {
        "layer": finding.layer if finding.layer >= 0 else "model",
        "stage": BY_NAME[finding.tap].stage,
        "tap": finding.tap,
        "kind": finding.kind,
        "mode": finding.mode,
        "prompt": finding.prompt or None,
        "step": summary.step(notes, finding.prompt, finding.phase, finding.row) if finding.prompt else None,
        "row": row,
    }


def describe(
    config: Config, variant: Variant, frame: Any, notes: Notes, limits: list[Limit]
) -> dict[str, Any]:
    """Everything of a verdict but its state."""
    parent = flatten(config.ladder[variant.parent].plan) if variant.parent else None
    word, counts = summary.fidelity(frame)
    moved = sorted(blast(frame, variant.change), key=lambda finding: finding.order)
    return {
        "commit": _commit(notes),
        "label": notes.labels.get("label"),
        "device": notes.labels.get("device"),
        "taps": [sum(counts) for counts in zip(*notes.taps.values(), strict=True)],
        "taps_by_mode": notes.taps,
        "declared_missing": notes.declared,
        "cos": summary.cosines(frame, notes),
        "fidelity": word,
        "fidelity_counts": counts,
        "vs_parent": summary.against_parent(frame, notes),
        "blast_radius": {"ok": not moved, "changed": [f"layer {f.layer} {f.tap}" for f in moved]}
        if parent
        else None,
        "ledger": summary.ledger(frame, limits),
        "quantisation": notes.points,
        "not_exercised": summary.not_exercised(frame, notes),
        "e2e": summary.end_to_end(frame, notes),
        "cost": summary.cost(flatten(variant.plan), parent, Sizes.of(model_config(config.checkpoint)), notes),
        "kernel_launches": notes.launches or None,
        "confirmed": None,
        "limits": [_limit(limit) for limit in limits],
    }


def _limit(limit: Limit) -> dict[str, Any]:
    names = ("name", "tap", "part", "metric", "direction", "value", "against", "mode", "source")
    return {name: getattr(limit, name) for name in names}


def _commit(notes: Notes) -> str | None:
    commit = notes.labels.get("commit")
    return f"{commit} + changes" if commit and notes.labels.get("dirty") else commit


def confirm_by_aba(results: Path, config: Config, name: str) -> Confirm:
    """Repeat, revert and re-apply the change at the culprit, in a process of its own."""

    def confirm(finding: Finding) -> tuple[dict[str, Any] | None, str]:
        skipped = "not confirmed by repeat, revert, re-apply"
        if config.ladder[name].parent is None:
            return None, f"{skipped}: {name} is the bottom of the ladder, there is nothing to revert to"
        if not finding.prompt or finding.mode != "isolated":
            return None, f"{skipped}: it shows in no single op on the reference's inputs"
        layer = str(finding.layer) if finding.layer >= 0 else "model"
        command = [sys.executable, "-m", ABA, "--results", str(results), "--config", str(config.path)]
        command += ["--variant", name, "--layer", layer, "--tap", finding.tap, "--prompt", finding.prompt]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = done.stdout.strip().splitlines()
        try:
            return json.loads(lines[-1]), ""
        except (IndexError, json.JSONDecodeError):
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            return None, f"{skipped}: {ABA} exited {done.returncode}: {last}"

    return confirm


def main() -> int:
    """Gate ``--variant``; 1 only for a configuration that cannot be used."""
    options = arguments(__doc__, "variant").parse_args()
    console = Console(stderr=True)
    try:
        config = load(options.config)
        confirm = confirm_by_aba(options.results, config, options.variant)
        verdict = gate(options.results, config, options.variant, confirm)
    except (ConfigError, LimitError, LadderError) as error:
        console.print(f"error: {error}", markup=False, highlight=False)
        return 1
    write_json(options.results / "gates" / f"{options.variant}.json", verdict)
    text = f"{options.variant}: {verdict['status'].replace('_', ' ')}: {verdict['reasons'][0]}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    main_guard(main)
