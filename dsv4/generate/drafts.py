"""Drafts: how a text probably goes on, looked up behind the same tokens in likely texts and in itself.

A draft only saves time. Its tokens are read in one pass with the token before them, and each is kept only if it is
what the model chooses anyway (:mod:`dsv4.generate.batch`): Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding" (ICML 2023), with a lookup in place of a small model, as in Saxena, "Prompt Lookup Decoding"
(2023). Imports no torch.
"""

from collections import defaultdict
from collections.abc import Sequence

LEAST = 2  # tokens that must agree
MOST = 32  # tokens that are compared
LENGTH = 2  # tokens of a draft, for each that agreed: what agreed for long goes on agreeing


class Drafter:
    """Looks up how one text goes on.

    Parameters
    ----------
    likely : texts that this one may follow, in part or as a whole; of equally good places, one in the first wins.
    read : tokens that the text begins with, its prompt.
    """

    def __init__(self, likely: Sequence[Sequence[int]], read: Sequence[int]) -> None:
        self._text: list[int] = []
        self._sources = [*map(list, likely), self._text]
        self._ends: defaultdict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for source, tokens in enumerate(self._sources[:-1]):
            for end in range(LEAST, len(tokens)):
                self._ends[tuple(tokens[end - LEAST : end])].append((source, end))
        for token in read:
            self.push(token)

    def push(self, token: int) -> None:
        """Append a token to the text."""
        self._text.append(token)
        end = len(self._text) - 1  # the newest tokens have nothing behind them yet
        if end >= LEAST:
            self._ends[tuple(self._text[end - LEAST : end])].append((len(self._sources) - 1, end))

    def propose(self, most: int) -> list[int]:
        """Up to ``most`` tokens that followed where the longest run of the newest tokens stood, [] if none did.

        Of runs equally long the one in the first source is taken, and in it the last: loops go on as they went.
        """
        agreed, source, start = 0, 0, 0
        for candidate, end in self._ends.get(tuple(self._text[-LEAST:]), ()):
            count = self._agreeing(self._sources[candidate], end)
            if count > agreed or (count == agreed and candidate == source):
                agreed, source, start = count, candidate, end
        return self._sources[source][start : start + min(most, LENGTH * agreed)]

    def _agreeing(self, tokens: Sequence[int], end: int) -> int:
        """How many tokens before ``end`` are the newest ones of the text, up to MOST."""
        count = LEAST
        limit = min(MOST, end, len(self._text))
        while count < limit and tokens[end - 1 - count] == self._text[-1 - count]:
            count += 1
        return count
