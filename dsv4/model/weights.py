"""The weights of a model as the stages want them: typed, dequantised where the equations ask."""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernels.linear.ref import Weight

T = TypeVar("T")


def on_device(weights: T, device: torch.device | str) -> T:
    """The same weights with every tensor on ``device``; what is there already is not copied.

    Parameters
    ----------
    weights : a dataclass of this module, a :class:`Weight`, a tuple of them, a tensor or None
    device : where to

    Returns
    -------
    of the same type
    """
    moved: Any = weights
    if isinstance(weights, Tensor):
        moved = weights.to(device)
    elif isinstance(weights, tuple):
        moved = tuple(on_device(part, device) for part in weights)
    elif is_dataclass(weights) and not isinstance(weights, type):
        moved = type(weights)(
            **{f.name: on_device(getattr(weights, f.name), device) for f in fields(weights)}
        )
    return moved


@dataclass(frozen=True, kw_only=True)
class HyperWeights:
    """One mHC site: fn (N*(N+2), N*D), base (N*(N+2),), scale (3,), FP32 (the head has N rows, 1 scale)."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, kw_only=True)
class CompressorWeights:
    """Projections (D, C), position bias (ratio, C) and norm (head_dim,); C is 2 x head_dim in CSA."""

    kv: Weight
    gate: Weight
    position_bias: Tensor
    norm: Tensor


@dataclass(frozen=True, kw_only=True)
class IndexerWeights:
    """The indexer's own compressor, its query projection (q_lora_rank, H*D) and head weights (D, H)."""

    compressor: CompressorWeights
    q_b: Weight
    weights_proj: Weight


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Everything one decoder layer holds; matrices are :class:`Weight`, vectors FP32.

    ``e_score_bias`` steers a top-k layer's choice; ``tid2eid`` (V, k) is a hash layer's table.
    Exactly one of the two is None.
    """

    attn_hc: HyperWeights
    input_norm: Tensor
    q_a: Weight
    q_a_norm: Tensor
    q_b: Weight
    kv: Weight
    kv_norm: Tensor
    sinks: Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None
    o_a: Weight
    o_b: Weight
    ffn_hc: HyperWeights
    post_norm: Tensor
    router: Tensor
    e_score_bias: Tensor | None
    tid2eid: Tensor | None
    experts_gate_up: Weight
    experts_down: Weight
    shared_gate: Weight
    shared_up: Weight
    shared_down: Weight


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """Embedding (V, D) FP32, layers, and the head (``lm_head`` (D, V), computed in FP32)."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    hc_head: HyperWeights
    norm: Tensor
    lm_head: Weight
