"""Artefacts of made-up audits of the real ladder, for the tests: no model runs, every state occurs."""

import json
from pathlib import Path
from typing import Any

import yaml

from dsv4.ladder import Ladder, Variant
from dsv4.report import sample_texts
from dsv4.report.sample_metrics import SIZE, measurements

CONFIG = Path(__file__).parents[2] / "config.yaml"
FAILED = {
    "P4_scalar_gsa": ("fail", 0, "attn_quant", "attn_in_q", "gain 0.62 in the worst row, limit 0.999"),
    "KV_nvfp4": ("fail", 2, "comp_store", "comp_store", "relative L2 0.091 to plain, limit 0.03"),
    "B1_rope_fp8": (
        "fail",
        4,
        "attend",
        "attn_out",
        "layer 4, attn_out (attend): rope: rel_l2 0.037 against trained is over 0.014 (attn_out.rope.rel_l2.trained)",
    ),
    "B2": (
        "fail",
        4,
        "index_topk",
        "topk",
        "layer 4, topk (index_topk): 12 of 40 entries differ in the worst row, limit 2",
    ),
    "B2_fp4": ("cannot_measure", None, None, None, "no row has more than index_topk visible entries"),
}
COST = {
    "time": None,
    "launches": 700,
    "bytes_per_token": 90112,
    "cache_bytes": 320000,
    "bytes_per_key": 328,
    "launches_delta": -40,
    "bytes_delta": -2048,
    "context": 1900,
}
POINTS = (
    ("attn_in_q", "all", "e2m1_e4m3_16"),
    ("kv_store", "nope", "e4m3_ue8m0_64"),
    ("kv_store", "rope", "bf16"),
    ("index_k_store", "all", "e4m3_fp32_row"),
)
BLOCKED = ("B3", "B4_router", "B4_swiglu", "B4_attn_out", "B4_head")


def status(variant: Variant, *, failing: bool) -> str:
    """State of a rung in the made-up audit."""
    if variant.on_request:
        return "not_run"
    if failing and variant.id in BLOCKED:
        return "blocked"
    return FAILED[variant.id][0] if failing and variant.id in FAILED else "pass"


def verdict(variant: Variant, *, failing: bool) -> dict[str, Any]:
    """One element of gates.json."""
    state = status(variant, failing=failing)
    found: dict[str, Any] = {
        "id": variant.id,
        "parent": variant.parent,
        "spine": variant.spine,
        "change": {name: list(pair) for name, pair in variant.change.items()},
        "commit": "0b6ca0d4c1",
        "status": state,
        "why": variant.why,
    }
    if state in ("blocked", "not_run"):
        reason = (
            "blocked: it stands on B2, which is fail"
            if state == "blocked"
            else f"on request: snakemake {variant.id}"
        )
        return found | {"reasons": [reason]}
    size = SIZE.get(variant.id, 1e-3)
    worst = {"prompt": "code", "step": 7, "layer": 5, "tap": "attn_out", "row": 131}
    found |= {
        "taps": [54, 74],
        "taps_by_mode": {"isolated": [36, 37], "compounded": [18, 37]},
        "cos": {"min": 1 - size**2, "mean": 1 - size**2 / 3, "per_layer": [1 - size**2] * 8, "worst": worst},
        "reasons": [],
        "not_exercised": ["clamp: never reached in layers 0, 1", "one page only in prompt capital"],
        "e2e": {"kl_nats": size / 9, "top1": 1 - size},
        "cost": COST,
        "culprit": None,
        "fidelity": "within",
        "fidelity_counts": {"outside": 0, "within": 60, "bit_equal": 190},
        "vs_parent": {"bit_equal": variant.id == "B1a"},
        "blast_radius": {"ok": True, "changed": []},
        "guard": {"moe": {"nvfp4": 72}, "linears": {"fp8": 40}, "batched_prefill": None},
        "ledger": {
            "own": {"kl_nats": size / 20, "rel_l2": size / 2},
            "sum": {"kl_nats": size / 9, "rel_l2": size},
            "budget": {"kl_nats": {"own": 2e-3, "sum": 1e-2}},
        },
        "confirmed": None,
        "quantisation": quantisation(variant.id, failing=failing),
        "limits": [
            {"tap": "attn_out", "metric": "rel_l2", "against": "trained", "mode": "isolated", "value": 0.03}
        ],
    }
    if state != "pass":
        _, layer, stage, tap, reason = FAILED[variant.id]
        found |= {"reasons": [reason], "fidelity": "outside"}
        if layer is not None:
            found["culprit"] = {"layer": layer, "stage": stage, "tap": tap, "prompt": "document", "row": 812}
            found["confirmed"] = {"repeat": True, "revert": True, "reapply": True, "confirmed": True}
    return found


def quantisation(variant: str, *, failing: bool) -> list[dict[str, Any]]:
    """Quantisation points of a verdict: correct stores, but for the codes of P4_scalar_gsa and a scale of KV_nvfp4."""
    lines = []
    for tap, part, form in POINTS:
        layers = [2, 4, 6] if tap == "index_k_store" else list(range(8))
        bad = failing and variant == "P4_scalar_gsa" and tap == "attn_in_q"
        line = {
            "tap": tap,
            "part": part,
            "format": form,
            "layers": layers,
            "bins": [[100, 200, 200, 300, 190, 10] if bad else [4, 500, 496, 0, 0, 0] for _ in layers],
            "beyond": [450 if bad else 0 for _ in layers],
            "largest": [2.7 if bad else 0.5 for _ in layers],
            "worst": [["code", "decode", 131] for _ in layers],
        }
        if part == "nope":
            wrong = [int(failing and variant == "KV_nvfp4" and layer == 6) for layer in layers]
            line |= {"unapplied": wrong, "undecoded": [0 for _ in layers]}
            line |= {"ratio": [[1.0, 2.0] if one else [1.0, 1.0] for one in wrong]}
        lines.append(line)
    return lines


