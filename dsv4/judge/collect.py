"""Collect an audit: all verdicts and measurements in one file each, and the plan's claims."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from dsv4.config import Config, load
from dsv4.console import main_guard
from dsv4.files import newest, write_json, write_parquet
from dsv4.identity import git_state, versions
from dsv4.judge.broken import is_broken
from dsv4.judge.claims import judge_claims
from dsv4.judge.evidence import Evidence
from dsv4.judge.gate import SCHEMA, blocker, header, read_verdict
from dsv4.judge.measure import arguments
from dsv4.judge.onsets import asked
from dsv4.judge.reference_check import read_check
from dsv4.judge.residual_verdict import unjudged_residual
from dsv4.judge.text import Texts, with_text
from dsv4.judge.times import read_times, with_time
from dsv4.ladder import State, Variant
from dsv4.prompts import with_taps
from dsv4.salvage import current


def published(
    results: Path, config: Config, variant: Variant, target: str | None = None
) -> dict[str, Any] | None:
    """Verdict of a rung, unless what it stands on did not pass or it is one that nothing renewed.

    Files of earlier runs stay: above a rung that failed since, and of rungs on request, which ``all`` does not run
    (but for the residual's where a text asks for them).
    """
    verdict = read_verdict(results, variant.id)
    if verdict is None or blocker(results, config, variant):
        return None
    renewed = target or not variant.on_request or (variant in config.ladder.residuals() and asked(results))
    if not renewed and _expired(results, config, variant, verdict):
        return None
    return verdict


def _expired(results: Path, config: Config, variant: Variant, verdict: Mapping[str, Any]) -> bool:
    """Whether dumps, measurements or the verdicts below it are newer than a verdict, or it is of another change."""
    path = results / "gates" / f"{variant.id}.json"
    below = [path.with_name(f"{rung.id}.json") for rung in config.ladder.lineage(variant.id)[:-1]]
    prompts = with_taps(config.prompts)
    same = all(verdict.get(name) == header(variant)[name] for name in ("parent", "change"))
    return not (same and current(results, variant, prompts) and newest(path, below))


def unjudged(results: Path, config: Config, variant: Variant) -> dict[str, Any]:
    """Verdict of a rung without one: blocked, not needed, or not run, and why."""
    below = blocker(results, config, variant)
    if below and not variant.on_request:
        if below[1] == State.NOT_RUN:
            return header(variant) | {
                "status": State.NOT_RUN,
                "reasons": [f"waits for {below[0]}, which was not run"],
            }
        reason = f"blocked: it stands on {below[0]}, which is {below[1].replace('_', ' ')}"
        return header(variant) | {"status": State.BLOCKED, "reasons": [reason]}
    if "residual" in variant.change:
        return header(variant) | unjudged_residual(results, variant)
    how = f"on request: snakemake {variant.id}" if variant.on_request else "the run stopped before this gate"
    return header(variant) | {"status": State.NOT_RUN, "reasons": [how]}


def wanted(config: Config, target: str | None) -> list[Variant]:
    """A variant and its ancestors, those of ``B5``, or the whole ladder."""
    return config.ladder.about(target)


def collect(results: Path, config: Config, target: str | None = None) -> dict[str, Any]:
    """Verdicts of the ladder, or of a variant and its ancestors, as ``gates.json`` holds them."""
    verdicts = [
        published(results, config, rung, target) or unjudged(results, config, rung)
        for rung in wanted(config, target)
    ]
    times, texts = read_times(results), Texts(results, config)
    verdicts = [with_text(with_time(verdict, times), texts) for verdict in verdicts]
    manifest = _manifest(results)
    labels = sorted({str(v["label"]) for v in verdicts if v.get("label")})
    labels += [manifest["label"]] if manifest.get("label") else []
    reference = read_check(results, config.reference is not None)
    labels += [reference["text"]] if config.reference else []
    device = next((v["device"] for v in verdicts if v.get("device")), None)
    return {
        "schema": SCHEMA,
        "model": config.checkpoint.resolve().name,
        "device": device,
        "labels": labels,
        "target": target,
        "reference": reference,
        "run": run_identity(config, manifest, target, device),
        "variants": verdicts,
    }


def _manifest(results: Path) -> Mapping[str, Any]:
    path = results / "checkpoint.json"
    return json.loads(path.read_text()) if path.exists() else {}


def run_identity(
    config: Config, manifest: Mapping[str, Any], target: str | None, device: str | None
) -> dict[str, Any]:
    """Say what was asked, when, of which code, on what; a rung judged earlier names its own commit."""
    commit, dirty = git_state()
    other = "" if config.path.name == "config.yaml" else f" --configfile {config.path}"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"snakemake{other} {target or 'all'}",
        "commit": commit,
        "dirty": dirty,
        "device": device,
        "versions": versions(),
        "config_sha256": _sha256(config.path),
        "prompts_sha256": _sha256(config.prompts),
        "checkpoint_sha256": manifest.get("sha256"),
    }


def _sha256(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def concatenate(files: Sequence[Path], path: Path) -> int:
    """Join the variants' tables into one Parquet file; number of rows."""
    tables = [pq.read_table(file).replace_schema_metadata(None) for file in files]
    table = pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})
    write_parquet(path, table)
    return table.num_rows


def metrics_files(results: Path, names: Iterable[str]) -> list[Path]:
    """Tables of the variants that were measured."""
    return [path for name in names if (path := results / "metrics" / f"{name}.parquet").exists()]


def main() -> int:
    """Write ``gates.json``, ``metrics.parquet`` and ``claims.json``."""
    options = arguments(__doc__, "target").parse_args()
    config = load(options.config)
    gates = collect(options.results, config, options.target)
    rungs = wanted(config, options.target)
    names = [rung.id for rung in rungs if published(options.results, config, rung, options.target)]
    rows = concatenate(metrics_files(options.results, names), options.results / "metrics.parquet")
    claims = judge_claims(Evidence(options.results, config, gates["device"] or "none", names))
    write_json(options.results / "claims.json", claims)
    write_json(options.results / "gates.json", gates)
    counts = {state: sum(v["status"] == state for v in gates["variants"]) for state in State}
    text = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in counts.items() if count)
    lines = [f"collected: {text}; {rows} measurements, {len(claims)} claims"]
    lines += [f"{v['id']}: {v['reasons'][0]}" for v in gates["variants"] if is_broken(v)]
    Console(stderr=True).print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    main_guard(main)
