"""Decode steps of a batch that stays together: a forward pass each, or replays of one that was captured."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dsv4.model.cache import SequenceCache
from dsv4.model.transformer import Transformer


class Steps(Protocol):
    """One token more of each sequence a call; the caches are whole again after :meth:`hand_back`."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """Append (B,) int64 to the sequences: logits (B, V) FP32, good until the next call."""
        ...

    def hand_back(self) -> None:
        """Leave the caches as forward passes would have."""
        ...


class Passes:
    """Steps that are forward passes; there may be any number."""

    def __init__(self, model: Transformer, caches: Sequence[SequenceCache]) -> None:
        self.model, self.caches = model, list(caches)

    def __call__(self, tokens: Tensor) -> Tensor:
        """See :class:`Steps`."""
        return self.model.forward(self.caches, list(tokens.split(1)))

    def hand_back(self) -> None:
        """Nothing: a pass leaves its caches whole."""


def steps_of(model: Transformer, caches: Sequence[SequenceCache], most: int) -> Steps:
    """Up to ``most`` steps of these sequences: replays where the model captures a step, else passes."""
    return model.captured(caches, most) or Passes(model, caches)
