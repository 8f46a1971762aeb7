"""Own cost, sum so far, budgets and counted costs of each rung, from its verdict."""

from typing import Any

import pandas as pd

from dsv4.report.frames import LEAST
from dsv4.report.load import Audit

WHAT = {"own": "own cost", "sum": "sum so far"}


def ledger(audit: Audit) -> pd.DataFrame:
    """Rows (measure, variant, what, value, shown, budget) of the spine.

    ``shown`` is the value where a log axis can hold it, else the axis' least.
    """
    rows = []
    for rung in audit.ladder:
        found = (audit.verdicts.get(rung.id) or {}).get("ledger") if rung.spine else None
        for key, what in WHAT.items():
            for measure, value in ((found or {}).get(key) or {}).items():
                budget = (((found or {}).get("budget")) or {}).get(measure)
                budget = budget.get(key) if isinstance(budget, dict) else budget
                if isinstance(value, int | float):
                    rows.append((measure, rung.id, what, float(value), max(float(value), LEAST), budget))
    return pd.DataFrame(rows, columns=["measure", "variant", "what", "value", "shown", "budget"])


def costs(audit: Audit) -> dict[str, Any]:
    """Counted costs by variant: column names, and a line of values for each variant that has some."""
    lines = []
    names: list[str] = []
    for rung in audit.ladder:
        cost = (audit.verdicts.get(rung.id) or {}).get("cost") or {}
        flat = {
            key: value
            for key, value in cost.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        names += [name for name in flat if name not in names]
        if flat:
            lines.append((rung.id, flat))
    return {"names": names, "lines": lines}
