"""What an audit says in a commit message: git trailers with the verdict, its cosines and what they rest on.

``python -m dsv4 commit-evidence B1`` prints them for a rung, or for a commit that was judged; the hook
(:mod:`dsv4.commits.hook`) puts them into a message, :mod:`dsv4.commits.verify` runs the commit again and
compares. The keys:

``Audit-Variant``
    The rung whose plan the commit implements. The audit of commits reads it too.
``Audit-Parent``
    The rung that this one stands on in ``config.yaml``, or ``none``.
``Audit-Verdict``, ``Audit-Fidelity``
    State of the gate; whether the code computes its plan.
``Audit-Culprit``
    Of a failure: layer, tap, stage and kind.
``Audit-Cosine``
    The tap, then one value a layer: of attention's output with the reference's on the same inputs, the
    lowest over prompts and phases.
``Audit-Cosine-Min``, ``Audit-Cosine-Mean``
    The lowest of any row, with layer, tap, prompt and token; the mean over layers and prompts.
``Audit-Time``
    A decode step over the parent's, with the device; or why there is none.
``Audit-Taps``
    How many of the model's taps were there.
``Audit-Device``
    What the numbers were computed on, and the versions that they depend on.
``Audit-Reference``
    Checkpoint and prompt set, 16 digits of each hash, and the settings that decide which rows are judged.
``Audit-Report``
    SHA-256 of what was measured. It is that of no file, for ``gates.json`` and the page hold dates, names and
    the commit's own hash. It is that of the verdict's entries :data:`MEASURED` as JSON with sorted keys and no
    blanks, which a second run on the same machine gives again; this command recomputes it.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from dsv4.code_inputs import ROOT, variant_code
from dsv4.config import Config, ConfigError, backend_of, checkpoint_sha256, prompt_set_sha256, run_id
from dsv4.dump_reader import DumpReader
from dsv4.judge.collect import published
from dsv4.judge.times import read_times, with_time
from dsv4.plan import flatten
from dsv4.prompts import with_taps

MEASURED = ("status", "culprit", "taps", "cos", "fidelity", "fidelity_counts", "quantisation", "e2e")
VERSIONS = ("torch", "numpy", "triton")  # what numbers depend on
SETTINGS = ("decode_steps", "prefill_rows", "page_size", "floor_draws", "seed")
DIGITS = 9

# The whole value of each trailer that cannot be compared as text with that of another machine.
_NUMBER, _LAYER = rf"(?:-?[01]\.\d{{{DIGITS}}}|nan)", r"(?:layer \d+|after the last layer)"
_VERSION = r"(?:{}) \S+".format("|".join(VERSIONS))
_LABELLED = (
    r"emulated on cpu, cpu \(.+\)"
    r"|kernels on (?P<gpu>.+), (?P=gpu) \((?P<number>sm_\d+|no GPU)\)"
    r"|engine \S+ on (?P<engine>.+), (?P=engine)"
)
FORMATS = {
    "Audit-Cosine": re.compile(rf"\S+(?: {_NUMBER})+"),
    "Audit-Cosine-Min": re.compile(rf"{_NUMBER} {_LAYER}, \S+ \(\S+, token \d+\)"),
    "Audit-Cosine-Mean": re.compile(_NUMBER),
    "Audit-Time": re.compile(
        r"(?:\d+\.\d{3} of \S+ \(\d+\.\d{3} to \d+\.\d{3}\)"
        r"|\d+\.\d us a step, \S+ has no parent), (?P<gpu>.+)"
        r"|not measured on this device|.+ is no device to time|no kernel for .+; set `backend: ref`"
    ),
    "Audit-Device": re.compile(rf"(?:{_LABELLED}); (?:{_VERSION}(?:, {_VERSION})*)?"),
    "Audit-Report": re.compile(r"sha256:[0-9a-f]{64}"),
}


class EvidenceError(ConfigError):
    """There is nothing to say about a rung or a commit; says why and what to run."""


def of_rung(results: Path, config: Config, name: str) -> dict[str, str]:
    """Trailers of a rung of the ladder.

    Raises
    ------
    EvidenceError
        It was not judged, or its code was edited since.
    """
    rung = config.ladder[name]
    verdict = published(results, config, rung, name)
    if verdict is None:
        raise EvidenceError(
            f"{name} was not judged, or something below it did not pass: run `snakemake {name}`"
        )
    if edited := _edited_since(results, config, name):
        path = results / "gates" / f"{name}.json"
        raise EvidenceError(
            f"{edited} was written after {name} was judged: run `snakemake {name}` again;"
            f" if that finds nothing to do, only the file's date is new: touch {path}"
        )
    verdict = with_time(verdict, read_times(results))
    return trailers(config, verdict, name, results / "variants" / name)


def _edited_since(results: Path, config: Config, name: str) -> str:
    """A file of the rung's run or judge that is newer than its verdict, or ""."""
    plan, kind = flatten(config.ladder[name].plan), backend_of(config).kind
    files = {*variant_code("dsv4.run.variant", plan, kind), *variant_code("dsv4.judge.gate", plan, kind)}
    judged = (results / "gates" / f"{name}.json").stat().st_mtime_ns
    return next((file for file in sorted(files) if (ROOT / file).stat().st_mtime_ns > judged), "")


