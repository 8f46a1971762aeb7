"""Repetition of a token sequence: the loop that it ends in, and distinct n-grams. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

# Where these come from: see final_loop.
MAX_PERIOD = (
    256  # tokens of a repeated phrase; Holtzman's script: 90. nano's tokens are bytes, others' about four
)
COPIES = 3
MIN_LENGTH = 51  # tokens of a loop: what the same script asks of a phrase of one token


@dataclass(frozen=True)
class Loop:
    """A phrase that is repeated up to the end.

    Attributes
    ----------
    onset : step of its first token; every token before it is not part of the loop.
    period : tokens of the phrase.
    copies : how often it stands there, the last copy maybe in part.
    """

    onset: int
    period: int
    copies: float


def final_loop(
    tokens: Sequence[int],
    *,
    max_period: int = MAX_PERIOD,
    copies: int = COPIES,
    min_length: int = MIN_LENGTH,
) -> Loop | None:
    """The loop that a sequence ends in, None if it ends in none.

    With n tokens x, a loop of period p from step t is ``x[i] == x[i + p]`` for every i from t to n - p - 1: from t on
    the text is one phrase of p tokens again and again, up to the last token. It counts if it holds ``copies`` whole
    phrases and ``min_length`` tokens. The *repetition onset* is the smallest such t over all p up to
    ``max_period``, the period the smallest p that has it.

    The definition follows the repetition rate of Holtzman et al., "The Curious Case of Neural Text Degeneration"
    (ICLR 2020): a phrase repeated three times or more at the end of a generation. Their script (ari-holtzman/degen,
    metrics/repetition.py) tells the phrase but not where it began, and asks for two copies of three tokens or more,
    or 51 of one or two. A byte model writes such runs in sound text (indentation, rules of a table), hence one least
    length for every period here, and three copies.

    A loop that ends again, in other tokens or in a stop id, is none: the stop id must then be among ``tokens``.

    Parameters
    ----------
    tokens : generated ids in order.
    max_period, copies, min_length : int
        See above, each 1 or more.

    Raises
    ------
    ValueError
        A parameter under 1, or ``copies`` under 2: every sequence is one copy of itself.
    """
    if max_period < 1 or copies < 2 or min_length < 1:
        raise ValueError(
            f"max_period = {max_period}, copies = {copies}, min_length = {min_length}: expected 1 or more, 2 or"
            " more copies"
        )
    size, best = len(tokens), None
    for period in range(1, min(max_period, size // copies) + 1):
        onset = size - period
        while onset > 0 and tokens[onset - 1] == tokens[onset - 1 + period]:
            onset -= 1
        length = size - onset
        if length >= max(copies * period, min_length) and (best is None or onset < best.onset):
            best = Loop(onset, period, length / period)
    return best


def distinct(tokens: Sequence[int], n: int) -> float | None:
    """Share of different n-grams among all: 1 without repetition; None of fewer than n tokens.

    Li et al., "A Diversity-Promoting Objective Function for Neural Conversation Models" (NAACL 2016), per sequence.

    Raises
    ------
    ValueError
        ``n`` under 1.
    """
    if n < 1:
        raise ValueError(f"n = {n}: expected the tokens of an n-gram, 1 or more")
    grams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None
