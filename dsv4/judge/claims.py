"""The plan's claims, measured where this audit can measure them.

A check takes the :class:`Evidence` of an audit and gives (holds, what was measured); None for
``holds``: it was not measured, and the text says why.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from dsv4.dump import DumpError
from dsv4.judge import claims_counted as counted
from dsv4.judge import claims_measured as measured
from dsv4.judge.evidence import Evidence, Finding
from dsv4.ladder import LadderError

FILE = Path(__file__).resolve().parents[2] / "data" / "claims.yaml"
CHECKS: Mapping[str, Callable[[Evidence], Finding]] = {
    check.__name__: check
    for check in (
        counted.p5_launches,
        counted.p5_two_launches,
        counted.p5_cos_unfused,
        counted.p5_cos_true,
        counted.p5_gsa,
        counted.p4_scalar_gsa,
        measured.moe_native,
        counted.kv_fp4_round_trip,
        measured.kv_fp4_compounds,
        counted.gather_bytes,
        counted.fp8_share,
        measured.rope_bf16,
        counted.no_e5m2,
        measured.index_fp4,
        counted.q_a_launches,
        measured.residual_magnitude,
        counted.residual_fp32_memory,
        measured.mhc_non_expansive,
        counted.batched_prefill,
    )
}


def judge_claims(evidence: Evidence) -> list[dict[str, Any]]:
    """Every claim of ``data/claims.yaml`` with what was measured: holds, does_not or not_run."""
    rows = []
    for claim in yaml.safe_load(FILE.read_text()):
        row = {name: claim[name] for name in ("id", "section", "claim")} | {"device": evidence.device}
        if "not_run" in claim:
            rows.append(row | {"state": "not_run", "measured": None, "reason": claim["not_run"]})
            continue
        try:
            holds, text = CHECKS[claim["check"]](evidence)
        except (DumpError, LadderError) as error:
            holds, text = None, str(error)
        state = "not_run" if holds is None else "holds" if holds else "does_not"
        measured, reason = (None, text) if holds is None else (text, "")
        rows.append(row | {"state": state, "measured": measured, "reason": reason})
    return rows