def of_commit(results: Path, config: Config, sha: str) -> dict[str, str]:
    """Trailers of a commit that was judged.

    Raises
    ------
    EvidenceError
        It was not, or by other code, configuration or references than there are now; or it does not run.
    """
    path = results / "commits" / sha / "verdict.json"
    if not path.is_file():
        raise EvidenceError(
            f"commit {sha[:10]} was not judged: run `snakemake commits` over a branch that holds it"
        )
    verdict = json.loads(path.read_text())
    if verdict["key"] not in _keys_now(results, config, sha, verdict["rung"]):
        raise EvidenceError(
            f"commit {sha[:10]} was judged by older code or reference: run `snakemake commits` again"
        )
    return of_verdict(results, config, verdict)


def _keys_now(results: Path, config: Config, sha: str, rung: str) -> set[str]:
    """The keys that a verdict of this commit may have, judged now as an implementation of this rung.

    A key depends on the base only by which of the commit and its parents are ground, and the base of the
    judgement is not known here. Each case is that of one of these bases: itself, a parent, or a root.
    """
    from dsv4.commits import audit, history  # the audit of commits, which a rung's evidence does not need
    from dsv4.commits.branch import Branch, repository

    repo = repository(config)
    config = replace(config, commits=replace(config.commits, rung=rung or None))
    roots = history.git(repo, "rev-list", "--max-parents=0", sha).split()
    bases = {sha, *history.read(repo, sha).parents, *roots}
    return {audit._key(Branch(results, config, base), sha) for base in bases}


def of_verdict(results: Path, config: Config, verdict: Mapping[str, Any]) -> dict[str, str]:
    """Trailers of a commit by its verdict.

    Raises
    ------
    EvidenceError
        It does not run, so that nothing was measured.
    """
    if verdict["dump_of"] is None:
        raise EvidenceError(f"commit {verdict['id']} has no evidence: {verdict['reasons'][0]}")
    return trailers(config, verdict, verdict["rung"], results / "commits" / verdict["dump_of"])


