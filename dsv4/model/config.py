"""Model sizes from a checkpoint's ``config.json``, in the checkpoint's own names."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsv4.config import CheckpointError, model_config

LayerKind = Literal["window", "csa", "hca"]
CSA_RATIO = 4
MAY_BE_ZERO = ("num_hash_layers", "compress_ratios")
CORRECT = "correct config.json, or fetch the checkpoint again"

# What the model computes whatever config.json says: the one value that each key may have. A key that is absent
# or null has DeepSeek-V4's value, in transformers' config too (5.24, models/deepseek_v4, 2026-11-30).
FIXED: Mapping[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 1,
}
FIXED_ROPE: Mapping[str, Any] = {"type": "yarn", "rope_type": "yarn", "attention_factor": 1.0}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one DSV4 model; field names are ``config.json``'s."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    rope_original_max_position: int
    rope_beta_fast: float
    rope_beta_slow: float

    def kind(self, layer: int) -> LayerKind:
        """Attention kind of a layer: window only, CSA (ratio 4) or HCA."""
        ratio = self.compress_ratios[layer]
        return "window" if ratio == 0 else "csa" if ratio == CSA_RATIO else "hca"

    @property
    def nope_head_dim(self) -> int:
        """Dims of a head without rotary embedding."""
        return self.head_dim - self.qk_rope_head_dim

    def max_entries(self, layer: int, tokens: int) -> int:
        """Compressed entries that ``tokens`` tokens close in a layer."""
        ratio = self.compress_ratios[layer]
        return tokens // ratio if ratio else 0


_RENAMED = {
    "rope_factor": "factor",
    "rope_original_max_position": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
}


def load_config(folder: Path) -> ModelConfig:
    """Read and check ``folder/config.json``.

    Raises
    ------
    CheckpointError
        Missing file or key, wrong type, sizes that do not fit each other, or another computation.
    """
    return parse_config(model_config(folder), folder / "config.json")


def parse_config(raw: Mapping[str, Any], path: Path = Path("config.json")) -> ModelConfig:
    """Build the config from a parsed ``config.json``; see :func:`load_config`."""
    nested = raw.get("rope_parameters")
    rope = raw.get("rope_scaling") or (nested.get("compress") if isinstance(nested, Mapping) else None)
    values: dict[str, Any] = {}
    for name, kind in ModelConfig.__annotations__.items():
        source, key = (rope, _RENAMED[name]) if name in _RENAMED else (raw, name)
        where = f"rope_scaling.{key}" if name in _RENAMED else key
        if not isinstance(source, Mapping) or key not in source:
            raise CheckpointError(f"{path}: key {where} is missing; is this a DeepSeek-V4 config?")
        values[name] = _typed(source[key], kind, f"{path}: {where}")
    ratios = values["compress_ratios"]
    layers = values["num_hidden_layers"]
    if len(ratios) < layers:
        raise CheckpointError(
            f"{path}: compress_ratios has {len(ratios)} entries for num_hidden_layers = {layers}; {CORRECT}"
        )
    values["compress_ratios"] = ratios[:layers]  # a longer list's tail belongs to MTP layers
    config = ModelConfig(**values)
    _check(config, path)
    _check_fixed(raw, FIXED, f"{path}: ")
    _check_fixed(rope or {}, FIXED_ROPE, f"{path}: rope_scaling.")
    return config


def _check_fixed(raw: Mapping[str, Any], fixed: Mapping[str, Any], where: str) -> None:
    """Refuse a key that asks for another computation than the model's."""
    for key, value in fixed.items():
        if raw.get(key) not in (None, value):
            raise CheckpointError(
                f"{where}{key} = {raw[key]!r}, but only {json.dumps(value)} is computed: this model is no"
                " DeepSeek-V4 and cannot be audited; set another `checkpoint` in config.yaml"
            )


def _typed(value: Any, kind: type, where: str) -> Any:
    if kind == tuple[int, ...]:
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise CheckpointError(f"{where} = {value!r} is not a list of integers; {CORRECT}")
        return tuple(value)
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63
    if not number or (kind is int and value != int(value)):
        raise CheckpointError(
            f"{where} = {value!r} is not {'an integer' if kind is int else 'a finite number'}; {CORRECT}"
        )
    return kind(value)


def _check(config: ModelConfig, path: Path) -> None:
    """Refuse sizes that this model's formats or stages cannot have, naming the keys and their values."""
    size = {name: getattr(config, name) for name in ModelConfig.__annotations__}
    ratios = config.compress_ratios
    rules = [
        *((f"{name} must be positive", name, size[name] > 0) for name in size if name not in MAY_BE_ZERO),
        ("num_hash_layers must not be negative", "num_hash_layers", config.num_hash_layers >= 0),
        ("qk_rope_head_dim must be 64 (the KV record)", "qk_rope_head_dim", config.qk_rope_head_dim == 64),
        (
            "head_dim - qk_rope_head_dim must be a positive multiple of 64 (the KV record's scale group)",
            "head_dim",
            config.nope_head_dim > 0 and config.nope_head_dim % 64 == 0,
        ),
        (
            "o_groups must divide num_attention_heads",
            "o_groups num_attention_heads",
            config.num_attention_heads % max(config.o_groups, 1) == 0,
        ),
        (
            "index_head_dim must be a power of two of at least 64",
            "index_head_dim",
            config.index_head_dim >= 64 and config.index_head_dim & (config.index_head_dim - 1) == 0,
        ),
        (
            "compress_ratios must be 0 (window only), 4 (CSA) or larger (HCA)",
            "compress_ratios",
            all(ratio == 0 or ratio >= CSA_RATIO for ratio in ratios),
        ),
        (
            "num_experts_per_tok must be at most n_routed_experts",
            "num_experts_per_tok n_routed_experts",
            config.num_experts_per_tok <= config.n_routed_experts,
        ),
        ("rope_scaling.factor must be at least 1", "rope_factor", config.rope_factor >= 1),
    ]
    for rule, names, holds in rules:
        if not holds:
            got = ", ".join(f"{name} = {size[name]}" for name in names.split())
            raise CheckpointError(f"{path}: {rule}; got {got}; {CORRECT}")
