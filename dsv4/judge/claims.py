"""The plan's claims, measured where this audit can measure them.

A check takes the :class:`Evidence` of an audit and gives (holds, what was measured); None for
``holds``: it was not measured, and the text says why.
"""

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from dsv4.config import Config, model_config
from dsv4.dump import DumpReader
from dsv4.judge.evaluate import layer_value, select
from dsv4.judge.launches import Sizes, key_bytes, mhc_site, q_a_site, step_bytes
from dsv4.judge.measure import Notes, read
from dsv4.plan import flatten
from dsv4.taps import PHASES

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "data" / "claims.yaml"
OPS_FILE = Path(__file__).with_name("claims_ops.json")
Finding = tuple[bool | None, str]


@dataclass
class Evidence:
    """What an audit has to measure claims with; files are read when a check asks.

    Attributes
    ----------
    results : folder of the run.
    config : its configuration.
    device : where it ran.
    """

    results: Path
    config: Config
    device: str
    _tables: dict[str, tuple[pd.DataFrame, Notes] | None] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of the audited model."""
        return Sizes.of(model_config(self.config.checkpoint))

    @cached_property
    def ops(self) -> Mapping[str, float]:
        """Numbers of single ops, from ``derive_claims``."""
        return json.loads(OPS_FILE.read_text())["values"]

    def plan(self, name: str) -> dict[str, str]:
        """Flattened plan of a rung."""
        return flatten(self.config.ladder[name].plan)

    def table(self, name: str) -> tuple[pd.DataFrame, Notes] | None:
        """Measurements of a rung, or None if it was not measured."""
        if name not in self._tables:
            path = self.results / "metrics" / f"{name}.parquet"
            self._tables[name] = read(path) if name in self.config.ladder and path.exists() else None
        return self._tables[name]


def needs_rungs(evidence: Evidence, *names: str) -> str:
    """Why a check cannot be made: rungs without measurements; or ""."""
    missing = [name for name in names if evidence.table(name) is None]
    return f"not measured in this run: {', '.join(missing)}" if missing else ""


def p5_launches(evidence: Evidence) -> Finding:
    """Sum over the layers of the audited model, and of the plan's two."""
    before, after = (mhc_site(evidence.plan(name)) for name in ("B0_unfused", "P5"))
    saved = {
        layers: 2 * layers * (before - after) for layers in (61, 43, len(evidence.sizes.compress_ratios))
    }
    text = ", ".join(f"{count} at {layers} layers" for layers, count in saved.items())
    step = mhc_site(evidence.plan("P4")) - after
    return (
        saved[61] == 610,
        f"counted from the op list: {text}; {step} of {before - after} a site is P5's own, the rest P4's",
    )


def p5_two_launches(evidence: Evidence) -> Finding:
    """The op list of one site."""
    before, after = (mhc_site(evidence.plan(name)) for name in ("B0_unfused", "P5"))
    return (before, after) == (7, 2), f"counted from the op list: {before} -> {after}"


def _cosines(evidence: Evidence, name: str, least: float) -> Finding:
    found = {tokens: evidence.ops[f"{name}.T{tokens}"] for tokens in (1, 8, 128)}
    text = ", ".join(f"{value:.4f} at T = {tokens}" for tokens, value in found.items())
    return all(
        round(value, 3) >= least for value in found.values()
    ), f"{text} (Gaussian streams, hidden 7168)"


def p5_cos_unfused(evidence: Evidence) -> Finding:
    """Both quantised: what the BF16 stores between move."""
    return _cosines(evidence, "mhc_fused_vs_unfused", 0.999)


def p5_cos_true(evidence: Evidence) -> Finding:
    """Quantised against exact: this is NVFP4's own error."""
    return _cosines(evidence, "mhc_fused_vs_exact", 0.995)


def p5_gsa(evidence: Evidence) -> Finding:
    """Mean absolute difference of the rows' gsa."""
    found = [evidence.ops[f"gsa_difference.T{tokens}"] for tokens in (1, 8, 128)]
    text = f"mean absolute difference {min(found):.1e} to {max(found):.1e} at T = 1, 8, 128"
    return max(found) <= 2.5e-6, text


