"""A report after a crash: render what was judged, without verdicts that the crash made stale.

A job that fails takes its outputs with it, but the verdict that an earlier run drew from them
stays. So a verdict counts only when the dumps and metrics below it are there and no newer, the noise
that the page draws only while its plan's dumps are, a text while these and the reference's are, and what
the residual's A/B says only while no verdict is newer.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dsv4.config import Config
from dsv4.files import newest
from dsv4.judge.onsets import REPETITION, asked
from dsv4.judge.residual_verdict import FILE as RESIDUAL
from dsv4.ladder import State, Variant
from dsv4.prompts import with_text

PAGE = Path("reports/index.html")


def current(results: Path, variant: Variant, prompts: Sequence[str]) -> bool:
    """Whether the verdict on ``variant`` rests on files that are there and older than it."""
    below = [results / "metrics" / f"{variant.id}.parquet", *_dumps(results, variant, prompts)]
    return newest(results / "gates" / f"{variant.id}.json", below)


def _dumps(results: Path, variant: Variant, prompts: Sequence[str]) -> list[Path]:
    return [results / "variants" / variant.id / f"{prompt}.h5" for prompt in prompts]


def drop_stale(results: Path, config: Config, prompts: Sequence[str]) -> list[str]:
    """Delete every verdict that is not current, or that stands on one; return their variants."""
    stale: set[str] = set()
    for variant in config.ladder:
        verdict = results / "gates" / f"{variant.id}.json"
        if variant.parent in stale or not current(results, variant, prompts):
            stale.add(variant.id)
            if verdict.is_file():
                verdict.unlink()
        noise = results / "noise" / f"{variant.id}.parquet"
        if not newest(noise, _dumps(results, variant, prompts)):
            noise.unlink(missing_ok=True)
        text = results / "text" / f"{variant.id}.json"
        if not newest(text, [results / "text/trained.h5", *_dumps(results, variant, prompts)]):
            text.unlink(missing_ok=True)
            text.with_suffix(".parquet").unlink(missing_ok=True)
    spine = [f"{rung.id}.json" for rung in config.ladder.spine()]
    verdicts = list((results / "gates").glob("*.json"))
    for path, below in (
        (results / REPETITION, [verdict for verdict in verdicts if verdict.name in spine]),
        (results / RESIDUAL, verdicts),
    ):
        if not newest(path, below):
            path.unlink(missing_ok=True)
    return sorted(stale)


def due(results: Path, config: Config, target: str | None) -> list[Variant]:
    """What a call judges: a target and its ancestors, or all but what is on request and that nothing asks for."""
    if target:
        return config.ladder.about(target)
    return config.ladder.default() + (config.ladder.residuals() if asked(results) else [])


def complete(results: Path, config: Config, prompts: Sequence[str], target: str | None) -> bool:
    """Whether every verdict, and every text of a rung that passed, that is due is there, current, and on the page.

    Then the run ended in ``enforce``, not in a crash.
    """
    gates = results / "gates.json"
    if not gates.is_file() or not PAGE.is_file() or gates.stat().st_mtime_ns > PAGE.stat().st_mtime_ns:
        return False
    passed: set[str | None] = {None}
    texts = with_text(config.prompts)
    for rung in due(results, config, target):
        if rung.parent not in passed:
            continue  # blocked: no verdict is due
        verdict = results / "gates" / f"{rung.id}.json"
        if not current(results, rung, prompts) or verdict.stat().st_mtime_ns > gates.stat().st_mtime_ns:
            return False
        if json.loads(verdict.read_text(encoding="utf-8"))["status"] != State.PASS:
            continue
        passed.add(rung.id)
        text = results / "text" / f"{rung.id}.json"
        if texts and rung.engine is None and rung.commit is None and not newest(gates, [text]):
            return False
    return True


def salvage(results: Path, config: Config, prompts: Sequence[str], target: str | None) -> str:
    """Render a page from what there is, unless there is one; return a line that says what it shows."""
    if complete(results, config, prompts, target):
        return f"the audit is complete, and a rung of the spine did not pass: see {PAGE}"
    if len(drop_stale(results, config, prompts)) == len(list(config.ladder)):
        return "the run stopped before its first verdict; there is nothing to show yet"
    options = ["--results", str(results), "--config", str(config.path)]
    options += ["--target", target] if target else []
    commands = ([sys.executable, "-m", stage, *options] for stage in ("dsv4.judge.collect", "dsv4.report"))
    rendered = all(subprocess.run(command, check=False).returncode == 0 for command in commands)
    # Left there, these two would look finished to the next run.
    for name in ("gates.json", "enforced.ok"):
        (results / name).unlink(missing_ok=True)
    return f"the run stopped early; {PAGE} shows what was judged until then" if rendered else ""
