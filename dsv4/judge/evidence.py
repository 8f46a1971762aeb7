"""What an audit has to measure the plan's claims with."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from dsv4.config import Config, model_config
from dsv4.judge.launches import Sizes
from dsv4.judge.measure import Notes, read
from dsv4.ladder import LadderError
from dsv4.plan import flatten

OPS_FILE = Path(__file__).with_name("claims_ops.json")
Outcome = tuple[bool | None, str]  # whether a claim holds (None: not measured); what was measured, or why not


@dataclass
class Evidence:
    """What an audit has to measure claims with; files are read when a check asks.

    Attributes
    ----------
    results : folder of the run.
    config : its configuration.
    device : where it ran.
    rungs : ids of those whose measurements count; None: every table that is there.
    """

    results: Path
    config: Config
    device: str
    rungs: Collection[str] | None = None
    _tables: dict[str, tuple[pd.DataFrame, Notes] | None] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of the audited model."""
        return Sizes.of(model_config(self.config.checkpoint))

    @cached_property
    def _ops(self) -> Mapping[str, Any]:
        return json.loads(OPS_FILE.read_text())

    @property
    def ops(self) -> Mapping[str, float]:
        """Numbers of single ops, from ``derive_claims``."""
        return self._ops["values"]

    @property
    def ops_device(self) -> str:
        """Where those were measured, whatever the audit ran on."""
        return f"{self._ops['device']}, {OPS_FILE.name}"

    def judged(self) -> list[str]:
        """Ids of the rungs that count, in the order of the ladder."""
        return [rung.id for rung in self.config.ladder if self.rungs is None or rung.id in self.rungs]

    def plan(self, name: str) -> dict[str, str]:
        """Flattened plan of a rung; LadderError if this ladder has none of that name."""
        if name not in self.config.ladder:
            raise LadderError(f"the ladder has no rung {name}")
        return flatten(self.config.ladder[name].plan)

    def table(self, name: str) -> tuple[pd.DataFrame, Notes] | None:
        """Measurements of a rung, or None if it was not measured or they do not count."""
        if self.rungs is not None and name not in self.rungs:
            return None
        if name not in self._tables:
            path = self.results / "metrics" / f"{name}.parquet"
            self._tables[name] = read(path) if name in self.config.ladder and path.exists() else None
        return self._tables[name]


def needs_rungs(evidence: Evidence, *names: str) -> str:
    """Why a check cannot be made: rungs without measurements; or ""."""
    tables = {name: evidence.table(name) for name in names}
    missing = [name for name, table in tables.items() if table is None or table[0].empty]
    return f"not measured in this run: {', '.join(missing)}" if missing else ""
