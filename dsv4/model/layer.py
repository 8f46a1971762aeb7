"""What every stage of one decoder layer works with: its weights, sizes, rounding points, ops and rotation."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from dsv4.model.cache import Batch
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import Numerics
from dsv4.model.ops import Ops
from dsv4.model.weights import LayerWeights
from kernels.rope.ref import cos_sin, inverse_frequencies

Env = Mapping[str, Any]
Written = dict[str, Any]


class Stages(Protocol):
    """Stages of one layer or of the head: the model's own, the noise floor's, or mixed from two models."""

    @property
    def names(self) -> tuple[str, ...]:
        """Stages, in order."""
        ...

    def run(self, stage: str, env: Env, batch: Batch) -> Written:
        """Tensors that ``stage`` writes, given the named tensors it reads."""
        ...


def rope_frequencies(config: ModelConfig, layer: int) -> Tensor:
    """Frequencies of a layer: plain on window-only layers, YaRN at the compressed theta elsewhere."""
    if config.kind(layer) == "window":
        return inverse_frequencies(config.qk_rope_head_dim, config.rope_theta)
    return inverse_frequencies(
        config.qk_rope_head_dim,
        config.compress_rope_theta,
        factor=config.rope_factor,
        original_max_position=config.rope_original_max_position,
        beta_fast=config.rope_beta_fast,
        beta_slow=config.rope_beta_slow,
    )


class LayerBase:
    """One layer under one numerics and one op table."""

    def __init__(
        self, layer: int, weights: LayerWeights, config: ModelConfig, numerics: Numerics, ops: Ops
    ) -> None:
        self.layer, self.weights, self.config = layer, weights, config
        self.numerics, self.ops = numerics, ops
        self.frequencies = rope_frequencies(config, layer).to(weights.input_norm.device)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotation of rows at ``positions`` in this layer."""
        return cos_sin(positions, self.frequencies)
