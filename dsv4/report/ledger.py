"""Own cost, sum so far, budgets and counted costs of each rung, from its verdict."""

from typing import Any

import pandas as pd

from dsv4.report.load import Audit

WHAT = {"own": "own cost", "sum": "sum so far"}


def ledger(audit: Audit) -> pd.DataFrame:
    """Rows (measure, variant, what, value, budget) of the spine; values that a log axis can hold."""
    rows = []
    for rung in audit.ladder:
        found = (audit.verdicts.get(rung.id) or {}).get("ledger") if rung.spine else None
        for key, what in WHAT.items():
            for measure, value in ((found or {}).get(key) or {}).items():
                budget = (((found or {}).get("budget")) or {}).get(measure)
                budget = budget.get(key) if isinstance(budget, dict) else budget
                if isinstance(value, int | float) and value > 0:
                    rows.append((measure, rung.id, what, float(value), budget))
    return pd.DataFrame(rows, columns=["measure", "variant", "what", "value", "budget"])


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
