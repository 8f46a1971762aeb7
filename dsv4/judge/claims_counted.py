"""Claims that no run is needed for: counted from plans and sizes, read off the sources, measured on single ops."""

from collections.abc import Mapping
from pathlib import Path

from dsv4.judge.evidence import Evidence, Outcome
from dsv4.judge.launches import key_bytes, mhc_site, q_a_site, step_bytes

ROOT = Path(__file__).resolve().parents[2]


def p5_launches(evidence: Evidence) -> Outcome:
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


def p5_two_launches(evidence: Evidence) -> Outcome:
    """The op list of one site."""
    before, after = (mhc_site(evidence.plan(name)) for name in ("B0_unfused", "P5"))
    return (before, after) == (7, 2), f"counted from the op list: {before} -> {after}"


def _cosines(evidence: Evidence, name: str, least: float) -> Outcome:
    found = {tokens: evidence.ops[f"{name}.T{tokens}"] for tokens in (1, 8, 128)}
    text = ", ".join(f"{value:.4f} at T = {tokens}" for tokens, value in found.items())
    return all(
        round(value, 3) >= least for value in found.values()
    ), f"{text} (Gaussian streams, hidden 7168)"


def p5_cos_unfused(evidence: Evidence) -> Outcome:
    """Both quantised: what the BF16 stores between move."""
    return _cosines(evidence, "mhc_fused_vs_unfused", 0.999)


def p5_cos_true(evidence: Evidence) -> Outcome:
    """Quantised against exact: this is NVFP4's own error."""
    return _cosines(evidence, "mhc_fused_vs_exact", 0.995)


def p5_gsa(evidence: Evidence) -> Outcome:
    """Mean absolute difference of the rows' gsa."""
    found = [evidence.ops[f"gsa_difference.T{tokens}"] for tokens in (1, 8, 128)]
    text = f"mean absolute difference {min(found):.1e} to {max(found):.1e} at T = 1, 8, 128"
    return max(found) <= 2.5e-6, text


def p4_scalar_gsa(evidence: Evidence) -> Outcome:
    """What one gsa for all rows does: in the GEMM's epilogue, as the plan has it, or in both places."""
    ops = evidence.ops
    text = (
        f"undone with the maximum, rows of 128 have gains of {ops['scalar_gsa.gain_mean']:.2f} on average and up to"
        f" {ops['scalar_gsa.gain_worst']:.2f}, which no cosine shows; made with it too, {ops['launch_gsa.changed']:.0%}"
        f" of values change (relative L2 {ops['launch_gsa.rel_l2']:.3f}) and a row depends on its batch"
    )
    return ops["scalar_gsa.rel_l2"] < 1e-3, f"{text}; hence gsa per row"


def kv_fp4_round_trip(evidence: Evidence) -> Outcome:
    """0.4% needs its unit: it is 1 - cosine."""
    ops = evidence.ops
    loss, far = ops["kv_fp4.one_minus_cos"], ops["kv_fp4.rel_l2"]
    eight = f"FP8: {ops['kv_fp8.one_minus_cos']:.2%} and {ops['kv_fp8.rel_l2']:.1%}"
    text = f"1 - cosine {loss:.2%}, relative L2 {far:.1%} a round trip ({eight}); the 0.4% is 1 - cosine"
    return 0.003 <= loss <= 0.005, text


def gather_bytes(evidence: Evidence) -> Outcome:
    """Bytes that move for one key, at the plan's head_dim and at the audited model's."""
    lines, ratios = [], []
    for head_dim in dict.fromkeys((512, evidence.sizes.head_dim)):
        wide, narrow = (key_bytes(evidence.plan(name), head_dim) for name in ("B0", "B1a"))
        ratios.append(sum(narrow.values()) / sum(wide.values()))
        parts = " + ".join(str(value) for value in wide.values())
        lines.append(f"head_dim {head_dim}: {parts} = {sum(wide.values())} becomes {sum(narrow.values())}")
    return max(ratios) <= 0.5, "; ".join(lines)


def fp8_share(evidence: Evidence) -> Outcome:
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


def no_e5m2(evidence: Evidence) -> Outcome:
    """No source line of the forward pass names E5M2: the model, its backend, the formats, the ops' refs and kernels."""
    ops = [path for path in (ROOT / "kernels").glob("*/*.py") if path.parent.name not in ("build", "bench")]
    files = sorted(
        ops + [path for name in ("model", "backend") for path in (ROOT / "dsv4" / name).glob("*.py")]
    )
    files = [path for path in files if not path.name.startswith(("test_", "_", "conftest"))]
    hits = [str(path.relative_to(ROOT)) for path in files if "e5m2" in path.read_text().lower()]
    return not hits, f"{len(files)} source files of ops and model searched: {', '.join(hits) or 'no mention'}"


def q_a_launches(evidence: Evidence) -> Outcome:
    """The op list from q_a's result to q_b's input."""
    before, after = (q_a_site(evidence.plan(name)) for name in ("P5", "B0"))
    per_layer = before - after
    text = f"counted from the op list: {before} (RMSNorm 4, quantise 2) become {after}: {per_layer} saved a layer"
    return per_layer == 6, f"{text}; 6 is what was there before"


def residual_fp32_memory(evidence: Evidence) -> Outcome:
    """Bytes of the streams, read and written."""
    plan = evidence.plan("B0")
    sizes = [step_bytes(plan | {"residual": fmt}, evidence.sizes, 1)["residual"] for fmt in ("bf16", "fp32")]
    return sizes[1] == 2 * sizes[0], f"{sizes[0]} B a token in BF16, {sizes[1]} B in FP32"
