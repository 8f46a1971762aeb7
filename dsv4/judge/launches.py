"""Launches and bytes of a decode step, counted from the op list; no clock is involved.

Launch counts per site are the plan's own (pre_block bmm 1, RMSNorm "4+" counted as 4,
quantise 2, a fused pair 2); a cast that a plan keeps is one launch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsv4.plan import in_fp32

BMM, RMSNORM, QUANTISE, FUSED_PAIR, CAST = 1, 4, 2, 2, 1
ROPE = 64
BF16, FP32 = 2, 4
STREAM_PASSES = 2 * 2  # a layer reads and writes the streams at two sites


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the counts need of a model.

    Attributes
    ----------
    compress_ratios : one entry a layer.
    head_dim, hidden_size, hc_mult, sliding_window, index_topk, index_head_dim : as in ``config.json``.
    """

    compress_ratios: tuple[int, ...]
    head_dim: int
    hidden_size: int
    hc_mult: int
    sliding_window: int
    index_topk: int
    index_head_dim: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Sizes":
        """From a checkpoint's ``config.json``."""
        names = ("head_dim", "hidden_size", "hc_mult", "sliding_window", "index_topk", "index_head_dim")
        ratios = tuple(int(r) for r in config["compress_ratios"][: config["num_hidden_layers"]])
        return cls(compress_ratios=ratios, **{name: int(config[name]) for name in names})


# DeepSeek-V4's config.json: Flash has 2 window-only, 21 CSA and 20 HCA layers, Pro 30 CSA and 31 HCA. A test holds
# both to what kernels are built for.
FLASH = Sizes(
    compress_ratios=(0, 0, *(4, 128) * 20, 4),
    head_dim=512,
    hidden_size=4096,
    hc_mult=4,
    sliding_window=128,
    index_topk=512,
    index_head_dim=128,
)
PRO = replace(FLASH, compress_ratios=(128, 128, *(4, 128) * 29, 4), hidden_size=7168, index_topk=1024)


def mhc_site(plan: Mapping[str, str]) -> int:
    """Launches of one mHC site: weighted stream sum, norm, quantiser."""
    if plan["mhc_quant"] == "fused":
        return FUSED_PAIR
    return BMM + (FUSED_PAIR if plan["norm_quant"] != "unfused" else RMSNORM + QUANTISE)


def q_a_site(plan: Mapping[str, str]) -> int:
    """Launches from q_a's result to q_b's input."""
    return FUSED_PAIR if plan["q_a_norm"] == "fused" else RMSNORM + QUANTISE


def kv_site(plan: Mapping[str, str]) -> int:
    """Launches from the kv projection to the cache: norm, RoPE, quantise and write."""
    return 1 if plan["kv_norm"] == "fused" else RMSNORM + 1 + 1


def attend_site(plan: Mapping[str, str]) -> int:
    """Launches of attention: gather, q's quantiser, FMHA, inverse RoPE with or without its cast."""
    gather = 1 if plan["kv_read"] == "gather_bf16" else 0
    query = 1 if plan["q_format"] != "bf16" else 0
    return gather + query + 1 + 1 + _cast(plan, "attn_out")


def index_site(plan: Mapping[str, str]) -> int:
    """Launches of the indexer's scores and choice.

    Two casts, einsum, ReLU, weighted sum and top-k; or q's quantiser, the logits and top-k.
    """
    return 2 * CAST + 3 + 1 if plan["index_score"] == "einsum_fp32" else 3


def _cast(plan: Mapping[str, str], site: str) -> int:
    return CAST if plan[f"casts.{site}"] == "bf16" else 0


def launches(plan: Mapping[str, str], sizes: Sizes) -> dict[str, int]:
    """Launches of one decode step at the sites that a plan can change, by site."""
    layers, csa = len(sizes.compress_ratios), sum(ratio == 4 for ratio in sizes.compress_ratios)
    return {
        "mhc": 2 * layers * mhc_site(plan),
        "q_a_norm": layers * q_a_site(plan),
        "kv_norm": layers * kv_site(plan),
        "attend": layers * attend_site(plan),
        "index_score": csa * index_site(plan),
        "casts": 2 * layers * _cast(plan, "swiglu") + layers * _cast(plan, "router") + _cast(plan, "head"),
    }


def record_bytes(plan: Mapping[str, str], head_dim: int) -> int:
    """Bytes of one stored KV row."""
    nope = head_dim - ROPE
    if plan["kv_format"] == "nvfp4":
        return nope // 2 + ROPE * BF16 + nope // 16 + FP32
    if plan["kv_record"] == "aligned":
        return nope + ROPE * BF16 + FP32
    return nope + ROPE * BF16 + -(-nope // 64 // 8) * 8


def key_bytes(plan: Mapping[str, str], head_dim: int) -> dict[str, int]:
    """Bytes that move for one attended key in one step."""
    stored = record_bytes(plan, head_dim)
    wide = head_dim * BF16 if plan["kv_read"] == "gather_bf16" else 0
    return {"read": stored, "written": wide, "read_again": wide}


def index_key_bytes(plan: Mapping[str, str], index_head_dim: int) -> int:
    """Bytes of one stored index key."""
    return (
        index_head_dim // 2 + index_head_dim // 32 if plan["index_score"] == "fp4" else index_head_dim + FP32
    )


def step_bytes(plan: Mapping[str, str], sizes: Sizes, context: int) -> dict[str, int]:
    """Bytes of one decode step at ``context`` tokens: keys, index keys, residual streams."""
    per_key = sum(key_bytes(plan, sizes.head_dim).values())
    keys = sum(
        min(context, sizes.sliding_window) + _attended(sizes, ratio, context)
        for ratio in sizes.compress_ratios
    )
    scored = sum(context // ratio for ratio in sizes.compress_ratios if ratio == 4)
    index = scored * index_key_bytes(plan, sizes.index_head_dim)
    layers = range(len(sizes.compress_ratios))
    residual = STREAM_PASSES * sum(stream_bytes(plan, sizes, layer) for layer in layers)
    return {"keys": keys * per_key, "index_keys": index, "residual": residual}


def stream_bytes(plan: Mapping[str, str], sizes: Sizes, layer: int) -> int:
    """Bytes of one token's streams as a layer stores them."""
    wide = in_fp32(plan["residual"], layer, len(sizes.compress_ratios))
    return sizes.hc_mult * sizes.hidden_size * (FP32 if wide else BF16)


def _attended(sizes: Sizes, ratio: int, context: int) -> int:
    if ratio == 0:
        return 0
    entries = context // ratio
    return min(entries, sizes.index_topk) if ratio == 4 else entries


def cache_bytes(plan: Mapping[str, str], sizes: Sizes, context: int) -> int:
    """Bytes of one sequence's cache at ``context`` tokens: window rings, entries, index keys."""
    row = record_bytes(plan, sizes.head_dim)
    window = len(sizes.compress_ratios) * min(context, sizes.sliding_window) * row
    entries = sum(context // ratio for ratio in sizes.compress_ratios if ratio)
    keys = sum(context // ratio for ratio in sizes.compress_ratios if ratio == 4)
    return window + entries * row + keys * index_key_bytes(plan, sizes.index_head_dim)
