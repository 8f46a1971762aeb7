"""What each plan field claims to touch, what must have run to judge it, and whether it must show.

With recorded inputs a change may move the taps of the stages that it claims, and of the stages
that read their stored forms; every other tap must be bit-identical to the parent's.
"""

from collections.abc import Iterable

from dsv4.exercised import EXERCISED
from dsv4.taps import STAGES, TAPS

CLAIMS: dict[str, tuple[str, ...]] = {
    "norm_quant": ("attn_mhc", "attn_quant", "moe_mhc", "moe_quant"),
    "mhc_quant": ("attn_mhc", "attn_quant", "moe_mhc", "moe_quant"),
    "q_a_norm": ("q_a", "q_quant"),
    "kv_read": ("attend",),
    "kv_format": ("kv_store", "comp_store", "attend"),
    "kv_record": ("kv_store", "comp_store", "attend"),
    "q_format": ("attend",),
    "rope_format": ("attend",),
    "pv_format": ("attend",),
    "index_score": ("index_k_store", "index_score", "index_topk"),
    "kv_norm": ("kv", "kv_store"),
    "casts.router": ("route", "route_weights"),
    "casts.swiglu": ("experts", "shared"),
    "casts.attn_out": ("attend",),
    "casts.head": ("head",),
    "residual": ("attn_mix", "moe_mix"),
    "rounding": STAGES,
}
ENGINE = (
    "engine"  # what a rung changes that runs its parent's plan, or another, on code of its own: any stage
)
COMMIT = "commit"  # the same for the code of a commit

# Stages that read a stored form (taps.Tap.replay is False) of another stage.
READERS: dict[str, tuple[str, ...]] = {
    "attn_quant": ("q_a", "kv"),
    "q_quant": ("q_b",),
    "kv_store": ("attend",),
    "comp_store": ("attend",),
    "index_k_store": ("index_score",),
    "moe_quant": ("experts", "shared"),
}

SILENT = frozenset({"kv_read", ENGINE, COMMIT})  # fields that change no stored value when they are right

# Field -> entries of the dump's `exercised` attribute that must be above a least value.
NEEDS: dict[str, dict[str, float]] = {
    "casts.swiglu": {"swiglu_clamp_hits": 1},
    "index_score": {"csa_rows_over_topk": 1},
    "kv_read": {"kv_pages": 2},
    "kv_format": {"kv_pages": 2},
    "kv_record": {"kv_pages": 2},
    "kv_norm": {"kv_pages": 2},
    "residual": {"residual_absmax": 256},
}

# Every entry of `exercised`: least value, and what it means when it stays below.
WORDS: dict[str, tuple[float, str]] = {
    "swiglu_clamp_hits": (1, "SwiGLU's clamp: no gate or up value reached swiglu_limit"),
    "csa_rows_over_topk": (1, "top-k: no row had more entries than index_topk to choose from"),
    "rows_over_window": (1, "sliding window: no row has lost a token to it"),
    "kv_pages": (2, "KV pages: everything fitted one page"),
    "batch": (2, "batch: one sequence at a time"),
    "residual_absmax": (256, "residual: max abs X stayed under 256, where a BF16 ULP becomes 2"),
}


def claimed(fields: Iterable[str]) -> frozenset[str]:
    """Stages whose isolated taps a change of ``fields`` may move."""
    stages = {stage for field in fields for stage in (STAGES if field in (ENGINE, COMMIT) else CLAIMS[field])}
    return frozenset(stages | {reader for stage in stages for reader in READERS.get(stage, ())})


def stage_order(tap_stage: str) -> int:
    """Place of a stage in a layer."""
    return STAGES.index(tap_stage)


assert set(READERS) == {tap.stage for tap in TAPS if not tap.replay}
assert tuple(WORDS) == EXERCISED
