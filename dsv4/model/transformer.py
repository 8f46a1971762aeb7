"""The forward pass: stages chained layer by layer over a batch of sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from dsv4.model.cache import Batch, SequenceCache, next_batch
from dsv4.model.config import ModelConfig
from dsv4.model.layer import Stages
from dsv4.model.numerics import Numerics
from dsv4.model.ops import REFS, Ops
from dsv4.model.stages import HeadStages, LayerStages, embed
from dsv4.model.weights import ModelWeights
from dsv4.taps import MODEL

Layer = int | str
Probe = Callable[[Layer, str, Any], Any]


def unchanged(layer: Layer, name: str, value: Any) -> Any:
    """Probe that reads nothing and changes nothing."""
    return value


@dataclass
class Transformer:
    """A DSV4 model under one numerics and one op table.

    Attributes
    ----------
    config, weights : the checkpoint.
    numerics : rounding points of every stage.
    ops : op table.
    page_size : tokens a cache page.
    """

    config: ModelConfig
    weights: ModelWeights
    numerics: Numerics
    ops: Ops = REFS
    page_size: int = 64
    stages: list[LayerStages] = field(init=False)
    head: HeadStages = field(init=False)
    carries: ClassVar[bool] = True  # compressors keep an open window between calls

    def __post_init__(self) -> None:
        """Build the stages of every layer."""
        self.stages = [
            LayerStages(layer, weights, self.config, self.numerics, self.ops)
            for layer, weights in enumerate(self.weights.layers)
        ]
        self.head = HeadStages(self.weights, self.config, self.numerics, self.ops)

    @property
    def device(self) -> torch.device:
        """Where the weights are, and so everything else."""
        return self.weights.embed.device

    @property
    def row_alone(self) -> bool:
        """Whether a row's values are the same bits whatever rows it shares a pass with.

        Refs sum exactly, so it is so under every plan that does not tie a row to its launch.
        """
        return self.numerics.gsa == "row"

    def new_cache(self, window_capacity: int | None = None) -> SequenceCache:
        """Empty cache of one sequence."""
        return SequenceCache(
            self.config,
            self.numerics,
            page_size=self.page_size,
            window_capacity=window_capacity,
            device=self.device,
        )

    def forward(self, caches: list[SequenceCache], chunks: list[Tensor], probe: Probe = unchanged) -> Tensor:
        """Run each sequence's next tokens and append them to its cache.

        Parameters
        ----------
        caches : list of SequenceCache
        chunks : list of (t_i,) int64
            A whole prompt, a chunk of one, a decode token or nothing, per sequence.
        probe : callable
            Called with (layer, name, value) for everything a stage writes; what it returns is
            used from there on. A tap returns ``value``; a fault returns something else.

        Returns
        -------
        (sum t_i, V) FP32
            Logits, rows in the order of ``chunks``.

        Raises
        ------
        ValueError
            A sequence would outgrow ``max_position_embeddings``, or a token id is out of range.
        """
        self.check(caches, chunks)
        batch = next_batch(caches, chunks)
        logits = self.run(batch, probe)
        for cache, chunk in zip(caches, chunks, strict=True):
            cache.length += len(chunk)
        return logits

    def captured(self, caches: Sequence[SequenceCache], most: int) -> Any:
        """Up to ``most`` decode steps of these sequences as replays of a captured one; None: this model has none.

        What it gives is a :class:`dsv4.generate.steps.Steps`; until it has handed the caches back they are its own.
        """
        return None

    def run(self, batch: Batch, probe: Probe = unchanged) -> Tensor:
        """All stages over a batch whose caches are ready: logits (T, V) FP32."""
        return self.run_from(0, self.first_streams(batch), batch, probe)

    def first_streams(self, batch: Batch) -> Tensor:
        """The embedding, once a stream: (T, N, D) as the residual of layer 0 is stored."""
        return embed(self.weights, self.config, batch.tokens, self.numerics.residual(0))

    def run_from(self, first: int, streams: Tensor, batch: Batch, probe: Probe = unchanged) -> Tensor:
        """Layers ``first`` and above, then the head, over the streams (T, N, D) that enter it: logits (T, V) FP32."""
        for layer in range(first, len(self.stages)):
            streams = run_stages(self.stages[layer], layer, {"streams": streams}, batch, probe)["streams"]
        return run_stages(self.head, MODEL, {"streams": streams}, batch, probe)["logits"]

    def check(self, caches: Sequence[SequenceCache], chunks: Sequence[Tensor]) -> None:
        """Refuse what :meth:`forward` cannot take, before anything runs; errors as there."""
        for index, (cache, chunk) in enumerate(zip(caches, chunks, strict=True)):
            total = cache.length + len(chunk)
            if total > self.config.max_position_embeddings:
                raise ValueError(
                    f"sequence {index} would reach {total} tokens; max_position_embeddings is "
                    f"{self.config.max_position_embeddings}"
                )
            if len(chunk) and not 0 <= int(chunk.min()) <= int(chunk.max()) < self.config.vocab_size:
                raise ValueError(f"sequence {index} has a token id outside 0..{self.config.vocab_size - 1}")


def run_stages(
    stages: Stages, layer: Layer, env: dict[str, Any], batch: Batch, probe: Probe
) -> dict[str, Any]:
    """Chain the stages of one layer (or the head) over ``env``; returns everything written."""
    for stage in stages.names:
        for name, value in stages.run(stage, env, batch).items():
            env[name] = probe(layer, name, value)
    return env


def greedy(logits: Tensor) -> Tensor:
    """Next token of each row, ties to the smaller id: (T, V) -> (T,) int64."""
    return torch.argmax(logits, dim=-1)
