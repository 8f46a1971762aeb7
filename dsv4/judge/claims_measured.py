"""Claims about the audited model: from its manifest, its measurements and its reference dumps."""

import json

import numpy as np
import pandas as pd

from dsv4.dump import DumpReader
from dsv4.judge.evaluate import layer_value, select
from dsv4.judge.evidence import Evidence, Outcome, needs_rungs
from dsv4.judge.limits import limits
from dsv4.judge.mixing import mixing, off_one
from dsv4.judge.streams import bf16_ulp, peaks

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
    found = peaks([evidence.table(name)[1]]) if name else []  # type: ignore[index]
    if not found:
        return None, "no rung has recorded its residual's magnitude"
    if not np.isfinite(found).all():
        return None, f"the residual of {name} has NaN or Inf in its free run"
    cells = [f"{layer}: {peak:.0f} ({bf16_ulp(peak):g})" for layer, peak in enumerate(found)]
    return max(
        found
    ) >= 256, f"max abs X by layer (its BF16 ULP): {', '.join(cells)}; at 300 the ULP is {bf16_ulp(300.0):g}"


def reference_device(evidence: Evidence) -> str:
    """Where the references ran: refs, also where variants run on kernels."""
    path = min((evidence.results / "reference").glob("*.h5"))
    with DumpReader(path, verify=False) as dump:
        return str(dump.attrs.get("device"))


def mhc_non_expansive(evidence: Evidence) -> Outcome:
    """Row and column sums and the spectral norm of every comb in the reference's dumps."""
    found = mixing(evidence.results)
    text = f"over {found.prompts} prompts: spectral norm at most {found.spectral_norm:.6f}, row sums within"
    text += f" {off_one(found.row):.1e} of 1, column sums within {off_one(found.column):.1e}"
    return found.non_expansive, text