def p4_scalar_gsa(evidence: Evidence) -> Finding:
    """What one gsa for all rows does: in the GEMM's epilogue, as the plan has it, or in both places."""
    ops = evidence.ops
    text = (
        f"undone with the maximum, rows of 128 have gains of {ops['scalar_gsa.gain_mean']:.2f} on average and up to"
        f" {ops['scalar_gsa.gain_worst']:.2f}, which no cosine shows; made with it too, {ops['launch_gsa.changed']:.0%}"
        f" of values change (relative L2 {ops['launch_gsa.rel_l2']:.3f}) and a row depends on its batch"
    )
    return ops["scalar_gsa.rel_l2"] < 1e-3, f"{text}; hence gsa per row"


def moe_native(evidence: Evidence) -> Finding:
    """Stored formats in the checkpoint's manifest; and that no plan field names experts' weights."""
    path = evidence.results / "checkpoint.json"
    if not path.exists():
        return None, f"{path.name} is not there"
    formats = json.loads(path.read_text()).get("formats", {})
    experts = {name: fmt for name, fmt in formats.items() if ".experts." in name and "weight" in name}
    experts = experts or {name: fmt for name, fmt in formats.items() if ".experts." in name}
    kinds = sorted({str(fmt) for fmt in experts.values()})
    if not experts:
        return None, "the manifest lists no expert tensors"
    return kinds == [
        "nvfp4"
    ], f"{len(experts)} expert tensors are stored as {', '.join(kinds)}; no plan field sets them"


def kv_fp4_round_trip(evidence: Evidence) -> Finding:
    """0.4% needs its unit: it is 1 - cosine."""
    ops = evidence.ops
    loss, far = ops["kv_fp4.one_minus_cos"], ops["kv_fp4.rel_l2"]
    eight = f"FP8: {ops['kv_fp8.one_minus_cos']:.2%} and {ops['kv_fp8.rel_l2']:.1%}"
    text = f"1 - cosine {loss:.2%}, relative L2 {far:.1%} a round trip ({eight}); the 0.4% is 1 - cosine"
    return 0.003 <= loss <= 0.005, text


def kv_fp4_compounds(evidence: Evidence) -> Finding:
    """KL and the depth profile of the ruled-out leaf beside its parent's; 61 layers cannot be had here."""
    if gap := needs_rungs(evidence, "KV_nvfp4", "B0"):
        return None, gap
    lines = []
    for name in ("KV_nvfp4", "B0"):
        frame = evidence.table(name)[0]  # type: ignore[index]
        free = select(frame[frame["step"] < 0], mode="compounded", against="plain", part="all")
        kl = layer_value(select(free, tap="logits"), "kl_nats")
        far = layer_value(select(free, tap="attn_out"), "rel_l2")
        ends = f"{far.iloc[0]:.2g} in layer 0, {far.iloc[-1]:.2g} in the last"
        lines.append(f"{name}: KL {kl.iloc[0]:.2g} nats, attn_out off by {ends}")
    depth = len(evidence.sizes.compress_ratios)
    text = f"over {depth} layers, free run against plain: {'; '.join(lines)}"
    return None, f"{text}; 61 layers were not run: this checkpoint has {depth}"


def gather_bytes(evidence: Evidence) -> Finding:
    """Bytes that move for one key, at the plan's head_dim and at the audited model's."""
    lines, ratios = [], []
    for head_dim in dict.fromkeys((512, evidence.sizes.head_dim)):
        wide, narrow = (key_bytes(evidence.plan(name), head_dim) for name in ("B0", "B1a"))
        ratios.append(sum(narrow.values()) / sum(wide.values()))
        parts = " + ".join(str(value) for value in wide.values())
        lines.append(f"head_dim {head_dim}: {parts} = {sum(wide.values())} becomes {sum(narrow.values())}")
    return max(ratios) <= 0.5, "; ".join(lines)


