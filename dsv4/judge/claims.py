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
from dsv4.judge import claims_text as texts
from dsv4.judge import claims_timed as timed
from dsv4.judge.evidence import Evidence, Outcome
from dsv4.ladder import LadderError

FILE = Path(__file__).resolve().parents[2] / "data" / "claims.yaml"
Check = Callable[[Evidence], Outcome]
COUNTED: tuple[Check, ...] = (
    counted.p5_launches,
    counted.p5_two_launches,
    measured.moe_native,
    counted.gather_bytes,
    counted.fp8_share,
    counted.no_e5m2,
    counted.q_a_launches,
    counted.residual_fp32_memory,
)
ON_OPS: tuple[Check, ...] = (
    counted.p5_cos_unfused,
    counted.p5_cos_true,
    counted.p5_gsa,
    counted.p4_scalar_gsa,
    counted.kv_fp4_round_trip,
    texts.batched_prefill,
)
ON_VARIANTS: tuple[Check, ...] = (
    measured.kv_fp4_compounds,
    measured.rope_bf16,
    measured.index_fp4,
    measured.residual_magnitude,
    texts.stop_512,
)
DEVICES: tuple[tuple[tuple[Check, ...], Callable[[Evidence], str | None]], ...] = (
    (COUNTED, lambda evidence: "counted, on no device"),
    (ON_OPS, lambda evidence: evidence.ops_device),
    (ON_VARIANTS, lambda evidence: evidence.device),
    ((measured.mhc_non_expansive,), measured.reference_device),
    ((timed.fp8_rate, timed.index_share), timed.device),
)
CHECKS: Mapping[str, Check] = {check.__name__: check for checks, _ in DEVICES for check in checks}
DEVICE_OF = {check.__name__: device for checks, device in DEVICES for check in checks}


def judge_claims(evidence: Evidence) -> list[dict[str, Any]]:
    """Every claim of ``data/claims.yaml`` with what was measured, and where: holds, does_not or not_run."""
    rows = []
    for claim in yaml.safe_load(FILE.read_text()):
        row = {name: claim[name] for name in ("id", "section", "claim")}
        if "not_run" in claim:
            rows.append(row | _not_run(claim["not_run"]))
            continue
        try:
            holds, text = CHECKS[claim["check"]](evidence)
        except (DumpError, LadderError) as error:
            holds, text = None, str(error)
        if holds is None:
            rows.append(row | _not_run(text))
            continue
        found = {"state": "holds" if holds else "does_not", "measured": text, "reason": ""}
        rows.append(row | {"device": DEVICE_OF[claim["check"]](evidence)} | found)
    return rows


def _not_run(reason: str) -> dict[str, Any]:
    return {"device": None, "state": "not_run", "measured": None, "reason": reason}
