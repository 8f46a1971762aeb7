"""Claims about time, which only a device can answer: from this machine's ``bench.json``, else the published one."""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.judge.evidence import Evidence, Outcome

PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "bench.json"
NO_BENCH = "no device was timed: run snakemake bench on a machine with a GPU"
TWICE = 1.9  # from this ratio on, two rates measured one after the other count as twice
WHOLE = re.compile(r"B=(\d+), top (\d+) of (\d+) entries")  # rows of kernels/index_topk/bench.py


@dataclass(frozen=True)
class Bench:
    """What the benchmark found on the device that it last ran on.

    Attributes
    ----------
    device : its name and the day.
    ceilings : of its last run that has any.
    rows : all that was timed on it.
    """

    device: str
    ceilings: Mapping[str, Any]
    rows: list[Mapping[str, Any]]


def bench(evidence: Evidence) -> Bench | None:
    """The newest benchmark: beside the results, else the published one."""
    for path in (evidence.results.resolve().parent / "bench.json", PUBLISHED):
        with suppress(OSError, ValueError):
            content = json.loads(path.read_text())
            runs = {key: run for key, run in content["runs"].items() if run["device"]}
            if runs:
                return _newest(runs, content["rows"])
    return None


def _newest(runs: Mapping[str, Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> Bench:
    last = max(runs.values(), key=lambda run: run["date"])
    name = last["device"]["name"]
    mine = {key: run for key, run in runs.items() if run["device"]["name"] == name}
    dated = sorted(mine.values(), key=lambda run: run["date"], reverse=True)
    ceilings = next((run["ceilings"] for run in dated if run.get("ceilings")), {})
    return Bench(f"{name}, {last['date'][:10]}", ceilings, [row for row in rows if row["run"] in mine])


def device(evidence: Evidence) -> str | None:
    """Device and day of the benchmark."""
    found = bench(evidence)
    return found.device if found else None


def fp8_rate(evidence: Evidence) -> Outcome:
    """FP8 over BF16 FLOPs a second, both as torch multiplies large matrices."""
    found = bench(evidence)
    if found is None:
        return None, NO_BENCH
    rates = found.ceilings.get("flops_per_s", {})
    if not {"bf16", "fp8"} <= rates.keys():
        return None, f"the benchmark of {found.device} has no rate of both"
    ratio, size = rates["fp8"] / rates["bf16"], found.ceilings["matrix"]
    tera = [f"{name.upper()} {rates[name] / 1e12:.0f} TFLOP/s" for name in ("fp8", "bf16")]
    text = f"{ratio:.2f} times: {', '.join(tera)}, sustained by torch's products of {size} x {size} matrices"
    return ratio >= TWICE, f"{text} (twice: from {TWICE} on)"


def index_share(evidence: Evidence) -> Outcome:
    """Share of the FP32 einsum in the time of scores and choice as they were: einsum, then torch.topk."""
    found = bench(evidence)
    if found is None:
        return None, NO_BENCH
    taken = {row["name"]: us for row in found.rows if (us := _replaced(row)) and row["op"] == "index_topk"}
    shares = {}
    for name, whole in taken.items():
        if match := WHOLE.match(name):
            batch, chosen, entries = match.groups()
            choice = taken.get(f"top {chosen} of {batch} x {entries}")
            if choice:
                shares[f"{batch} x {entries} entries"] = 1 - choice / whole
    if not shares:
        return None, f"the benchmark of {found.device} has no indexer beside what it replaces"
    text = ", ".join(f"{share:.0%} at {shape}" for shape, share in shares.items())
    return min(shares.values()) > 0.5, f"share of the einsum in scores + choice, before B2: {text}"


def _replaced(row: Mapping[str, Any]) -> float | None:
    """Median microseconds of what a row's kernel replaces."""
    return ((row["paths"].get("replaced") or {}).get("us") or {}).get("median")
