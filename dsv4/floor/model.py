"""The second opinion as a model that isolated mode can drive."""

from typing import ClassVar

from dsv4.floor.accumulation import FP32, Accumulation
from dsv4.floor.dither import Dither
from dsv4.floor.stages import FloorHead, FloorLayer
from dsv4.model.cache import SequenceCache
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import plain
from dsv4.model.weights import ModelWeights
from dsv4.plan import Plan


class FloorModel:
    """Every stage in FP64 under ``plan``, dithered by ``seed`` (None: not at all) as ``sums`` are kept."""

    carries: ClassVar[bool] = False  # a compressor is given a sequence's rows whole

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        plan: Plan,
        seed: int | None,
        sums: Accumulation = FP32,
    ) -> None:
        sums = FP32 if plan.rounding == "none" else sums  # then no operand is FP8
        dither = Dither(seed)
        self.config = config
        self.stages = [
            FloorLayer(layer, layer_weights, config, plan, dither, sums)
            for layer, layer_weights in enumerate(weights.layers)
        ]
        self.head = FloorHead(weights, config, plan, dither)

    def new_cache(self, window_capacity: int | None = None) -> SequenceCache:
        """Return an empty cache: the floor keeps its own rows, the sequence is only named."""
        return SequenceCache(self.config, plain(self.config), window_capacity=window_capacity)
