"""The guard of the baseline: what the checkpoint stores, and whether the audited code prefills in batches."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4.engine.spec import ONE_BF16
from dsv4.judge.evaluate import Finding
from dsv4.judge.measure import Notes
from dsv4.judge.quantisation import weight_formats
from dsv4.ladder import Variant
from dsv4.plan import flatten

MOE = (".mlp.experts.", ".mlp.shared_experts.")
LINEARS = tuple(f".self_attn.{name}_proj.weight" for name in ("q_a", "q_b", "kv", "o_a", "o_b"))
OWN = "dsv4.model.prefill.prefill"
COMPARED = {
    "ref": "bit for bit by its tests",
    "kernel": "bit for bit by its tests, on a few rows a pass; over 16 a row's sums may run in another order",
}
TIED = "no: {how} ties a row to its launch, a batch gives other bits"  # as a test of the refs shows
OF_A_COMMIT = "not looked at: the code is a commit's"
TO_ITS_LAUNCH = ("fused_scalar_gsa", "fused_launch_gsa")  # values of norm_quant


def guard(results: Path, notes: Notes, variant: Variant) -> dict[str, Any]:
    """Stored formats of experts and linears as found, and batched prefill: absent, or its entry point.

    Returns
    -------
    dict
        ``moe``, ``linears``: format -> number of matrices; ``batched_prefill``: None if absent, else
        ``entry_point`` and how a batch compares with single prompts: ``bit_equal``, ``rel_l2``. The own model
        is not compared here: ``compared`` says what its tests hold, of this backend and plan.
    """
    formats = weight_formats(results)
    found: dict[str, Any] = {
        part: dict(Counter(fmt for name, fmt in formats.items() if any(key in name for key in keys)))
        for part, keys in (("moe", MOE), ("linears", LINEARS))
    }
    backend = notes.labels.get("backend")
    found["batched_prefill"] = (notes.batched or None) if backend == "engine" else _own(backend, variant)
    return found


def _own(backend: str | None, variant: Variant) -> dict[str, Any]:
    """Batched prefill of our own model, and what is known of it."""
    how = flatten(variant.plan)["norm_quant"]
    if variant.commit:
        compared = OF_A_COMMIT
    elif how in TO_ITS_LAUNCH:
        compared = TIED.format(how=f"norm_quant = {how}")
    else:
        compared = COMPARED["kernel" if backend == "kernel" else "ref"]
    return {"entry_point": OWN, "compared": compared}


def unlike_single(notes: Notes) -> list[Finding]:
    """A batch whose logits are not those of its prompts alone."""
    found: Mapping[str, Any] = notes.batched
    if not found or found["bit_equal"] or found["rel_l2"] <= ONE_BF16:
        return []
    text = (
        f"batched prefill ({found['entry_point']}) of {' and '.join(found['prompts'])}: logits are relative L2"
        f" {found['rel_l2']:.2g} from those of each prompt alone, over {ONE_BF16:.2g} (one BF16 rounding each)"
    )
    return [Finding(kind="path", mode="compounded", layer=-1, tap="logits", text=text)]
