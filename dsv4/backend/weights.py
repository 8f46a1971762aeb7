"""A layer's weights as kernels read them: the checkpoint's own bytes on the device, never converted."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.backend.paths import NoKernelError
from dsv4.backend.products import Native
from dsv4.model.config import ModelConfig
from dsv4.model.weights import CompressorWeights, HyperWeights, LayerWeights, on_device
from kernels.linear.fp8_product_kernel import Fp8Weight, Mxfp4Weight
from kernels.linear.kernel import Nvfp4Weight
from kernels.linear.ref import Weight
from kernels.linear.wide_kernel import bf16_linear, fp32_linear


def native(weight: Weight, device: torch.device, groups: int | None = None) -> Native:
    """Stored bytes of a matrix (N, K), or of a stack; ``groups`` cuts N.

    Raises
    ------
    NoKernelError
        The checkpoint stores another format.
    """
    if weight.format not in ("nvfp4", "fp8", "mxfp4") or not weight.stored:
        raise NoKernelError(f"no kernel for a matrix stored as {weight.format}: expected nvfp4, fp8 or mxfp4")
    codes, scales, *scale_2 = (part.to(device) for part in weight.stored)
    if groups is not None:
        codes, scales = (part.unflatten(0, (groups, -1)) for part in (codes, scales))
    codes, scales = codes.contiguous(), scales.contiguous()
    if weight.format == "nvfp4":
        # cast: exempt(once, as the model is loaded)
        return Nvfp4Weight(codes, scales, scale_2[0].float().reshape(-1).contiguous())
    return Fp8Weight(codes, scales) if weight.format == "fp8" else Mxfp4Weight(codes, scales)


def stacked(first: Weight, second: Weight, device: torch.device) -> Native:
    """Two matrices of one size and format as a stack (2, N, K): the shared expert's gate and up."""
    parts: list[Any] = [native(weight, device) for weight in (first, second)]
    codes, scales = (_stack([part[k] for part in parts]) for k in (0, 1))
    scale_2 = [torch.cat([part.scale_2 for part in parts])] if isinstance(parts[0], Nvfp4Weight) else []
    return type(parts[0])(codes, scales, *scale_2)


def _stack(parts: list[Tensor]) -> Tensor:
    """``torch.stack``, of FP8 too."""
    return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


class Wide:
    """A matrix (N, K) stored in BF16 or FP32; the product reads BF16 rows, or FP32 ones."""

    def __init__(self, weight: Weight, device: torch.device) -> None:
        if weight.format not in ("bf16", "fp32"):
            raise NoKernelError(
                f"no kernel for a projection stored as {weight.format}: expected bf16 or fp32"
            )
        (matrix,) = weight.stored
        self.matrix = matrix.to(device).contiguous()

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x @ W.T`` of (T, K) BF16 or FP32: (T, N) of ``dtype``."""
        if self.matrix.dtype == torch.bfloat16:
            return bf16_linear(x, self.matrix, dtype=dtype)
        # cast: exempt(of a projection that the checkpoint stores in FP32: released ones store BF16)
        return fp32_linear(x.float(), self.matrix).to(dtype)


@dataclass(frozen=True, kw_only=True)
class NativeCompressor:
    """A compressor's projections, position bias (ratio, C) and norm (K,), FP32."""

    kv: Wide
    gate: Wide
    position_bias: Tensor
    norm: Tensor


@dataclass(frozen=True, kw_only=True)
class NativeLayer:
    """One layer on the device; fields as :class:`dsv4.model.weights.LayerWeights`, ``shared`` is gate over up."""

    attn_hc: HyperWeights
    input_norm: Tensor
    sinks: Tensor
    q_a: Native
    q_a_norm: Tensor
    q_b: Native
    kv: Native
    kv_norm: Tensor
    compressor: NativeCompressor | None
    index_compressor: NativeCompressor | None
    index_q_b: Wide | None
    index_weights: Wide | None
    o_a: Native
    o_b: Native
    ffn_hc: HyperWeights
    post_norm: Tensor
    router: Tensor
    e_score_bias: Tensor | None
    tid2eid: Tensor | None
    experts_gate_up: Native
    experts_down: Native
    shared: Native
    shared_down: Native


def native_layer(weights: LayerWeights, config: ModelConfig, device: torch.device) -> NativeLayer:
    """Put one layer's stored bytes on ``device``."""
    plain = ("attn_hc", "input_norm", "q_a_norm", "kv_norm", "sinks", "ffn_hc", "post_norm", "router")
    plain += ("e_score_bias",)
    narrow = ("q_a", "q_b", "kv", "o_b", "experts_gate_up", "experts_down", "shared_down")
    indexer, table = weights.indexer, weights.tid2eid
    same: dict[str, Any] = {name: on_device(getattr(weights, name), device) for name in plain}
    same |= {name: native(getattr(weights, name), device) for name in narrow}
    return NativeLayer(
        **same,
        tid2eid=None if table is None else table.to(device).contiguous(),
        o_a=native(weights.o_a, device, config.o_groups),
        shared=stacked(weights.shared_gate, weights.shared_up, device),
        compressor=_compressor(weights.compressor, device),
        index_compressor=_compressor(indexer.compressor if indexer else None, device),
        index_q_b=Wide(indexer.q_b, device) if indexer else None,
        index_weights=Wide(indexer.weights_proj, device) if indexer else None,
    )


def _compressor(weights: CompressorWeights | None, device: torch.device) -> NativeCompressor | None:
    if weights is None:
        return None
    return NativeCompressor(
        kv=Wide(weights.kv, device),
        gate=Wide(weights.gate, device),
        position_bias=weights.position_bias.to(device),
        norm=weights.norm.to(device),
    )