def trailers(config: Config, verdict: Mapping[str, Any], rung: str, dumps: Path) -> dict[str, str]:
    """Key and value of each trailer, in the order in which they are written.

    Parameters
    ----------
    verdict : an entry of ``gates.json``, or a commit's verdict.
    rung : whose plan was judged.
    dumps : folder of what was judged, for the versions that computed it.

    Raises
    ------
    EvidenceError
        Nothing was measured.
    """
    if not verdict.get("cos"):
        raise EvidenceError(f"{verdict['id']} has no evidence: {verdict['reasons'][0]}")
    cos, culprit = verdict["cos"], verdict.get("culprit")
    found = {
        "Audit-Variant": rung,
        "Audit-Parent": config.ladder[rung].parent or "none",
        "Audit-Verdict": str(verdict["status"]),
        "Audit-Fidelity": str(verdict["fidelity"]),
    }
    if culprit:
        found["Audit-Culprit"] = (
            f"{_layer(culprit)}, {culprit['tap']} ({culprit['stage']}), {culprit['kind']}"
        )
    at = cos["worst"]
    lowest = f"{_layer(at)}, {at['tap']} ({at['prompt']}, token {at['row']})"
    return found | {
        "Audit-Cosine": " ".join([cos["tap"], *map(digits, cos["per_layer"])]),
        "Audit-Cosine-Min": f"{digits(cos['min'])} {lowest}",
        "Audit-Cosine-Mean": digits(cos["mean"]),
        "Audit-Time": time_words(verdict["cost"], rung),
        "Audit-Taps": "{} of {}".format(*verdict["taps"]),
        "Audit-Device": device_words(config, verdict, dumps),
        "Audit-Reference": reference_words(config),
        "Audit-Report": f"sha256:{measured_sha256(verdict)}",
    }


def digits(value: float | None) -> str:
    """A cosine as it is printed; ``nan`` where something is not finite."""
    return "nan" if value is None or math.isnan(value) else f"{value:.{DIGITS}f}"


def _layer(at: Mapping[str, Any]) -> str:
    return f"layer {at['layer']}" if isinstance(at["layer"], int) else "after the last layer"


def time_words(cost: Mapping[str, Any], rung: str) -> str:
    """The step's time over the parent's, with spread and device; or why there is none."""
    time = cost["time"]
    if time is None:
        return str(cost["note"]).removeprefix("time: ")
    device = str(cost["note"]).rpartition(", on ")[2]
    if time["ratio"] is None:
        return f"{time['step_us']['median']:.1f} us a step, {rung} has no parent, {device}"
    ratio = time["ratio"]
    return f"{ratio['median']:.3f} of {time['parent']} ({ratio['q1']:.3f} to {ratio['q3']:.3f}), {device}"


def device_words(config: Config, verdict: Mapping[str, Any], dumps: Path) -> str:
    """Label and device of the numbers, and the versions that computed them."""
    first = with_taps(config.prompts)[0]
    with DumpReader(dumps / f"{first}.h5") as dump:
        versions = dump.attrs.get("versions") or {}
    named = ", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions)
    return f"{verdict['label']}, {verdict['device']}; {named}"


def reference_words(config: Config) -> str:
    """What the reference was computed from."""
    settings = ", ".join(f"{name} {getattr(config, name)}" for name in SETTINGS)
    checkpoint, prompts = checkpoint_sha256(config.checkpoint)[:16], prompt_set_sha256(config)[:16]
    return f"checkpoint {checkpoint}, prompts {prompts}, {settings}"


def measured_sha256(verdict: Mapping[str, Any]) -> str:
    """Hash of what a verdict measured, whatever it is called and whenever it was made."""
    content = {name: verdict.get(name) for name in MEASURED}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return sha256(text.encode()).hexdigest()


def evidence(results: Path, config: Config, name: str) -> dict[str, str]:
    """Trailers of a rung of the ladder or of a commit: hash, branch or tag.

    Raises
    ------
    EvidenceError, ConfigError
        See :func:`of_rung` and :func:`of_commit`; no such commit.
    """
    if name in config.ladder:
        return of_rung(results, config, name)
    from dsv4.commits import branch, history

    try:
        sha = history.resolve(branch.repository(config), name)
    except ConfigError as error:
        rungs = ", ".join(rung.id for rung in config.ladder)
        raise EvidenceError(
            f"{name}: neither a rung nor a commit; rungs: {rungs}; commits: {error}"
        ) from error
    return of_commit(results, config, sha)


def lines(found: Mapping[str, str]) -> list[str]:
    """Trailers as they stand in a message."""
    return [f"{key}: {value}" for key, value in found.items()]


def command(config: Config, options: argparse.Namespace) -> int:
    """Print the trailers; see the module."""
    results = options.results or Path("results") / run_id(config)
    sys.stdout.write("".join(f"{line}\n" for line in lines(evidence(results, config, options.name))))
    return 0
