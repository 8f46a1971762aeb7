"""Tensor names of a checkpoint (transformers') and the shapes that a config asks for."""

from dsv4.model.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of the model with its logical shape, before any quantised packing."""
    d, n = config.hidden_size, config.hc_mult
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, d),
        "model.norm.weight": (d,),
        "model.hc_head.hc_fn": (n, n * d),
        "model.hc_head.hc_base": (n,),
        "model.hc_head.hc_scale": (1,),
        "lm_head.weight": (config.vocab_size, d),
    }
    for layer in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(config, layer).items()}
    return shapes


def _layer(config: ModelConfig, layer: int) -> Shapes:
    d, n, e = config.hidden_size, config.hc_mult, config.n_routed_experts
    f = config.moe_intermediate_size
    mix = (n + 2) * n
    hyper = {
        f"{site}.{key}": shape
        for site in ("attn_hc", "ffn_hc")
        for key, shape in (("fn", (mix, n * d)), ("base", (mix,)), ("scale", (3,)))
    }
    hashed = layer < config.num_hash_layers
    gate = (
        {"tid2eid": (config.vocab_size, config.num_experts_per_tok)}
        if hashed
        else {"e_score_correction_bias": (e,)}
    )
    return (
        hyper
        | {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
        | {f"self_attn.{name}": shape for name, shape in _attention(config, layer).items()}
        | {f"mlp.gate.{name}": shape for name, shape in gate.items()}
        | {
            "mlp.gate.weight": (e, d),
            "mlp.experts.gate_up_proj": (e, 2 * f, d),
            "mlp.experts.down_proj": (e, d, f),
            "mlp.shared_experts.gate_proj.weight": (f, d),
            "mlp.shared_experts.up_proj.weight": (f, d),
            "mlp.shared_experts.down_proj.weight": (d, f),
        }
    )


def _attention(config: ModelConfig, layer: int) -> Shapes:
    d, h, k, r = config.hidden_size, config.num_attention_heads, config.head_dim, config.q_lora_rank
    shapes: Shapes = {
        "q_a_proj.weight": (r, d),
        "q_a_norm.weight": (r,),
        "q_b_proj.weight": (h * k, r),
        "kv_proj.weight": (k, d),
        "kv_norm.weight": (k,),
        "sinks": (h,),
        "o_a_proj.weight": (config.o_groups * config.o_lora_rank, h * k // config.o_groups),
        "o_b_proj.weight": (d, config.o_groups * config.o_lora_rank),
    }
    kind, ratio = config.kind(layer), config.compress_ratios[layer]
    if kind == "window":
        return shapes
    shapes |= {
        f"compressor.{name}": shape for name, shape in _compressor(d, k, ratio, overlap=kind == "csa").items()
    }
    if kind == "csa":
        ih, ik = config.index_n_heads, config.index_head_dim
        indexer = _compressor(d, ik, ratio, overlap=True) | {
            "q_b_proj.weight": (ih * ik, r),
            "scorer.weights_proj.weight": (ih, d),
        }
        shapes |= {f"compressor.indexer.{name}": shape for name, shape in indexer.items()}
    return shapes


def _compressor(d: int, k: int, ratio: int, *, overlap: bool) -> Shapes:
    columns = 2 * k if overlap else k
    return {
        "kv_proj.weight": (columns, d),
        "gate_proj.weight": (columns, d),
        "position_bias": (ratio, columns),
        "kv_norm.weight": (k,),
    }