def fp8_share(evidence: Evidence) -> Finding:
    """Share of attention's multiply-adds whose two operands are FP8, by rung."""
    size = evidence.sizes.head_dim
    shares = {name: _share(evidence.plan(name), size) for name in ("B0", "B1", "B1_rope_fp8", "B1_pv_fp8")}
    text = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    note = "share of attention's multiply-adds that are FP8 x FP8 (QK's nope part alone in B1)"
    return shares["B1"] > 0.5, f"{note}: {text}"


def _share(plan: Mapping[str, str], size: int) -> float:
    nope, rope = size - 64, 64
    narrow = (
        nope * (plan["q_format"] != "bf16")
        + rope * (plan["rope_format"] == "fp8")
        + nope * (plan["pv_format"] == "fp8")
    )
    return narrow / (2 * size)


def rope_bf16(evidence: Evidence) -> Finding:
    """Both cosines against B0's BF16 attention, lowest layer."""
    if gap := needs_rungs(evidence, "B1", "B1_rope_fp8"):
        return None, gap
    found = {}
    for name in ("B1", "B1_rope_fp8"):
        frame = evidence.table(name)[0]  # type: ignore[index]
        found[name] = float(select(frame, against="B0", tap="attn_out", part="all")["cos"].min())
    drop = found["B1"] - found["B1_rope_fp8"]
    advice = "keep BF16" if drop > 1 - found["B1"] else "may adopt"
    text = f"lowest cosine with B0: {found['B1']:.6f} with rope in BF16, {found['B1_rope_fp8']:.6f} in FP8: {advice}"
    return advice == "may adopt", f"{text} (kept where FP8 rope would more than double 1 - cosine)"


def no_e5m2(evidence: Evidence) -> Finding:
    """No source line of the model or its ops names E5M2."""
    files = [path for folder in ("kernels", "dsv4/model") for path in sorted((ROOT / folder).rglob("*.py"))]
    files = [path for path in files if not path.name.startswith(("test_", "_oracle", "conftest"))]
    hits = [str(path.relative_to(ROOT)) for path in files if "e5m2" in path.read_text().lower()]
    return not hits, f"{len(files)} source files of ops and model searched: {', '.join(hits) or 'no mention'}"


def index_fp4(evidence: Evidence) -> Finding:
    """Overlap of B2_fp4's choice with ``trained``'s on the same inputs."""
    if gap := needs_rungs(evidence, "B2_fp4"):
        return None, gap
    frame = evidence.table("B2_fp4")[0]  # type: ignore[index]
    rows = select(
        frame[frame["step"] < 0], mode="isolated", against="trained", tap="index_scores", part="all"
    )
    rows = rows[rows["margin_min"].notna()]
    if rows.empty:
        return None, "no row had more entries than index_topk"
    margin = rows["margin_flipped"].max()
    ties = f", flips only at relative margins up to {margin:.1e}" if np.isfinite(margin) else ""
    return (
        not margin > 1e-5,
        f"overlap {rows['overlap'].mean():.4f}, lowest row {rows['overlap_min'].min():.4f}{ties}",
    )


def q_a_launches(evidence: Evidence) -> Finding:
    """The op list from q_a's result to q_b's input."""
    before, after = (q_a_site(evidence.plan(name)) for name in ("P5", "B0"))
    per_layer = before - after
    text = f"counted from the op list: {before} (RMSNorm 4, quantise 2) become {after}: {per_layer} saved a layer"
    return per_layer == 6, f"{text}; 6 is what was there before"


def residual_magnitude(evidence: Evidence) -> Finding:
    """Largest |X| and its BF16 ULP, layer by layer, in the free run of the first rung measured."""
    name = next((name for name in ("B0", "B0_unfused") if evidence.table(name)), None)
    peaks = _peaks(evidence.table(name)[1]) if name else []  # type: ignore[index]
    if not peaks:
        return None, "no rung has recorded its residual's magnitude"
    cells = [f"{layer}: {peak:.0f} ({_ulp(peak):g})" for layer, peak in enumerate(peaks)]
    return max(
        peaks
    ) >= 256, f"max abs X by layer (its BF16 ULP): {', '.join(cells)}; at 300 the ULP is {_ulp(300.0):g}"


