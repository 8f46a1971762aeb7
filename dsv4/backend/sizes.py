"""Models of the released sizes with weights of zeros: what a decode step launches does not depend on values.

Layers of one kind share their tensors, so that 61 layers take the memory of two; on the ``meta`` device none.
"""

from typing import Any

import torch
from torch import Tensor

from dsv4.backend.cache import PooledCache
from dsv4.backend.model import KernelTransformer
from dsv4.judge.launches import FLASH, PRO
from dsv4.model.checkpoint import Tensors, build
from dsv4.model.config import ModelConfig, parse_config
from dsv4.model.memory import first_tail
from dsv4.model.names import expected_shapes
from dsv4.model.random_model import QUANTISED, SMALL
from dsv4.model.weights import ModelWeights
from kernels import build_spec
from kernels.linear.ref import Weight

RATIOS = {"flash": list(FLASH.compress_ratios), "pro": list(PRO.compress_ratios)}
SIZES = {sizes.name: sizes for sizes in (build_spec.FLASH, build_spec.PRO)}
BYTE, FP32, BF16 = torch.uint8, torch.float32, torch.bfloat16


def released(name: str) -> ModelConfig:
    """Sizes of ``flash`` or ``pro``."""
    known = {key: value for key, value in vars(SIZES[name]).items() if key in SMALL}
    more = {"vocab_size": 129280, "num_hash_layers": 3, "max_position_embeddings": 2**20}
    ratios = {"compress_ratios": RATIOS[name], "num_hidden_layers": len(RATIOS[name])}
    return parse_config(SMALL | known | more | ratios)


class Zeros(Tensors):
    """Stored tensors of zeros on a device, by name; see :func:`dsv4.model.checkpoint.build`."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config, self.device, self.shapes = config, device, expected_shapes(config)
        self._made: dict[tuple[str, tuple[int, ...]], Any] = {}

    def vector(self, name: str) -> Tensor:
        """FP32 of any shape."""
        return self._shared(name, lambda shape: torch.zeros(shape, dtype=FP32, device=self.device))

    def table(self, name: str) -> Tensor:
        """Experts of each token."""
        return self._shared(name, lambda shape: torch.zeros(shape, dtype=torch.int64, device=self.device))

    def matrix(self, name: str) -> Weight:
        """NVFP4 where released checkpoints hold FP4 or FP8, else BF16."""
        narrow = any(part in name for part in QUANTISED) and "indexer" not in name
        return self._shared(name, self._nvfp4 if narrow or "shared_experts" in name else self._bf16)

    def check_one_gemm(self) -> None:
        """Zeros are of one kind."""

    def _shared(self, name: str, make: Any) -> Any:
        key = name.split(".", 3)[-1] if name.startswith("model.layers.") else name, self.shapes[name]
        if key not in self._made:
            self._made[key] = make(self.shapes[name])
        return self._made[key]

    def _nvfp4(self, shape: tuple[int, ...]) -> Weight:
        *stack, n, k = shape
        made = [torch.zeros(*stack, n, k // per, dtype=BYTE, device=self.device) for per in (2, 16)]
        stored = (*made, torch.ones(stack, device=self.device))
        return Weight(values=_nowhere(*stack, k, n), scale=_nowhere(*stack), format="nvfp4", stored=stored)

    def _bf16(self, shape: tuple[int, ...]) -> Weight:
        stored = (torch.zeros(shape, dtype=BF16, device=self.device),)
        return Weight(values=_nowhere(*shape[::-1]), scale=_nowhere(), format="bf16", stored=stored)


def _nowhere(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64, device="meta")


def zero_weights(config: ModelConfig, device: torch.device) -> ModelWeights:
    """A model's weights, all zero."""
    return build(config, Zeros(config, device))


def filled_cache(model: KernelTransformer, length: int) -> PooledCache:
    """The cache of a sequence of ``length`` tokens of which nothing was computed."""
    cache: Any = model.new_cache()
    cache.length = length
    config = model.config
    for layer, kept in enumerate(cache.layers):
        ratio, csa = config.compress_ratios[layer], kept.index is not None
        kept.window.table += [-1] * (max(length - config.sliding_window, 0) // model.page_size)
        sizes = {"compressor": config.head_dim, "indexer": config.index_head_dim}
        for name in list(sizes)[: bool(ratio) + csa]:
            like = torch.zeros(length % ratio, sizes[name] * (1 + csa), device=model.device)
            tail = first_tail(like, ratio if csa else 0)
            tail.kv, tail.gate = torch.cat((tail.kv, like)), torch.cat((tail.gate, like))
            kept.tails[name] = tail
    return cache
