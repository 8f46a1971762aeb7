"""What every stage of the second opinion has at hand: the layer, its plan, and how values are stored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsv4.floor import equations as eq
from dsv4.floor.accumulation import FP32, Accumulation
from dsv4.floor.dither import Dither
from dsv4.floor.storage import Stored, quantised_input, quantiser
from dsv4.model.cache import Batch
from dsv4.model.config import ModelConfig
from dsv4.model.weights import LayerWeights
from dsv4.plan import Plan
from dsv4.taps import layer_taps
from kernels.formats import bf16, fp8_block
from kernels.linear.ref import Weight

Env = Mapping[str, Any]
Written = dict[str, Any]


def matrix(weight: Weight) -> Tensor:
    """Dequantised (..., K, N) FP64."""
    return weight.values * weight.scale.reshape(*weight.scale.shape, 1, 1)


@dataclass
class LayerBase:
    """One layer of the second opinion; keeps what it stored for the stages that read it.

    Attributes
    ----------
    layer, weights, config, plan : what is computed.
    dither : acts on every value before it is stored.
    sums : how finely the backend under judgement keeps its sums.
    window : (T, K) FP32, the KV rows as read back.
    entries : (C, K) FP32, the compressed rows as read back.
    keys : (C, index_head_dim) FP64, the index keys in the scores' basis.
    """

    layer: int
    weights: LayerWeights
    config: ModelConfig
    plan: Plan
    dither: Dither
    sums: Accumulation = FP32
    window: Tensor = field(default_factory=lambda: torch.empty(0))
    entries: Tensor = field(default_factory=lambda: torch.empty(0))
    keys: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def names(self) -> tuple[str, ...]:
        """Stages of this layer, in order."""
        taps = layer_taps(self.config.compress_ratios[self.layer])
        return tuple(dict.fromkeys(tap.stage for tap in taps))

    def run(self, stage: str, env: Env, batch: Batch) -> Written:
        """Tensors that ``stage`` writes; see :meth:`dsv4.model.stages.LayerStages.run`."""
        function: Callable[[Env, Batch], Written] = getattr(self, stage)
        return function(env, batch)

    def _single(self, x: Tensor, terms: int = 1, normals: Tensor | None = None) -> Tensor:
        """(..., D) FP64 to FP32, as an accumulator that sums ``terms`` products would hold it."""
        return self.dither(x, terms, normals=normals).float()

    def _bf16(self, x: Tensor, terms: int = 1, when: bool = True, normals: Tensor | None = None) -> Tensor:
        """Store (..., D) FP64 in BF16, or keep it in FP32 where the plan has no store here: (..., D) FP32."""
        single = self._single(x, terms, normals)
        return self._store(single) if when else single

    def _store(self, x: Tensor) -> Tensor:
        """Round (..., D) FP32 to BF16, or keep it under a plan that rounds nothing."""
        return x if self.plan.rounding == "none" else bf16.round(x)

    def _read(self, x: Tensor, weight_format: str, norm_quant: str = "fused") -> Stored:
        """What a GEMM reads of (T, K) FP32: see :func:`quantised_input`, or ``x`` itself."""
        if self.plan.rounding == "none":
            return Stored(x.double())
        return quantised_input(x, weight_format, norm_quant)

    def _gemm(self, x: Tensor, weight: Weight) -> Tensor:
        """(T, K) FP64 by a stored (K, N) matrix, stored in BF16: (T, N) FP32."""
        return self._store(self._summed(x @ matrix(weight), x.shape[-1], weight))

    def _summed(self, product: Tensor, terms: int, weight: Weight, normals: Tensor | None = None) -> Tensor:
        """A product (..., N) FP64 of ``terms`` columns with ``weight`` as its accumulator would hold it: FP32.

        An FP8 matrix meets FP8 rows, block by block of 128 columns, each scaled and added in FP32.
        """
        if weight.format == "fp8" and self.sums != FP32:
            cut = fp8_block.GROUP // self.sums.products
            return self.dither(product, cut, self.sums.fp8, normals).float()
        return self._single(product, terms, normals)

    def _angles(self, positions: Tensor) -> Tensor:
        """Rotation angles (T, P / 2) FP64 of this layer at ``positions`` (T,) int64."""
        config = self.config
        if config.compress_ratios[self.layer] == 0:
            return eq.angles(positions, config.qk_rope_head_dim, config.rope_theta, None)
        yarn = (
            config.rope_factor,
            config.rope_original_max_position,
            config.rope_beta_fast,
            config.rope_beta_slow,
        )
        return eq.angles(positions, config.qk_rope_head_dim, config.compress_rope_theta, yarn)

    def _quantise(self, x: Tensor, weight: Weight, norm_quant: str = "fused") -> Stored:
        """What a GEMM with ``weight`` reads of (T, K) FP32."""
        # The dither of the norm before it acts here too: its FP32 result is what the quantiser reads.
        return self._read(self._single(x.double(), x.shape[-1]), weight.format, norm_quant)

    def _second(self, env: Env, name: str, first: Weight, weight: Weight) -> Tensor:
        """What the second reader of a block's input multiplies: (T, K) FP64, quantised again for another format."""
        if quantiser(first.format) == quantiser(weight.format):
            return env[f"{name}_q"].exact
        return self._quantise(env[name], weight, self.plan.norm_quant).exact
