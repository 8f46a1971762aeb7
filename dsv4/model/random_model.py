"""Random small checkpoints for tests: every layer kind, every stored format, unequal scales.

The values are made to exercise what zeros and ones would hide: distinct sinks, biased gates,
an asymmetric comb, activations beyond the clamp.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsv4.model.checkpoint import Tensors, build
from dsv4.model.config import ModelConfig, parse_config
from dsv4.model.names import expected_shapes
from dsv4.model.weights import ModelWeights
from kernels.formats import e2m1, fp8_block, mxfp4, nvfp4, ue8m0
from kernels.linear.ref import WeightFormat

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 8, 4],
    "index_n_heads": 2,
    "index_head_dim": 64,
    "index_topk": 6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_hash_layers": 1,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.0,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
}
QUANTISED = ("q_a_proj", "q_b_proj", "self_attn.kv_proj", "o_a_proj", "o_b_proj", "experts")


def small_config(**changes: Any) -> ModelConfig:
    """A small config with every layer kind; keyword arguments replace ``config.json`` keys."""
    return parse_config(SMALL | changes)


def random_tensors(
    config: ModelConfig,
    seed: int,
    *,
    quantise: bool = True,
    formats: Mapping[str, WeightFormat] | None = None,
) -> dict[str, Tensor]:
    """Stored tensors of a random checkpoint: NVFP4 linears and experts (or FP32), the rest FP32.

    ``formats`` stores matrices whose name holds a key in another format; the last key that fits counts.
    """
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, Tensor] = {}
    for name, shape in expected_shapes(config).items():
        value = _draw(name, shape, config, generator)
        if quantise and any(part in name for part in QUANTISED) and "indexer" not in name:
            fits: list[WeightFormat] = [kind for part, kind in (formats or {}).items() if part in name]
            stored |= stored_as(name, value, fits[-1] if fits else "nvfp4")
        else:
            stored[name] = value
    return stored


def random_weights(
    config: ModelConfig,
    seed: int,
    *,
    quantise: bool = True,
    formats: Mapping[str, WeightFormat] | None = None,
) -> ModelWeights:
    """Weights of :func:`random_tensors`, through the checkpoint's own path."""
    return build(config, Tensors(random_tensors(config, seed, quantise=quantise, formats=formats), config))


def stored_as(name: str, value: Tensor, weight_format: WeightFormat) -> dict[str, Tensor]:
    """One matrix (..., N, K) as a checkpoint stores it: its codes or values, and its scales."""
    if weight_format == "nvfp4":
        return _nvfp4(name, value)
    if weight_format == "mxfp4":
        codes, scale = mxfp4.quantise(value)
        exponents = ue8m0.encode(scale).view(torch.float8_e8m0fnu)
        return {name: e2m1.pack(codes).view(torch.int8), f"{name}_scale_inv": exponents}
    if weight_format == "fp8":
        codes, scale = fp8_block.quantise_weight(value)
        return {name: codes.view(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    return {name: value.to({"bf16": torch.bfloat16, "fp32": torch.float32}[weight_format])}


def _draw(name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator) -> Tensor:
    if name.endswith("tid2eid"):
        order = torch.rand(shape[0], config.n_routed_experts, generator=generator).argsort(dim=-1)
        return order[:, : shape[1]]
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith("scale"):
        return 0.5 + 0.1 * noise.abs()
    if name.endswith(("base", "sinks", "position_bias", "e_score_correction_bias")):
        return noise * (0.05 if "bias" in name and "score" in name else 1.0)
    if "embed" in name:
        return noise
    return noise * 1.5 * shape[-1] ** -0.5


def _nvfp4(name: str, value: Tensor) -> dict[str, Tensor]:
    gsa = value.abs().amax((-1, -2)) / 2688
    codes, scales, _ = nvfp4.quantise(value, gsa[..., None, None])
    return {
        name: e2m1.pack(codes),
        f"{name}_scale": scales.view(torch.float8_e4m3fn),
        f"{name}_scale_2": gsa,
    }
