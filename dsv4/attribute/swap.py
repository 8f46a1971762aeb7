"""A variant of which some ops, at some layers, are the reference's: :class:`Swapped`.

A swapped op computes as the reference does, on the variant's inputs: choices too, which are made anew and not
replayed. What it stores has the reference's format, in a cache of that format. A fault in the variant belongs to the
op that shows it, and goes with it.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from dsv4.attribute.ops import EMBED, OPS, Place
from dsv4.model.cache import Batch, SequenceCache
from dsv4.model.layer import Env, Stages, Written
from dsv4.model.numerics import Numerics
from dsv4.model.stages import HeadStages, LayerStages
from dsv4.model.transformer import Layer, Probe, Transformer, unchanged
from dsv4.run.modes import Wrap, unwrapped
from dsv4.taps import MODEL

STORES = {"kv_store": "window", "comp_store": "entries", "index_k_store": "index"}  # stage -> what it fills


def with_wide_scores(num: Numerics) -> Numerics:
    """The same numerics, whose index scores take no operand for narrow: the same bits, at more cost.

    A plan's query is narrow because its ``index_q`` stored it so. The reference's is not, and the cheap product of
    narrow operands would depend on its order (:func:`kernels.matmul.ref.matmul`).
    """
    return replace(num, index_narrow=False)


class Faulty:
    """Stages of a variant, what its probes change included: a fault is part of the stage that shows it."""

    def __init__(self, stages: Stages, layer: Layer, wrap: Wrap) -> None:
        self._stages, self._layer, self._wrap = stages, layer, wrap

    @property
    def names(self) -> tuple[str, ...]:
        """Stages, in order."""
        return self._stages.names

    def run(self, stage: str, env: Env, batch: Batch) -> Written:
        """See :meth:`dsv4.model.layer.Stages.run`."""
        probe = self._wrap(_unseen)(batch.positions)
        written = self._stages.run(stage, env, batch)
        return {name: probe(self._layer, name, value) for name, value in written.items()}


def _unseen(positions: Tensor) -> Probe:
    return unchanged


def faulty(stages: Stages, layer: Layer, wrap: Wrap) -> Stages:
    """Stages of a variant with what ``wrap`` puts around their probes; the stages themselves if that is nothing."""
    return stages if wrap is unwrapped else Faulty(stages, layer, wrap)


class Mixed:
    """Stages of one layer: those in ``swapped`` are the other model's."""

    def __init__(self, own: Stages, other: Stages, swapped: frozenset[str]) -> None:
        self._own, self._other, self.swapped = own, other, swapped

    @property
    def names(self) -> tuple[str, ...]:
        """Stages, in order."""
        return self._own.names

    def run(self, stage: str, env: Env, batch: Batch) -> Written:
        """See :meth:`dsv4.model.layer.Stages.run`."""
        return (self._other if stage in self.swapped else self._own).run(stage, env, batch)


class Swapped(Transformer):
    """A variant with some ops of the reference; runs wherever a :class:`~dsv4.model.transformer.Transformer` does.

    Parameters
    ----------
    variant, reference : Transformer
        On refs, of one checkpoint. A fault that changes the model is in ``variant`` already.
    places : (layer, op) pairs to swap; "model" for what belongs to no layer.
    wrap : what a fault puts around the variant's probes.

    Raises
    ------
    ValueError
        ``index_q`` is to be swapped beneath scores that take it for narrow, see :func:`with_wide_scores`.
    """

    def __init__(
        self,
        variant: Transformer,
        reference: Transformer,
        places: Collection[Place],
        wrap: Wrap = unwrapped,
    ) -> None:
        self.config, self.weights = variant.config, variant.weights
        self.numerics, self.ops, self.page_size = variant.numerics, variant.ops, variant.page_size
        self.variant, self.reference, self.places = variant, reference, frozenset(places)
        if variant.numerics.index_narrow and any(op == "index_q" for _, op in self.places):
            raise ValueError(
                "index_q: the variant's scores take the reference's query for narrow: with_wide_scores"
            )
        self._mixed = [
            self._mix(own, other, layer, wrap)
            for layer, (own, other) in enumerate(zip(variant.stages, reference.stages, strict=True))
        ]
        self.stages = cast(list[LayerStages], self._mixed)
        self.head = cast(HeadStages, self._mix(variant.head, reference.head, MODEL, wrap))

    def _mix(self, own: Stages, other: Stages, layer: Layer, wrap: Wrap) -> Mixed:
        swapped = frozenset(stage for at, op in self.places if at == layer for stage in OPS[op])
        return Mixed(faulty(own, layer, wrap), other, swapped)

    def new_cache(self, window_capacity: int | None = None) -> SequenceCache:
        """Empty cache of one sequence, each store in the format of what fills it."""
        cache, other = (model.new_cache(window_capacity) for model in (self.variant, self.reference))
        for own, theirs, stages in zip(cache.layers, other.layers, self._mixed, strict=True):
            for stage in stages.swapped & STORES.keys():
                setattr(own, STORES[stage], getattr(theirs, STORES[stage]))
        return cache

    def first_streams(self, batch: Batch) -> Tensor:
        """See :meth:`dsv4.model.transformer.Transformer.first_streams`."""
        source = self.reference if (MODEL, EMBED) in self.places else self.variant
        return source.first_streams(batch)


def values(written: Written) -> dict[str, Any]:
    """What a stage writes, without the account of which entries it closed."""
    return {name: value for name, value in written.items() if not name.endswith("_closed")}
