"""A chat of several turns whose cache is kept: a turn reads only what the cache has not read yet."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dsv4.generate.batch import Continuation, Heard, Request, generate, unheard
from dsv4.generate.sampling import Sampling
from dsv4.model.cache import SequenceCache
from dsv4.model.prefill import CHUNK
from dsv4.model.transformer import Transformer
from dsv4.prompts import Prompt, PromptTokenizer, Role


def extension(read: Sequence[int], tokens: Sequence[int]) -> Sequence[int] | None:
    """What ``tokens`` has behind ``read``; None where it does not begin with it, or has nothing more.

    A cache cannot go back: compressed entries of tokens that are no part of the text any more would stay visible.
    """
    begins = len(tokens) > len(read) and list(tokens[: len(read)]) == list(read)
    return tokens[len(read) :] if begins else None


@dataclass
class Chat:
    """Turns of a user and a model.

    Attributes
    ----------
    model, tokenizer : of one checkpoint.
    stop_ids, stop_strings, sampling, chunk : as of :class:`~dsv4.generate.batch.Request`; each answer draws from the
        seed anew, so that it is the answer of the same turns given at once.
    turns : (role, text) pairs so far.
    warm : tokens of the latest turn that the cache had read already; 0 for a turn that began cold.
    """

    model: Transformer
    tokenizer: PromptTokenizer
    stop_ids: Sequence[int]
    stop_strings: Sequence[str] = ()
    sampling: Sampling = field(default_factory=Sampling)
    chunk: int = CHUNK
    turns: tuple[tuple[Role, str], ...] = ()
    warm: int = 0
    _cache: SequenceCache | None = None
    _read: list[int] = field(default_factory=list)
    _written: dict[int, list[int]] = field(default_factory=dict)

    def ask(self, text: str, budget: int, heard: Heard = unheard) -> Continuation:
        """Answer one more turn of the user with up to ``budget`` tokens; ``heard`` as in :func:`generate`.

        The cache goes on from the last turn if the chat template lays the chat out as an extension of what was read
        and written; else (it drops what an earlier turn thought, say) the whole chat is read again.

        Raises
        ------
        CheckpointError
            No chat template, or one that fails.
        ValueError
            The chat is longer than the model's positions.
        """
        turns: tuple[tuple[Role, str], ...] = (*self.turns, ("user", text))
        tokens = self.tokenizer.encode(Prompt(id="chat", kind="chat", turns=turns), self._written)
        rest = extension(self._read, tokens) if self._cache else None
        request = Request(
            tokens=tokens if rest is None else rest,
            budget=budget,
            stop_ids=self.stop_ids,
            stop_strings=self.stop_strings,
            sampling=self.sampling,
            cache=None if rest is None else self._cache,
        )
        (answer,) = generate(self.model, self.tokenizer, [request], chunk=self.chunk, heard=heard, drafts=())
        self.warm = 0 if rest is None else len(self._read)
        ended = answer.reason == "stop_id"
        self._written[len(turns)] = list(answer.tokens[:-1] if ended else answer.tokens)
        self.turns = (*turns, ("assistant", answer.text))
        self._cache, self._read = answer.cache, [*tokens, *answer.tokens[:-1]]
        return answer