CLAIMS = [
    ("P5 saves 5 x 2 x layers launches: 610, 430, 80", "80 on 8 layers", "holds", "counted from the op list"),
    (
        "mHC + RMSNorm + quantise: cosine 0.999 to unfused at T = 1, 8, 128",
        "0.99992 / 0.99991 / 0.99991",
        "holds",
        "",
    ),
    (
        "4-bit KV costs 0.4% a round trip (relative L2 of values)",
        "9.1%",
        "does_not",
        "NVFP4, 16 values a scale",
    ),
    ("FP8 doubles the matrix rate of QK", None, "not_run", "no GPU on this device"),
]


def casts() -> dict[str, Any]:
    """A sweep's list: one cast open, one fixed, one exempt."""
    place = {"file": "engine/layers.py", "line": 40, "text": "norm(x)"}
    common = {"file": "engine/layers.py", "end_line": 41, "column": 30, "producer": place, "grep": True}
    common |= {
        "direction": "widened_after_narrow",
        "source": "bfloat16",
        "target": "float32",
        "text": "x.float()",
    }
    common |= {"bytes_now": 12, "bytes_fixed": 8, "consumer": place | {"line": 43, "text": "head(…)"}}
    step = {rung: {"bytes": 1536, "calls": 1} for rung in ("B0", "B3")}
    head = common | {"line": 41, "status": "fixed", "reason": "B4_head", "step": step}
    meant = common | {"line": 52, "status": "exempt", "reason": "the record is narrow", "step": {}}
    gate = common | {"line": 60, "status": "open", "reason": "", "producer": None, "source": ""}
    gate |= {"direction": "unclear", "bytes_now": None, "bytes_fixed": None, "step": {}}
    return {
        "schema": 1,
        "clean": False,
        "files": 12,
        "rungs": ["B0", "B3", "B4_head"],
        "context": 300,
        "count": {"open": 1, "fixed": 1, "exempt": 1, "free": 4},
        "free": {"in registers": 4},
        "casts": [head, meant, gate],
        "grep": {"hits": 4, "no_cast": ["engine/layers.py:7"]},
        "problems": [{"file": "engine/layers.py", "line": 9, "said": "stale: no cast on line 9"}],
        "warnings": ["engine/old.py:1: not swept, it does not parse: invalid syntax"],
    }


STEP = {"file": "dsv4/run/variant.py", "line": 9, "how": "import"}
CHAIN = [STEP, {"file": "dsv4/old/index.cu", "line": None, "how": ""}]
REACHED: dict[str, Any] = {
    "entries": ["dsv4.run.variant"],
    "counts": {"live": 170, "maybe": 2, "types only": 0, "dead": 52},
    "left_out": {"tests": 149},
    "live": [{"file": "dsv4/old/index.cu", "status": "live", "chain": CHAIN}],
    "dead": ["kernels/sanitize.py"],
    "unknown": [{"file": "kernels/build/collect.py", "line": 41, "text": "import_module of <a> name"}],
    "broken": [],
    "embedded": [],
}
CODE = {
    "schema": 1,
    "variant": REACHED,
    "workflow": REACHED,
    "archived": [
        {"glob": "dsv4/old/*.cu", "files": 1, "verdict": "maybe", "met": {"B2": [REACHED["live"][0]]}},
        {"glob": "kernels/old/*", "files": 3, "verdict": "dead", "met": {}},
    ],
}


def write(results: Path, *, failing: bool = True) -> Path:
    """Write a whole results folder and return it."""
    ladder = Ladder(yaml.safe_load(CONFIG.read_text())["ladder"])
    results.mkdir(parents=True)
    run = {
        "date": "2026-01-31T12:00:00+00:00",
        "command": "snakemake all",
        "commit": "0b6ca0d4c1",
        "dirty": False,
        "device": "cpu",
        "versions": {"torch": "2.13.0", "numpy": "2.4.6"},
        "config_sha256": "5d41402a" + "0" * 56,
        "prompts_sha256": "77aa01bc" + "0" * 56,
        "checkpoint_sha256": "3f2a9c1d" + "0" * 56,
    }
    gates = {
        "schema": 1,
        "model": "nano",
        "device": "cpu",
        "labels": ["emulated on cpu", "trained nano weights"],
        "run": run,
        "variants": [verdict(variant, failing=failing) for variant in ladder],
    }
    keys = ("claim", "measured", "state", "reason")
    claims = [dict(zip(keys, row, strict=True), device="cpu", section="B1") for row in CLAIMS]
    good = [rung for rung in ladder if status(rung, failing=failing) == "pass"]
    above = [(rung, [below.id for below in ladder.lineage(rung.id)]) for rung in good]
    sample_texts.write(results, above, gates["variants"])
    (results / "gates.json").write_text(json.dumps(gates))
    (results / "claims.json").write_text(json.dumps(claims))
    (results / "casts.json").write_text(json.dumps(casts()))
    (results / "closure.json").write_text(json.dumps(CODE))
    (results / "checkpoint.json").write_text(
        json.dumps({"sha256": run["checkpoint_sha256"], "num_hidden_layers": 8})
    )
    measurements(
        [rung.id for rung in ladder if status(rung, failing=failing) not in ("blocked", "not_run")],
        FAILED if failing else {},
    ).to_parquet(results / "metrics.parquet")
    return results
