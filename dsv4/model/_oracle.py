"""Test support: transformers' ``DeepseekV4ForCausalLM`` in FP32, our choices replayed, tensors by our tap names.

Only tests import this; the model never imports transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from dsv4.model.config import CSA_RATIO, ModelConfig
from dsv4.model.names import expected_shapes
from dsv4.taps import MODEL
from kernels.formats import e2m1, nvfp4

Taps = dict[tuple[int | str, str], Tensor]
KIND = {
    "window": "sliding_attention",
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
}
SAME = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank"),
    *("o_groups", "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk"),
    *("hc_mult", "hc_sinkhorn_iters", "hc_eps", "rms_norm_eps", "n_routed_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "routed_scaling_factor", "swiglu_limit", "max_position_embeddings"),
    *("rope_theta", "compress_rope_theta"),
)


@dataclass
class OracleRun:
    """One forward pass of the oracle.

    Attributes
    ----------
    taps : (layer or "model", tap name) -> tensor with axis 0 = row or entry, as ours.
    router : layer -> (biased scores (T, E), the oracle's own choice (T, k)).
    indexer : layer -> (scores (T, C), -inf where hidden; the oracle's own choice (T, k), -1 padded).
    """

    taps: Taps = field(default_factory=dict)
    router: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    indexer: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def oracle_config(config: ModelConfig) -> DeepseekV4Config:
    """Transformers' config of the same model; it knows one HCA ratio a model."""
    wide = {ratio for ratio in config.compress_ratios if ratio > CSA_RATIO}
    assert len(wide) <= 1, f"transformers has one HCA ratio a model, this one has {sorted(wide)}"
    layers = range(config.num_hidden_layers)
    share = {"partial_rotary_factor": config.qk_rope_head_dim / config.head_dim}
    eager: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}
    yarn = {
        "rope_type": "yarn",
        "rope_theta": config.compress_rope_theta,
        "factor": config.rope_factor,
        "original_max_position_embeddings": config.rope_original_max_position,
        "beta_fast": config.rope_beta_fast,
        "beta_slow": config.rope_beta_slow,
        "attention_factor": 1.0,
    }
    return DeepseekV4Config(
        **{name: getattr(config, name) for name in SAME},
        **share,
        layer_types=[KIND[config.kind(layer)] for layer in layers],
        compress_rates={KIND["csa"]: CSA_RATIO, KIND["hca"]: wide.pop() if wide else 128},
        mlp_layer_types=["hash_moe" if layer < config.num_hash_layers else "moe" for layer in layers],
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": config.rope_theta} | share,
            "compress": yarn | share,
        },
        use_cache=False,
        **eager,
    )