def _peaks(notes: Notes) -> list[float]:
    found = [
        entries["residual_absmax"] for entries in notes.exercised.values() if entries.get("residual_absmax")
    ]
    return [float(value) for value in np.max(found, axis=0)] if found else []


def _ulp(value: float) -> float:
    """Spacing of BF16 at ``value``: 7 bits below its leading one."""
    return float(2.0 ** (np.floor(np.log2(value)) - 7))


def residual_fp32_memory(evidence: Evidence) -> Finding:
    """Bytes of the streams, read and written."""
    plan = evidence.plan("B0")
    sizes = [step_bytes(plan | {"residual": fmt}, evidence.sizes, 1)["residual"] for fmt in ("bf16", "fp32")]
    return sizes[1] == 2 * sizes[0], f"{sizes[0]} B a token in BF16, {sizes[1]} B in FP32"


def mhc_non_expansive(evidence: Evidence) -> Finding:
    """Row and column sums and the spectral norm of every comb in the reference's dumps."""
    worst = {"row sums": 0.0, "column sums": 0.0, "spectral norm": 0.0}
    files = sorted((evidence.results / "reference").glob("*.h5"))
    for path in files:
        with DumpReader(path) as dump:
            for phase in PHASES:
                for layer in dump.layers("compounded", phase):
                    for tap in ("attn_comb", "moe_comb"):
                        if dump.has("compounded", phase, layer, tap):
                            _note_combs(worst, dump.get("compounded", phase, layer, tap).astype(np.float64))
    if not worst["spectral norm"]:
        return None, "no reference dump holds comb"
    text = f"over {len(files)} prompts: spectral norm at most {worst['spectral norm']:.6f}, row sums within"
    text += f" {worst['row sums']:.1e} of 1, column sums within {worst['column sums']:.1e}"
    return worst["spectral norm"] <= 1 + 1e-3, text


def _note_combs(worst: dict[str, float], comb: np.ndarray) -> None:
    if len(comb):
        worst["row sums"] = max(worst["row sums"], float(np.abs(comb.sum(2) - 1).max()))
        worst["column sums"] = max(worst["column sums"], float(np.abs(comb.sum(1) - 1).max()))
        worst["spectral norm"] = max(
            worst["spectral norm"], float(np.linalg.norm(comb, 2, axis=(1, 2)).max())
        )


def batched_prefill(evidence: Evidence) -> Finding:
    """The audited tree: whether its batch holds several sequences."""
    source = ROOT / "dsv4" / "model" / "cache.py"
    classes = {
        node.name: ast.unparse(node)
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    present = "segments" in classes.get("Batch", "")
    return (
        present,
        "dsv4/model/cache.py: a Batch is the rows of several sequences"
        if present
        else "absent in dsv4/model/cache.py",
    )


CHECKS: Mapping[str, Callable[[Evidence], Finding]] = {
    check.__name__: check
    for check in (
        p5_launches,
        p5_two_launches,
        p5_cos_unfused,
        p5_cos_true,
        p5_gsa,
        p4_scalar_gsa,
        moe_native,
        kv_fp4_round_trip,
        kv_fp4_compounds,
        gather_bytes,
        fp8_share,
        rope_bf16,
        no_e5m2,
        index_fp4,
        q_a_launches,
        residual_magnitude,
        residual_fp32_memory,
        mhc_non_expansive,
        batched_prefill,
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
        holds, text = CHECKS[claim["check"]](evidence)
        state = "not_run" if holds is None else "holds" if holds else "does_not"
        measured, reason = (None, text) if holds is None else (text, "")
        rows.append(row | {"state": state, "measured": measured, "reason": reason})
    return rows
