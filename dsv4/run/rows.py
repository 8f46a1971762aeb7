"""Which rows of a prompt are dumped and judged."""

from dataclasses import dataclass

import numpy as np

from dsv4.taps import PHASES


@dataclass(frozen=True)
class Rows:
    """Judged rows of one prompt.

    Attributes
    ----------
    prompt : tokens of the prompt.
    prefill, decode : token positions, ascending, int64.
    """

    prompt: int
    prefill: np.ndarray
    decode: np.ndarray

    @property
    def all(self) -> np.ndarray:
        """Prefill rows, then decode rows: ascending."""
        return np.concatenate((self.prefill, self.decode))

    @property
    def total(self) -> int:
        """Tokens of the prompt and its decode steps."""
        return self.prompt + len(self.decode)

    @property
    def calls(self) -> list[slice]:
        """Rows of each call of a decode: the prompt, then token by token."""
        return [slice(0, self.prompt), *(slice(row, row + 1) for row in self.decode.tolist())]

    def phase(self, position: int) -> str:
        """Phase that a position belongs to."""
        return PHASES[position >= self.prompt]

    def entries(self, ratio: int) -> np.ndarray:
        """Compressed entries of a layer that are judged: the newest that each judged row sees."""
        closed = np.unique((self.all + 1) // ratio)
        return closed[closed > 0] - 1


def choose_rows(prompt: int, required: tuple[int, ...], count: int, decode_steps: int) -> Rows:
    """Judged rows: those the prompt names, its ends, then evenly between until there are ``count``.

    Parameters
    ----------
    prompt : int
        Tokens of the prompt.
    required : positions that the prompt file names; all of them are taken.
    count : int
        ``prefill_rows``.
    decode_steps : int
    """
    chosen = {row for row in required if row < prompt} | {0, prompt - 1}
    for position in np.linspace(0, prompt - 1, num=max(count, 2)).round().astype(int):
        if len(chosen) >= min(count, prompt):
            break
        chosen.add(int(position))
    return Rows(
        prompt=prompt,
        prefill=np.array(sorted(chosen), np.int64),
        decode=np.arange(prompt, prompt + decode_steps, dtype=np.int64),
    )
