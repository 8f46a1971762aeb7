"""What the page is made from: an audit's artefacts, read whole or named as missing.

A file that is absent or unreadable (a crash) becomes a :class:`Gap` and the page says so. A
file that is there and says something of the wrong type is an error: a page must not guess.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pandas as pd
import pyarrow as pa
import yaml
from jsonschema.exceptions import best_match

from dsv4.config import ConfigError
from dsv4.config import load as load_config
from dsv4.ladder import B5, Ladder, State, Variant
from dsv4.report import casts
from dsv4.report.kernels import Kernels
from dsv4.report.kernels import load as load_kernels
from dsv4.report.measurements import ReportError, empty_metrics, labels, read
from dsv4.report.text_files import Texts
from dsv4.report.text_files import load as load_texts

CLAIM_STATES = {"holds": "holds", "does_not": "does not", "not_run": "not run"}  # and how the page says them


@dataclass(frozen=True)
class Gap:
    """Something that a whole audit has and this one has not."""

    what: str
    why: str


@dataclass
class Audit:
    """All that the page shows.

    Attributes
    ----------
    run : name of the results folder.
    ladder : the rungs to show, parents first: the target's lineage, or all.
    verdicts : the gate's verdict of each variant that has one.
    head : gates.json without its variants.
    metrics : rows of those variants.
    noise : rows of the draws of a plan's free runs, see :mod:`dsv4.run.noise`; empty if not drawn.
    claims : the plan's claims, or None if not written.
    checkpoint : the checkpoint's manifest, or empty.
    labels : commit, versions, seed and device of the last variant that was measured, or empty.
    casts : the cast sweep's list, or empty.
    kernels : what was built and timed beside the audit.
    code : which code runs, see :mod:`dsv4.judge.reached`, or None if not written.
    texts : what the rungs that passed wrote, and B5's verdict.
    gaps : what is missing and why.
    """

    run: str
    ladder: list[Variant]
    target: str | None = None
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)
    metrics: pd.DataFrame = field(default_factory=empty_metrics)
    noise: pd.DataFrame = field(default_factory=empty_metrics)
    claims: list[dict[str, Any]] | None = None
    checkpoint: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)
    casts: dict[str, Any] = field(default_factory=dict)
    kernels: Kernels = field(default_factory=Kernels)
    code: dict[str, Any] | None = None
    texts: Texts = field(default_factory=Texts)
    gaps: list[Gap] = field(default_factory=list)

    def state(self, rung: Variant) -> State:
        """State of a rung; without a verdict: blocked if what it stands on failed, else not run."""
        if rung.id in self.verdicts:
            return State(self.verdicts[rung.id]["status"])
        return State.BLOCKED if self.stopped(rung) else State.NOT_RUN

    def stopped(self, rung: Variant) -> bool:
        """Whether something that a rung stands on failed or could not be measured."""
        below = next((other for other in self.ladder if other.id == rung.parent), None)
        stops = (State.FAIL, State.BLOCKED, State.CANNOT_MEASURE)
        return below is not None and (self.state(below) in stops or self.stopped(below))


def load(results: Path, config: Path, target: str | None = None) -> Audit:
    """Read an audit.

    Raises
    ------
    ReportError
        No such results folder, a configuration that cannot be read, or an artefact with a
        wrong type in it.
    """
    if not results.is_dir():
        raise ReportError(
            f"--results {results}: no such folder; run `snakemake all`, or name a folder under results/"
        )
    ladder = _ladder(config)
    rungs = ladder.about(target)
    audit = Audit(run=results.resolve().name, ladder=rungs, target=target)
    wanted = [rung.id for rung in rungs]
    _gates(audit, results, wanted)
    audit.metrics = _metrics(audit, results, wanted)
    measured = [name for name in wanted if name in set(audit.metrics["variant"])]
    drawn = [path for name in measured if (path := results / "noise" / f"{name}.parquet").is_file()]
    audit.noise = _tables(audit, results, drawn[:1], wanted)
    claims = _json(audit, results / "claims.json", "the plan's claims were not judged")
    audit.claims = None if claims is None else _claims(claims, results / "claims.json")
    manifest = _json(audit, results / "checkpoint.json", "the checkpoint was not read")
    audit.checkpoint = manifest if isinstance(manifest, dict) else {}
    tables = (labels(results / "metrics" / f"{name}.parquet") for name in reversed(measured))
    audit.labels = next((found for found in tables if found), {})
    audit.kernels = load_kernels(results)
    audit.casts, why = casts.load(results)
    audit.gaps += [Gap("casts.json", why)] if why else []
    audit.code = _json(audit, results / "closure.json", "which code runs was not looked at")
    audit.texts = load_texts(results, [rung.id for rung in rungs if _texted(audit, rung)])
    audit.gaps += [Gap(*gap) for gap in audit.texts.gaps]
    audit.gaps += _unjudged(audit)
    return audit


def _texted(audit: Audit, rung: Variant) -> bool:
    """Whether a rung's text may be shown: it passed, and its judge did not refuse the files as another run's."""
    text = audit.verdicts.get(rung.id, {}).get("e2e") or {}
    return audit.state(rung) is State.PASS and not (text.get("text_note") and not text.get("text"))


def _unjudged(audit: Audit) -> list[Gap]:
    """Rungs that should have been judged and were not, unless a blocker explains it; and no measurements."""
    asked = [
        rung
        for rung in audit.ladder
        if not rung.on_request
        or rung.id == audit.target
        or (audit.target == B5 and "residual" in rung.change)
    ]
    names = [rung.id for rung in asked if audit.state(rung) is State.NOT_RUN and not audit.stopped(rung)]
    reasons = (audit.verdicts.get(names[0]) or {}).get("reasons") if names else None
    why = (reasons or ["the run stopped before these gates"])[0]
    said = ", ".join(names) if len(names) < 7 else f"{len(names)} rungs, {names[0]} to {names[-1]}"
    gaps = [Gap(f"verdicts of {said}", why)] if names else []
    return gaps + ([Gap("measurements", "no variant was measured")] if audit.metrics.empty else [])


def _ladder(config: Path) -> Ladder:
    try:
        return load_config(config).ladder
    except ConfigError as error:
        raise ReportError(f"--config {config}: no ladder can be read from it: {error}") from error


def _json(audit: Audit, path: Path, why: str) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        audit.gaps.append(Gap(path.name, why))
    except (OSError, json.JSONDecodeError) as error:
        audit.gaps.append(Gap(path.name, f"cannot be read: {error}"))
    return None


def _gates(audit: Audit, results: Path, wanted: Sequence[str]) -> None:
    """Verdicts from gates.json, or one by one from gates/ when they were not collected."""
    path = results / "gates.json"
    data = _json(audit, path, "verdicts were not collected; single verdicts under gates/ are shown")
    if data is None:
        loose = (_json(audit, file, "") for file in sorted((results / "gates").glob("*.json")))
        path, data = results / "gates", {"variants": [verdict for verdict in loose if verdict is not None]}
    schema = yaml.safe_load((Path(__file__).parent / "gates.schema.yaml").read_text())
    error = best_match(jsonschema.Draft202012Validator(schema).iter_errors(data))
    if error:
        place = ".".join(str(step) for step in error.absolute_path) or "top level"
        raise ReportError(f"{path}: {place}: {error.message[:300]}")
    audit.head = {key: value for key, value in data.items() if key != "variants"}
    found = {verdict["id"]: verdict for verdict in data["variants"]}
    audit.verdicts = {name: found[name] for name in wanted if name in found}
    if not audit.head:  # not collected: verdicts of an earlier run may lie above a rung that did not hold
        old = [rung.id for rung in audit.ladder if audit.stopped(rung)]
        audit.verdicts = {name: verdict for name, verdict in audit.verdicts.items() if name not in old}


def _metrics(audit: Audit, results: Path, wanted: Sequence[str]) -> pd.DataFrame:
    """Rows of the wanted variants from metrics.parquet, or from metrics/ when not collected."""
    path = results / "metrics.parquet"
    files = [path] if path.is_file() else sorted((results / "metrics").glob("*.parquet"))
    if not path.is_file():
        audit.gaps.append(
            Gap(path.name, f"measurements were not collected; {len(files)} single files are shown")
        )
    return _tables(audit, results, files, wanted)


def _tables(audit: Audit, results: Path, files: Sequence[Path], wanted: Sequence[str]) -> pd.DataFrame:
    """Rows of the wanted variants; a file that cannot be read is a gap."""
    frames = []
    for file in files:
        try:
            frames.append(read(file, wanted))
        except (OSError, pa.ArrowInvalid) as error:
            audit.gaps.append(Gap(str(file.relative_to(results)), f"cannot be read: {str(error)[:200]}"))
    return pd.concat([empty_metrics(), *frames], ignore_index=True) if frames else empty_metrics()


def _claims(data: Any, path: Path) -> list[dict[str, Any]]:
    if not isinstance(data, list) or not all(isinstance(row, dict) for row in data):
        raise ReportError(f"{path}: expected a list of claims")
    for number, row in enumerate(data):
        state = row.get("state")
        if state not in CLAIM_STATES:
            raise ReportError(
                f"{path}: claim {number}: state = {state!r}; allowed: {', '.join(CLAIM_STATES)}"
            )
        if not isinstance(row.get("claim"), str):
            raise ReportError(f"{path}: claim {number}: claim = {row.get('claim')!r}, expected a sentence")
    return [row | {"state": CLAIM_STATES[row["state"]]} for row in data]
