"""Generate a batch: one prefill, then decode steps of those sequences that are not done yet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dsv4.generate.sampling import Sampler, Sampling
from dsv4.generate.text import TextStream
from dsv4.model.cache import SequenceCache
from dsv4.model.prefill import CHUNK, prefill
from dsv4.model.transformer import Transformer
from dsv4.prompts import PromptTokenizer

Reason = Literal["stop_id", "stop_string", "budget", "positions", "not_finite"]
Heard = Callable[[int, str], None]


def unheard(sequence: int, text: str) -> None:
    """Listen to nothing."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to be continued.

    Attributes
    ----------
    tokens : ids to read, one or more: the prompt, or what ``cache`` lacks of it.
    budget : most tokens to generate, the one that stops included.
    stop_ids : tokens that end the text.
    stop_strings : texts that end it, see :class:`~dsv4.generate.text.TextStream`.
    sampling : how tokens are chosen.
    cache : with the tokens before ``tokens``; None: a new one.

    Raises
    ------
    ValueError
        Nothing to read, or a budget under 1.
    """

    tokens: Sequence[int]
    budget: int
    stop_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    sampling: Sampling = field(default_factory=Sampling)
    cache: SequenceCache | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot give a token."""
        if not self.tokens or self.budget < 1:
            raise ValueError(
                f"{len(self.tokens)} tokens to read, a budget of {self.budget}: expected 1 or more of each"
            )


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What a sequence gave.

    Attributes
    ----------
    tokens : ids in order, a stop id last if one came.
    text : their text, without stop id and stop string.
    reason : why it ended: a stop id, a stop string, the budget, the model's positions, or logits that are not finite.
    stop : the stop id, or the stop string, that ended it.
    cache : has read the request's tokens and all generated ones but the last.
    """

    tokens: tuple[int, ...]
    text: str
    reason: Reason
    stop: int | str | None
    cache: SequenceCache


def generate(
    model: Transformer,
    tokenizer: PromptTokenizer,
    requests: Sequence[Request],
    *,
    chunk: int = CHUNK,
    heard: Heard = unheard,
) -> list[Continuation]:
    """Continue every request, all in one batch. A sequence that ends leaves it, and the others go on.

    Parameters
    ----------
    model : Transformer
        On refs or on kernels.
    tokenizer : of its checkpoint.
    requests : any number, of any lengths.
    chunk : rows of a prefill pass, see :func:`dsv4.model.prefill.prefill`.
    heard : called with a request's index and its next piece of text, as soon as that is sure.

    Returns
    -------
    list of Continuation
        In the order of ``requests``.

    Raises
    ------
    ValueError
        See :func:`dsv4.model.prefill.prefill`.
    """
    if not requests:
        return []
    sequences = [_Sequence(model, tokenizer, one) for one in requests]
    logits = prefill(
        model,
        [one.cache for one in sequences],
        [torch.tensor(one.request.tokens, dtype=torch.int64) for one in sequences],
        chunk,
    )
    running = list(enumerate(sequences))
    while True:
        for (index, one), row in zip(running, logits, strict=True):
            if piece := one.take(row):
                heard(index, piece)
        running = [(index, one) for index, one in running if one.reason is None]
        if not running:
            return [one.done() for one in sequences]
        tokens = [torch.tensor(one.tokens[-1:]) for _, one in running]
        logits = model.forward([one.cache for _, one in running], tokens)


class _Sequence:
    """One sequence on its way."""

    def __init__(self, model: Transformer, tokenizer: PromptTokenizer, request: Request) -> None:
        self.request, self.cache = request, request.cache or model.new_cache()
        self.room = model.config.max_position_embeddings
        self.tokens: list[int] = []
        self.reason: Reason | None = None
        self.stop: int | str | None = None
        self._sampler = Sampler(request.sampling)
        self._text = TextStream(tokenizer, request.stop_strings)

    def take(self, logits: Tensor) -> str:
        """Choose a token from (V,) logits; returns the text that is sure now."""
        if not torch.isfinite(logits).all():
            return self._end("not_finite", None)
        token = self._sampler(logits)
        self.tokens.append(token)
        if token in self.request.stop_ids:
            return self._end("stop_id", token)
        piece = self._text.push(token)
        if self._text.stopped is not None:
            return piece + self._end("stop_string", self._text.stopped)
        if len(self.tokens) == self.request.budget:
            return piece + self._end("budget", None)
        if self.cache.length == self.room:
            return piece + self._end("positions", None)
        return piece

    def done(self) -> Continuation:
        """What came out."""
        assert self.reason is not None
        return Continuation(
            tokens=tuple(self.tokens),
            text=self._text.text,
            reason=self.reason,
            stop=self.stop,
            cache=self.cache,
        )

    def _end(self, reason: Reason, stop: int | str | None) -> str:
        self.reason, self.stop = reason, stop
        return self._text.close()
