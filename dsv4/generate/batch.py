"""Generate a batch: one prefill, then passes over those sequences that are not done yet.

A pass reads a sequence's newest token, and behind it a draft where there is one: tokens that probably follow. Of
these as many are kept as the model then chooses itself. Such a pass goes over a copy of the cache, which is dropped
with the first draft token that the model does not choose; what was kept is read again in the next pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dsv4.generate.drafts import Drafter
from dsv4.generate.sampling import Sampler, Sampling
from dsv4.generate.steps import steps_of
from dsv4.generate.text import TextStream
from dsv4.model.cache import SequenceCache
from dsv4.model.prefill import CHUNK, prefill
from dsv4.model.transformer import Transformer
from dsv4.prompts import PromptTokenizer

Reason = Literal["stop_id", "stop_string", "budget", "positions", "not_finite"]
Heard = Callable[[int, str], None]
MOST_UNREAD = 32  # tokens; a sequence behind by more is read up without a draft


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
    drafts: Sequence[Sequence[int]] | None = None,
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
    drafts : texts, any number, that these may follow in part; None reads token by token. They save time and change
        nothing, so they are not looked at where a row's bits depend on its pass (:attr:`Transformer.row_alone`).

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
    drafted = drafts is not None and model.row_alone
    sequences = [
        _Sequence(model, tokenizer, one, Drafter(drafts or (), one.tokens) if drafted else None)
        for one in requests
    ]
    logits = prefill(
        model,
        [one.cache for one in sequences],
        [torch.tensor(one.request.tokens, dtype=torch.int64) for one in sequences],
        chunk,
    )
    running, counts = list(enumerate(sequences)), [1] * len(sequences)
    steps: _Together | None = None
    while True:
        for (index, one), rows in zip(running, logits.split(counts), strict=True):
            if piece := one.take(rows):
                heard(index, piece)
        running = [(index, one) for index, one in running if one.reason is None]
        if steps and not steps.go_on_with(len(running)):
            steps = None
        if not running:
            break
        fed = [one.feed() for _, one in running]
        if drafted:
            logits = model.forward([one.trial for _, one in running], fed)
        else:
            steps = steps or _Together(model, [one for _, one in running])
            logits = steps(torch.cat(fed))
        counts = [len(tokens) for tokens in fed]
    if behind := [one for one in sequences if len(one.unread) > 1]:
        model.forward([one.cache for one in behind], [torch.tensor(one.unread[:-1]) for one in behind])
    return [one.done() for one in sequences]


class _Together:
    """Steps of sequences that each read one token a pass, until one ends or there is no room for another step."""

    def __init__(self, model: Transformer, sequences: "Sequence[_Sequence]") -> None:
        caches = [one.cache for one in sequences]
        room = model.config.max_position_embeddings - max(cache.length for cache in caches)
        self._left = min(max(one.left for one in sequences), room)
        self._size, self._steps = len(sequences), steps_of(model, caches, self._left)

    def __call__(self, tokens: Tensor) -> Tensor:
        """One token more of each: (B,) int64 to logits (B, V) FP32 on the CPU."""
        self._left -= 1
        return self._steps(tokens).cpu()

    def go_on_with(self, size: int) -> bool:
        """Whether the next step is of the same sequences; if not, their caches are handed back."""
        if size == self._size and self._left > 0:
            return True
        self._steps.hand_back()
        return False


class _Sequence:
    """One sequence on its way.

    Attributes
    ----------
    cache : has read everything but ``unread``, the newest tokens.
    trial : what the next pass goes over: ``cache``, or a copy of it where there is a draft.
    """

    def __init__(
        self, model: Transformer, tokenizer: PromptTokenizer, request: Request, drafter: Drafter | None
    ) -> None:
        self.request, self.cache = request, request.cache or model.new_cache()
        self.trial, self.unread = self.cache, list[int]()
        self.tokens: list[int] = []
        self.reason: Reason | None = None
        self.stop: int | str | None = None
        self._room = model.config.max_position_embeddings - self.cache.length - len(request.tokens)
        self._drafter, self._draft = drafter, list[int]()
        self._sampler = Sampler(request.sampling)
        self._text = TextStream(tokenizer, request.stop_strings)

    @property
    def left(self) -> int:
        """Tokens that the budget leaves."""
        return self.request.budget - len(self.tokens)

    def feed(self) -> Tensor:
        """What the next pass reads, (t,) int64: the unread tokens, and a draft of what follows them."""
        if self._drafter and len(self.unread) <= MOST_UNREAD:
            left = min(self.request.budget - 1, self._room) - len(self.tokens)
            self._draft = self._drafter.propose(left)
        self.trial = self.cache.copy() if self._draft else self.cache
        return torch.tensor(self.unread + self._draft)

    def take(self, logits: Tensor) -> str:
        """Choose tokens from the pass's (t, V) logits while its draft holds; returns the text that is sure now."""
        draft, self._draft, before = self._draft, [], len(self.tokens)
        text, kept = "", 0
        for row in logits[len(logits) - 1 - len(draft) :]:
            text += self._choose(row)
            if self.reason or kept == len(draft) or self.tokens[-1] != draft[kept]:
                break
            kept += 1
        if kept == len(draft):
            self.cache, self.unread = self.trial, self.tokens[before + kept :]
        else:
            self.unread += self.tokens[before:]
        return text

    def _choose(self, logits: Tensor) -> str:
        """Choose a token from (V,) logits."""
        if not torch.isfinite(logits).all():
            return self._end("not_finite", None)
        token = self._sampler(logits)
        self.tokens.append(token)
        if token in self.request.stop_ids:
            return self._end("stop_id", token)
        if self._drafter:
            self._drafter.push(token)
        piece = self._text.push(token)
        if self._text.stopped is not None:
            return piece + self._end("stop_string", self._text.stopped)
        if len(self.tokens) == self.request.budget:
            return piece + self._end("budget", None)
        if len(self.tokens) > self._room:
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
