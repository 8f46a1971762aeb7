"""The text of tokens as they come: whole characters only, and cut where a stop string begins."""

from collections.abc import Sequence

from dsv4.prompts import PromptTokenizer


def text_of(tokenizer: PromptTokenizer, tokens: Sequence[int]) -> str:
    """Text of a whole sequence, as :class:`TextStream` gives it."""
    stream = TextStream(tokenizer)
    for token in tokens:
        stream.push(token)
    stream.close()
    return stream.text


class TextStream:
    """Text of one sequence, token by token.

    A character may take several tokens, and so may a stop string: what could still become one is held back.

    Parameters
    ----------
    tokenizer : PromptTokenizer
    stop : strings that end the text; none of them is part of it.

    Attributes
    ----------
    text : all text so far, up to the stop string.
    stopped : the stop string that ended it, None while there is none.

    Raises
    ------
    ValueError
        An empty stop string.
    """

    def __init__(self, tokenizer: PromptTokenizer, stop: Sequence[str] = ()) -> None:
        if "" in stop:
            raise ValueError("a stop string is empty: it would end every text before its first character")
        self._tokenizer, self._decoder, self._stop = tokenizer, tokenizer.stream(), tuple(stop)
        self._pending: list[int] = []  # tokens of a character that is not whole yet
        self._longest = max(map(len, stop), default=0)
        self._given = 0
        self.text = ""
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        """Text that is sure after one more token and was not given out before."""
        self._pending.append(token)
        piece = self._decoder(token)
        if not piece:
            return ""
        self._pending.clear()
        before = len(self.text)
        self.text += piece
        self._cut(before)
        return self._give(len(self.text) - (0 if self.stopped else self._held()))

    def close(self) -> str:
        """Give out the rest: what was held back, and a character that never became whole, as U+FFFD."""
        if self._pending and self.stopped is None:
            self.text += self._tokenizer.decode(self._pending)
            self._pending.clear()
        return self._give(len(self.text))

    def _cut(self, before: int) -> None:
        """End the text at the stop string that is whole first (of two, the longer), however tokens cut it."""
        found = []
        for stop in self._stop:
            at = self.text.find(stop, max(before - len(stop) + 1, 0))
            if at >= 0:
                found.append((at + len(stop), at, stop))
        if found:
            _, at, self.stopped = min(found)
            self.text = self.text[:at]

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0

    def _give(self, end: int) -> str:
        piece, self._given = self.text[self._given : end], max(end, self._given)
        return piece
