"""A model on kernels: :class:`KernelTransformer` is a :class:`~dsv4.model.transformer.Transformer` on one device."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from dsv4.backend.cache import PooledCache, layer_pools
from dsv4.backend.launches import counted
from dsv4.backend.layer import Seen
from dsv4.backend.paths import check_plan, check_sizes
from dsv4.backend.stages import KernelLayerStages, residual_dtype
from dsv4.model.cache import Batch, SequenceCache, next_batch
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import of_plan
from dsv4.model.ops import REFS
from dsv4.model.stages import MODEL_STAGES
from dsv4.model.transformer import Probe, Transformer, unchanged
from dsv4.model.weights import ModelWeights, on_device
from dsv4.plan import Plan
from kernels.hc.kernel import head_collapse
from kernels.linear.wide_kernel import fp32_linear
from kernels.rmsnorm.kernel import rmsnorm

BF16, FP32 = torch.bfloat16, torch.float32


def not_seen(name: str, layer: int, value: Tensor) -> None:
    """Look at nothing."""


class KernelHead:
    """Final collapse, norm, and ``lm_head`` in FP32."""

    names = MODEL_STAGES

    def __init__(self, weights: ModelWeights, config: ModelConfig, plan: Plan, device: torch.device) -> None:
        self.hc, self.norm = on_device(weights.hc_head, device), weights.norm.to(device)
        (matrix,) = weights.lm_head.stored
        # cast: exempt(once, as the model is loaded: the architecture's head is FP32)
        self.lm_head, self.config, self.plan = matrix.to(device, FP32), config, plan

    def run(self, stage: str, env: Any, batch: Batch) -> dict[str, Any]:
        """``head``: streams (T, N, D) to hidden (T, D); ``lm_head``: hidden to logits (T, V) FP32."""
        if stage == "lm_head":
            hidden = env["hidden"].to(self.norm.device).float()  # cast: fixed(B4_head)
            return {"logits": fp32_linear(hidden, self.lm_head)}
        streams, eps, dtype = env["streams"].to(self.norm.device), self.config.rms_norm_eps, FP32
        x = head_collapse(
            streams, self.hc.fn, self.hc.base, self.hc.scale, norm_eps=eps, hc_eps=self.config.hc_eps
        )
        if self.plan.casts.head == "bf16":
            dtype = BF16
        return {"hidden": rmsnorm(x, self.norm, eps=eps, dtype=dtype)}


class KernelTransformer(Transformer):
    """A DSV4 model under one plan on kernels.

    Parameters
    ----------
    config, weights : the checkpoint; its stored bytes are copied to ``device``.
    plan : Plan
    page_size : tokens a cache page.
    device : a CUDA device, or the CPU under Triton's interpreter.
    seen : see :class:`dsv4.backend.layer.KernelLayer`.

    Attributes
    ----------
    launches : launches of the last forward pass in which every sequence had one token.
    requantised : inputs of a step that are quantised again, as their second reader is stored in another format.

    Raises
    ------
    NoKernelError
        No kernel for the plan, a size or a stored format; nothing has run.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        plan: Plan,
        *,
        page_size: int = 64,
        device: torch.device | str = "cuda",
        seen: Seen = not_seen,
    ) -> None:
        check_plan(plan)
        check_sizes(config)
        self.config, self.weights, self.plan, self.page_size = config, weights, plan, page_size
        self.numerics, self.ops = of_plan(plan, config), REFS
        self._device = torch.device(device)
        self.stages = [
            KernelLayerStages(layer, layer_weights, config, self.numerics, plan, self._device, seen)
            for layer, layer_weights in enumerate(weights.layers)
        ]
        self.head = KernelHead(weights, config, plan, self._device)  # type: ignore[assignment]
        # cast: exempt(once, as the model is loaded: rows come out as the first layer's residual is stored)
        self.embedding = weights.embed.to(self._device, residual_dtype(self.numerics, 0))
        self.pools = layer_pools(config, self.numerics, page_size, self._device)
        self.launches = Counter[str]()
        self.requantised = sum(layer.requantised for layer in self.stages)  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:
        """Where kernels run."""
        return self._device

    @property
    def row_alone(self) -> bool:
        """Never: prefill and decode are other launches, and sum in other orders."""
        return False

    def new_cache(self, window_capacity: int | None = None) -> SequenceCache:
        """Empty cache of one sequence; ``window_capacity`` matters to a ring alone, which none is here."""
        return PooledCache(self.config, self.pools, self._device)

    def forward(self, caches: list[SequenceCache], chunks: list[Tensor], probe: Probe = unchanged) -> Tensor:
        """See :meth:`dsv4.model.transformer.Transformer.forward`; logits come back to the CPU."""
        self.check(caches, chunks)
        batch = next_batch(caches, [chunk.to(self._device) for chunk in chunks])
        with counted() as launches:
            logits = self.run(batch, probe)
        if all(len(chunk) == 1 for chunk in chunks):
            self.launches = launches
        for cache, chunk in zip(caches, chunks, strict=True):
            cache.advance(len(chunk))  # type: ignore[attr-defined]
        return logits.cpu()

    def first_streams(self, batch: Batch) -> Tensor:
        """The embedding, once a stream: (T, N, D) as the residual of layer 0 is stored."""
        x = self.embedding[batch.tokens]
        return x[:, None, :].expand(-1, self.config.hc_mult, -1).contiguous()
