"""The variant's own run along some texts, kept so that a swapped run repeats no layer that cannot change."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.attribute.ops import EMBED, OPS, Layer, Place, places
from dsv4.attribute.swap import Swapped, faulty, values
from dsv4.model.cache import Batch, next_batch
from dsv4.model.layer import Stages
from dsv4.model.transformer import Transformer
from dsv4.run.modes import Wrap, unwrapped
from dsv4.taps import MODEL
from kernels.linear.ref import Activation

READERS = ("attend",)  # stages that read what other ops stored


@dataclass(frozen=True, kw_only=True)
class OwnRun:
    """A variant, the reference, and what the variant did along some texts, all in one pass.

    Attributes
    ----------
    variant, reference, wrap : see :class:`~dsv4.attribute.swap.Swapped`.
    sequences : token ids (T_i,) int64
    streams : (sum T_i, N, D) FP32 that enter each layer, and the head.
    logits : (sum T_i, V) FP32
    places : op -> where it is.
    same : places at which the reference's op, given the variant's inputs, gives the variant's bits: swapping them
        alone changes nothing.
    """

    variant: Transformer
    reference: Transformer
    wrap: Wrap
    sequences: Sequence[Tensor]
    streams: Sequence[Tensor]
    logits: Tensor
    places: dict[str, list[Place]]
    same: frozenset[Place]

    def swapped(self, swap: Collection[Place]) -> Tensor:
        """Logits (sum T_i, V) FP32 of the same texts with some ops swapped.

        Starts at the lowest layer where that changes a bit: below, the streams are those of the own run.
        """
        moving = [place for place in swap if place not in self.same]
        if not moving:
            return self.logits
        model = Swapped(self.variant, self.reference, swap, self.wrap)
        first = min(self._depth(place) for place in moving)
        batch = next_batch([model.new_cache() for _ in self.sequences], list(self.sequences))
        streams = model.first_streams(batch) if first < 0 else self.streams[first]
        return model.run_from(max(first, 0), streams, batch)

    def _depth(self, place: Place) -> int:
        layer, op = place
        if isinstance(layer, int):
            return layer
        return -1 if op == EMBED else len(self.variant.stages)


def own_run(
    variant: Transformer, reference: Transformer, sequences: Sequence[Tensor], wrap: Wrap = unwrapped
) -> OwnRun:
    """Run a variant along some texts, from empty caches, and the reference's ops beside it on the same inputs.

    Parameters
    ----------
    variant, reference, wrap : see :class:`~dsv4.attribute.swap.Swapped`.
    sequences : token ids (T_i,) int64, one or more each.

    Raises
    ------
    ValueError
        A sequence is too long for the model, or a token id out of range.
    """
    layers = [stages.names for stages in variant.stages]
    where = places(layers, variant.head.names)
    every = {place for at in where.values() for place in at}
    beside = Swapped(variant, reference, every, wrap)
    caches, other_caches = ([model.new_cache() for _ in sequences] for model in (variant, beside))
    variant.check(caches, sequences)
    batch, other = (next_batch(each, list(sequences)) for each in (caches, other_caches))
    streams = [variant.first_streams(batch)]
    different = set[Place]()
    if not same_bits(streams[0], reference.first_streams(batch)):
        different.add((MODEL, EMBED))
    for layer, (own, theirs) in enumerate(zip(variant.stages, reference.stages, strict=True)):
        env, changed = _run_both(faulty(own, layer, wrap), theirs, layer, streams[-1], batch, other)
        different |= changed
        streams.append(env["streams"])
    head, changed = _run_both(
        faulty(variant.head, MODEL, wrap), reference.head, MODEL, streams[-1], batch, other
    )
    return OwnRun(
        variant=variant,
        reference=reference,
        wrap=wrap,
        sequences=sequences,
        streams=streams,
        logits=head["logits"],
        places=where,
        same=frozenset(every - different - changed),
    )


def _run_both(
    own: Stages, theirs: Stages, layer: Layer, streams: Tensor, batch: Batch, other: Batch
) -> tuple[dict[str, Any], set[Place]]:
    """Run one layer of the variant, and the reference's stages on the same inputs: all written, and ops that differ.

    The reference's stages keep caches of their own (``other``). Only a stage that reads what another op stored reads
    it where the variant's op did.
    """
    op_of = {stage: op for op, stages in OPS.items() for stage in stages}
    env: dict[str, Any] = {"streams": streams}
    closed: dict[str, Any] = {}  # by the reference's compressors, in their caches
    different = set[Place]()
    for stage in own.names:
        op = op_of[stage]
        answer = theirs.run(stage, {**env, **closed}, batch if stage in READERS else other)
        written = own.run(stage, env, batch)
        closed |= {name: value for name, value in answer.items() if name not in values(answer)}
        if not all(same_bits(value, answer[name]) for name, value in values(written).items()):
            different.add((layer, op))
        env |= written
    return env, different


def same_bits(one: Any, two: Any) -> bool:
    """Whether two tensors, or two activations, hold the same bits; 0 and -0 are not the same."""
    if isinstance(one, Activation):
        return same_bits(one.values, two.values) and same_bits(one.row_scale, two.row_scale)
    if one is None or two is None:
        return one is two
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if one.dtype == torch.float32:
        one, two = (x.contiguous().view(torch.int32) for x in (one, two))
    return torch.equal(one, two)