def dequantised(config: ModelConfig, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Transformers' state dict: the stored tensors as FP32, NVFP4 ones as value x block scale x scale."""
    state = {}
    for name in expected_shapes(config):
        value = stored[name]
        if value.dtype == torch.uint8:
            gsa = stored[f"{name}_scale_2"].float()[..., None, None]
            value = nvfp4.dequantise(e2m1.unpack(value), stored[f"{name}_scale"].view(torch.uint8), gsa)
        state[name] = value if name.endswith("tid2eid") else value.float()
    return state


class Oracle:
    """The loaded model; :meth:`run` replays choices and records."""

    def __init__(self, config: ModelConfig, stored: Mapping[str, Tensor]) -> None:
        self.config = config
        self.model = DeepseekV4ForCausalLM(oracle_config(config)).float().eval()
        self.model.load_state_dict(dequantised(config, stored), strict=True)

    @torch.no_grad()
    def run(self, tokens: Tensor, ours: Taps | None = None) -> OracleRun:
        """Whole sequence (T,) in one call, without a cache; ``ours`` gives the choices to replay."""
        run = OracleRun()
        hooks: list[Any] = []
        for layer, block in enumerate(self.model.model.layers):
            hooks += _watch(run.taps, layer, block)
            _choose_as(block, layer, run, ours)
        norm = self.model.model.norm
        hooks.append(
            norm.register_forward_hook(lambda m, args, out: run.taps.update({(MODEL, "hidden"): out[0]}))
        )
        attention = partial(_attend, run.taps, modeling.eager_attention_forward)
        try:
            with patch.object(modeling, "eager_attention_forward", attention):
                run.taps[MODEL, "logits"] = self.model(tokens[None]).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        return run


def _watch(taps: Taps, layer: int, block: Any) -> list[Any]:
    """Record what modules of a layer return or read, under our names."""

    def keep(name: str, value: Tensor) -> None:
        taps[layer, name] = value[0]

    def result(name: str) -> Callable[..., None]:
        return lambda module, args, out: keep(name, out)

    def mhc(site: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, out: Any) -> None:
            keep(f"{site}_post", out[0])
            keep(f"{site}_comb", out[1])

        return hook

    def gate(module: Any, args: Any, out: Any) -> None:
        logits, weights, ids = out
        order = ids.argsort(-1)
        taps[layer, "router_scores"] = module.score_fn(logits)
        taps[layer, "expert_ids"], taps[layer, "expert_weights"] = (
            ids.gather(1, order),
            weights.gather(1, order),
        )

    def scorer(module: Any, args: Any, out: Tensor) -> None:
        keep("index_q", args[0])
        keep("index_k", args[1])
        keep("index_w", module.weights_proj(args[2]) * module.weights_scaling * module.softmax_scale)

    attn, mlp = block.self_attn, block.mlp
    after = {
        block.attn_hc: mhc("attn"),
        block.ffn_hc: mhc("moe"),
        block.input_layernorm: result("attn_in"),
        attn.q_a_norm: result("qr"),
        attn: lambda module, args, out: keep("attn_proj", out[0]),
        block.post_attention_layernorm: result("moe_in"),
        mlp.gate: gate,
        mlp.experts: lambda module, args, out: taps.update({(layer, "routed"): out}),
        mlp.shared_experts: result("shared"),
        mlp: result("moe_out"),
        block: result("streams"),
    }
    if attn.compressor is not None and hasattr(attn.compressor, "indexer"):
        after[attn.compressor.indexer.scorer] = scorer
    before = {
        block.ffn_hc: lambda module, args: keep("streams_mid", args[0]),
        attn.o_a_proj: lambda module, args: keep(
            "attn_out", args[0].flatten(2).unflatten(-1, (-1, attn.head_dim))
        ),
    }
    return [module.register_forward_hook(hook) for module, hook in after.items()] + [
        module.register_forward_pre_hook(hook) for module, hook in before.items()
    ]


def _attend(
    taps: Taps, attend: Any, module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Transformers' own attention, its operands recorded: q, window keys, compressed rows, lse."""
    layer, rows = module.layer_idx, query.shape[2]
    taps[layer, "q"] = query[0].transpose(0, 1)
    taps[layer, "kv"] = key[0, 0, :rows]
    if key.shape[2] > rows:
        taps[layer, "comp"] = key[0, 0, rows:]
    mask = args[1]
    logits = torch.matmul(query, key.transpose(2, 3)) * kwargs["scaling"] + (0.0 if mask is None else mask)
    taps[layer, "lse"] = logits.logsumexp(-1)[0].T
    return attend(module, query, key, *args, **kwargs)


def _choose_as(block: Any, layer: int, run: OracleRun, ours: Taps | None) -> None:
    """Replace a layer's choices by ours, keeping what the oracle would have chosen."""
    gate = block.mlp.gate
    if isinstance(gate, modeling.DeepseekV4TopKRouter):

        def route(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, own = type(gate).forward(gate, hidden_states)
            scores = gate.score_fn(logits)
            run.router[layer] = scores + gate.e_score_correction_bias, own
            if ours is None:
                return logits, weights, own
            ids = ours[layer, "expert_ids"]
            chosen = scores.gather(1, ids)
            return logits, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * gate.routed_scaling_factor, ids

        gate.forward = route
    if block.self_attn.compressor is not None and hasattr(block.self_attn.compressor, "indexer"):
        indexer = block.self_attn.compressor.indexer
        seen: list[Tensor] = []

        def score(*args: Tensor) -> Tensor:
            scores = type(indexer.scorer).forward(indexer.scorer, *args)
            seen.append(scores[0])
            return scores

        def choose(*args: Any) -> Tensor:
            own = type(indexer).forward(indexer, *args)
            visible = (args[2][0] + 1) // indexer.compress_rate
            scores = seen.pop()
            hidden = torch.arange(scores.shape[1]) >= visible[:, None]
            run.indexer[layer] = scores.masked_fill(hidden, -torch.inf), own[0]
            run.taps[layer, "index_scores"] = run.indexer[layer][0]
            return own if ours is None else ours[layer, "topk"][None]

        indexer.scorer.forward, indexer.forward = score, choose
