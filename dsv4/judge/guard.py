"""The guard of the baseline: what the checkpoint stores, and whether the audited code prefills in batches."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4.engine.spec import ONE_BF16
from dsv4.judge.evaluate import Finding
from dsv4.judge.measure import Notes
from dsv4.judge.quantisation import weight_formats

MOE = (".mlp.experts.", ".mlp.shared_experts.")
LINEARS = tuple(f".self_attn.{name}_proj.weight" for name in ("q_a", "q_b", "kv", "o_a", "o_b"))
OWN = "dsv4.model.transformer.Transformer.forward"


def guard(results: Path, notes: Notes) -> dict[str, Any]:
    """Stored formats of experts and linears as found, and batched prefill: absent, or its entry point.

    Returns
    -------
    dict
        ``moe``, ``linears``: format -> number of matrices; ``batched_prefill``: None if absent, else
        ``entry_point`` and how a batch compares with single prompts (``bit_equal``, ``rel_l2``; of the
        own model: by its tests).
    """
    formats = weight_formats(results)
    found: dict[str, Any] = {
        part: dict(Counter(fmt for name, fmt in formats.items() if any(key in name for key in keys)))
        for part, keys in (("moe", MOE), ("linears", LINEARS))
    }
    own = {"entry_point": OWN, "compared": "bit for bit by its tests"}
    found["batched_prefill"] = (notes.batched or None) if notes.labels.get("backend") == "engine" else own
    return found


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
