"""Claims about the audited model: from its manifest, its measurements and its reference dumps."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from dsv4.dump import DumpReader
from dsv4.judge.evaluate import layer_value, select
from dsv4.judge.evidence import Evidence, Outcome, needs_rungs
from dsv4.judge.limits import limits
from dsv4.judge.measure import Notes
from dsv4.taps import PHASES

DEPTH = 61  # layers of the model that the plan is about


def moe_native(evidence: Evidence) -> Outcome:
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


def kv_fp4_compounds(evidence: Evidence) -> Outcome:
    """KL and the depth profile of the ruled-out leaf beside its parent's; decided at the plan's depth alone."""
    if gap := needs_rungs(evidence, "KV_nvfp4", "B0"):
        return None, gap
    lines, kls = [], list[float]()
    for name in ("KV_nvfp4", "B0"):
        free = _rows(evidence, name, mode="compounded", against="plain")
        logits, outputs = select(free, tap="logits"), select(free, tap="attn_out")
        if gap := _gap(name, logits["kl_nats"]) or _gap(name, outputs["rel_l2"]):
            return None, gap
        kl, far = layer_value(logits, "kl_nats"), layer_value(outputs, "rel_l2")
        kls.append(float(kl.iloc[0]))
        ends = f"{far.iloc[0]:.2g} in layer 0, {far.iloc[-1]:.2g} in the last"
        lines.append(f"{name}: KL {kl.iloc[0]:.2g} nats, attn_out off by {ends}")
    depth = len(evidence.sizes.compress_ratios)
    text = f"over {depth} layers, free run against plain: {'; '.join(lines)}"
    if depth < DEPTH:
        return None, f"{text}; {DEPTH} layers were not run: this checkpoint has {depth}"
    budget = next(limit.value for limit in limits() if limit.name == "logits.kl_nats.trained")
    return kls[0] > budget, f"{text}; fatal: over {budget:.2g} nats, the budget of the whole ladder"


def rope_bf16(evidence: Evidence) -> Outcome:
    """Both cosines against B0's BF16 attention, lowest layer."""
    if gap := needs_rungs(evidence, "B1", "B1_rope_fp8"):
        return None, gap
    found = {}
    for name in ("B1", "B1_rope_fp8"):
        cosines = _rows(evidence, name, mode="isolated", against="B0", tap="attn_out")["cos"]
        if gap := _gap(name, cosines):
            return None, gap
        found[name] = float(cosines.min())
    drop = found["B1"] - found["B1_rope_fp8"]
    advice = "keep BF16" if drop > 1 - found["B1"] else "may adopt"
    text = f"lowest cosine with B0: {found['B1']:.6f} with rope in BF16, {found['B1_rope_fp8']:.6f} in FP8: {advice}"
    return advice == "may adopt", f"{text} (kept where FP8 rope would more than double 1 - cosine)"


def _rows(evidence: Evidence, name: str, **where: str) -> pd.DataFrame:
    """Measurements of a measured rung's whole taps, those with rows; decode steps by themselves are left out."""
    frame = evidence.table(name)[0]  # type: ignore[index]
    return select(frame[(frame["step"] < 0) & (frame["rows"] > 0)], part="all", **where)


def _gap(name: str, values: pd.Series) -> str:
    """Why no number can be drawn from these: there are none, or one is NaN; or ""."""
    if values.empty:
        return f"{name} has no such measurements in this run"
    return (
        f"{name} has NaN or Inf there: {values.isna().sum()} of {len(values)} tensors"
        if values.isna().any()
        else ""
    )


def index_fp4(evidence: Evidence) -> Outcome:
    """Overlap of B2_fp4's choice with ``trained``'s on the same inputs."""
    if gap := needs_rungs(evidence, "B2_fp4"):
        return None, gap
    rows = _rows(evidence, "B2_fp4", mode="isolated", against="trained", tap="index_scores")
    if gap := _gap("B2_fp4", rows["rel_l2"]):
        return None, gap
    rows = rows[rows["margin_min"].notna()]
    if rows.empty:
        return None, "no row had more entries than index_topk"
    margin = rows["margin_flipped"].max()
    ties = f", flips only at relative margins up to {margin:.1e}" if np.isfinite(margin) else ""
    return (
        not margin > 1e-5,
        f"overlap {rows['overlap'].mean():.4f}, lowest row {rows['overlap_min'].min():.4f}{ties}",
    )


def residual_magnitude(evidence: Evidence) -> Outcome:
    """Largest |X| and its BF16 ULP, layer by layer, in the free run of the first rung measured."""
    name = next((name for name in ("B0", "B0_unfused") if evidence.table(name)), None)
    peaks = _peaks(evidence.table(name)[1]) if name else []  # type: ignore[index]
    if not peaks:
        return None, "no rung has recorded its residual's magnitude"
    if not np.isfinite(peaks).all():
        return None, f"the residual of {name} has NaN or Inf in its free run"
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


def reference_device(evidence: Evidence) -> str:
    """Where the references ran: refs, also where variants run on kernels."""
    path = min((evidence.results / "reference").glob("*.h5"))
    with DumpReader(path, verify=False) as dump:
        return str(dump.attrs.get("device"))


def mhc_non_expansive(evidence: Evidence) -> Outcome:
    """Row and column sums and the spectral norm of every comb in the reference's dumps."""
    worst = {"row sums": 0.0, "column sums": 0.0, "spectral norm": 0.0}
    files = sorted((evidence.results / "reference").glob("*.h5"))
    for place, comb in (found for path in files for found in _combs(path)):
        if not np.isfinite(comb).all():
            return None, f"{place} holds NaN or Inf"
        _note_combs(worst, comb)
    if not worst["spectral norm"]:
        return None, "no reference dump holds comb"
    text = f"over {len(files)} prompts: spectral norm at most {worst['spectral norm']:.6f}, row sums within"
    text += f" {worst['row sums']:.1e} of 1, column sums within {worst['column sums']:.1e}"
    return worst["spectral norm"] <= 1 + 1e-3, text


def _combs(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every comb of a reference dump and its place."""
    with DumpReader(path) as dump:
        for phase in PHASES:
            for layer in dump.layers("compounded", phase):
                for tap in ("attn_comb", "moe_comb"):
                    if dump.has("compounded", phase, layer, tap):
                        comb = dump.get("compounded", phase, layer, tap).astype(np.float64)
                        yield f"{path.name}: {phase}/{layer}/{tap}", comb


def _note_combs(worst: dict[str, float], comb: np.ndarray) -> None:
    if len(comb):
        worst["row sums"] = max(worst["row sums"], float(np.abs(comb.sum(2) - 1).max()))
        worst["column sums"] = max(worst["column sums"], float(np.abs(comb.sum(1) - 1).max()))
        worst["spectral norm"] = max(
            worst["spectral norm"], float(np.linalg.norm(comb, 2, axis=(1, 2)).max())
        )
