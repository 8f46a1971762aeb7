"""Binary search for the first bad one of a row, where some cannot be judged. Imports nothing of ours."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Answer(StrEnum):
    """What is known of one place."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"


@dataclass(frozen=True, kw_only=True)
class Found:
    """Where good turned bad.

    Attributes
    ----------
    first : places of which one is the first bad one: a single one, or its neighbours that cannot be judged
        before it; empty if the ends do not differ.
    top : the last place that can be judged.
    asked : answers by place, in the order in which they were asked.
    """

    first: range
    top: int
    asked: dict[int, Answer]


def search(count: int, ask: Callable[[int], Answer]) -> Found:
    """Find where a row that starts good and ends bad turns bad, as ``git bisect`` does.

    The last place is asked first, then the one before it while it cannot be judged; then the first
    one; then always the place nearest to the middle of what is left. In a row that turns more than
    once this finds one of the turns: a good place, the bad one of ``first``, and between them none
    that can be judged.

    Parameters
    ----------
    count : how many places there are; 0 is the start.
    ask : answer of a place; asked at most once each.
    """
    asked: dict[int, Answer] = {}

    def at(place: int) -> Answer:
        if place not in asked:
            asked[place] = ask(place)
        return asked[place]

    top = count - 1
    while top > 0 and at(top) == Answer.SKIP:
        top -= 1
    if at(0) != Answer.GOOD or at(top) != Answer.BAD:
        return Found(first=range(0), top=top, asked=asked)
    low, high = 0, top
    while left := [place for place in range(low + 1, high) if asked.get(place) != Answer.SKIP]:
        place = min(left, key=lambda each: abs(each - (low + high) / 2))
        answer = at(place)
        low = place if answer == Answer.GOOD else low
        high = place if answer == Answer.BAD else high
    return Found(first=range(low + 1, high + 1), top=top, asked=asked)
