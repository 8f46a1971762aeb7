"""A decode step of a batch as one CUDA graph.

:meth:`dsv4.backend.model.KernelTransformer.forward` asks the host at every step: pages, page tables, counts of
entries, whether a window closes, the rotation of a position. A :class:`DecodeStep` runs the same stages on
:mod:`dsv4.backend.fixed` caches, where none of these is a host value, so that the launches and their shapes are the
same at every position. It replays them until the room that was asked for is used up.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4.backend.cache import PooledCache
from dsv4.backend.fixed import FixedCache, joined
from dsv4.backend.model import KernelTransformer
from dsv4.model.cache import Batch, Segment
from dsv4.model.layer import rope_frequencies
from dsv4.model.transformer import Probe, unchanged
from kernels.rope.ref import cos_sin


class DecodeStep:
    """One token more of each sequence, ``steps`` times.

    Parameters
    ----------
    model : KernelTransformer
    caches : of sequences of any lengths, one token or more each; not to be used elsewhere until :meth:`hand_back`.
    steps : int
        Tokens of each that there is room for.
    probe : see :meth:`dsv4.model.transformer.Transformer.forward`; called as the graph is captured: the
        tensors that it saw last hold the latest step's values. Entries' taps have a row a sequence, which counts where
        ``comp_closed`` and ``index_closed`` have no -1, and scores a column for every entry that there is room for.

    Attributes
    ----------
    tokens, positions : (B,) int64 on the device; what the next replay reads.
    logits : (B, V) FP32 on the device; of the latest step.

    Raises
    ------
    ValueError
        A sequence has no token, or would outgrow ``max_position_embeddings``.
    """

    def __init__(
        self, model: KernelTransformer, caches: Sequence[PooledCache], steps: int, probe: Probe = unchanged
    ) -> None:
        lengths = [cache.length for cache in caches]
        self.room = max(lengths) + steps
        if min(lengths) < 1 or self.room > model.config.max_position_embeddings:
            raise ValueError(
                f"lengths {lengths} and {steps} steps: expected 1 token or more each, within the model's"
            )
        self.model, self.probe, self.steps, self.taken = model, probe, steps, 0
        self.positions = torch.tensor(lengths, device=model.device)
        self.tokens = torch.zeros_like(self.positions)
        ratios = model.config.compress_ratios
        self.caches = joined([FixedCache(cache, ratios, cache.length + steps) for cache in caches])
        self._angles = _angles(model, self.room)
        self._pages = self._in_pools()
        self._held: list[Any] = []
        self.logits = torch.empty(0)
        self._graph: torch.cuda.CUDAGraph | None = None
        if model.device.type == "cuda":
            self.run()  # compiles; what it writes at these positions, the first step writes again
            self._graph, self.logits = _captured(self.run)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Append one token to each sequence: (B,) int64 to logits (B, V), on the device, good until the next call.

        Raises
        ------
        RuntimeError
            No room is left, or other sequences made a pool grow: the graph's pages are not the pool's any more.
        """
        if self.taken == self.steps:
            raise RuntimeError(f"there was room for {self.steps} steps")
        if any(now is not then for now, then in zip(self._in_pools(), self._pages, strict=True)):
            raise RuntimeError("a pool of pages has grown since the graph was captured")
        self.tokens.copy_(tokens)
        self.replay()
        self.positions += 1
        self.taken += 1
        return self.logits

    def replay(self) -> None:
        """Run the step at :attr:`positions` on :attr:`tokens`; a second time it gives the same."""
        if self._graph is None:
            self.logits = self.run()
        else:
            self._graph.replay()

    def hand_back(self) -> None:
        """Leave the caches as eager steps would have; this object is of no more use."""
        for cache in self.caches:
            cache.hand_back(self.taken)
        self.taken = self.steps

    def by_stage(self) -> dict[str, list[torch.cuda.CUDAGraph]]:
        """Graphs of the step's stages, one a layer that launches anything: what a stage takes, apart from all others.

        Each replays on the tensors that the stage before it left here, so the values are the step's.
        """
        found: dict[str, list[torch.cuda.CUDAGraph]] = {}
        with self._fixed_shapes() as batch:
            streams: Any = self.model.first_streams(batch)
            for stages in (*self.model.stages, self.model.head):
                env: dict[str, Any] = {"streams": streams}
                for stage in stages.names:
                    graph, written = _captured(partial(stages.run, stage, env, batch))
                    env |= written
                    if graph is not None:
                        graph.replay()  # capturing computes nothing
                        found.setdefault(stage, []).append(graph)
                self._held.append(env)  # a replay reads it
                streams = env["streams"]
        return found

    def run(self) -> Tensor:
        """Launch the step at :attr:`positions` on :attr:`tokens`, without a graph."""
        with self._fixed_shapes() as batch:
            return self.model.run(batch, self.probe)

    @contextmanager
    def _fixed_shapes(self) -> Iterator[Batch]:
        """The batch at :attr:`positions`, while the model's layers read their angles on the device."""
        segments: Any = tuple(Segment(cache, slice(row, row + 1), 0) for row, cache in enumerate(self.caches))  # type: ignore[arg-type]
        # another tensor object each time: what a stage keeps of the last run's positions is not this run's
        batch = Batch(self.positions.view(-1), self.tokens.view(-1), segments)
        stages = self.model.stages
        try:
            for layer, angles in zip(stages, self._angles, strict=True):
                layer.angles = angles  # type: ignore[attr-defined]
            yield batch
        finally:
            for layer in stages:
                layer.angles = None  # type: ignore[attr-defined]

    def _in_pools(self) -> list[Tensor]:
        pools = [pool for layer in self.model.pools for pool in (layer.records, layer.keys)]
        return [pool.pages for pool in pools if pool is not None]


def _captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph | None, Any]:
    """What ``run`` launches as a graph, None if nothing, and what it returned: tensors that a replay fills."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with torch.cuda.graph(graph):
            result = run()
    return None if any("graph is empty" in str(one.message).lower() for one in said) else graph, result


def _angles(model: KernelTransformer, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Each layer's cosines and sines of positions 0 to ``rows``, made on the CPU as eager steps do."""
    positions, kinds, found = torch.arange(rows), {}, []
    for layer in range(model.config.num_hidden_layers):
        kind = model.config.kind(layer) == "window"
        if kind not in kinds:
            cos, sin = cos_sin(positions, rope_frequencies(model.config, layer))
            kinds[kind] = cos.to(model.device), sin.to(model.device)
        found.append(kinds[kind])
    return found
