"""From logits to the next token: greedy, or drawn by temperature and top-p from a sequence's own random numbers."""

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.model.transformer import greedy


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes
    ----------
    temperature : 0 is greedy, ties to the smaller id.
    top_p : of the likeliest tokens as many as reach this share together are drawn from (nucleus sampling, Holtzman
        et al., "The Curious Case of Neural Text Degeneration", 2020, section 3.1).
    seed : of this sequence alone, so that its text does not depend on what is generated beside it.

    Raises
    ------
    ValueError
        A value outside these ranges.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no temperature and no share."""
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature}: expected 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: expected a share over 0 and up to 1")


class Sampler:
    """Chooses a sequence's tokens one after the other; every token takes one random number, greedy ones none."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = random.Random(sampling.seed)  # its sequence is the same on every machine and version

    def __call__(self, logits: Tensor) -> int:
        """Next token: (V,) FP32, finite, to an id."""
        if self.sampling.temperature == 0:
            return int(greedy(logits))
        return draw(logits, self.sampling, self._random.random())


def draw(logits: Tensor, sampling: Sampling, number: float) -> int:
    """The token at ``number`` of the kept tokens' cumulated shares, likeliest first, ties to the smaller id.

    In FP64 and row by row, so that equal logits give equal tokens.

    Parameters
    ----------
    logits : (V,) FP32, finite
    sampling : Sampling
        Of a temperature over 0.
    number : float
        In [0, 1).
    """
    scaled = logits.double() / sampling.temperature
    shares, order = torch.sort(torch.softmax(scaled, dim=-1), descending=True, stable=True)
    reached = shares.cumsum(-1)
    kept = int((reached < sampling.top_p).sum()) + 1  # the token that reaches the share is kept too
    kept = min(kept, len(shares))
    at = int(torch.searchsorted(reached[:kept], number * float(reached[kept - 1]), right=True))
    return int(order[min(at, kept - 1)])
