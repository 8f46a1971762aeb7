"""The search finds the turn wherever it is, whatever cannot be judged, and never asks twice."""

import math
from itertools import product

import pytest

from dsv4.commits.search import Answer, search

GOOD, BAD, SKIP = Answer.GOOD, Answer.BAD, Answer.SKIP


def asking(row):
    """Answers of a row, and the list of what was asked."""
    asked: list[int] = []

    def ask(place):
        assert place not in asked
        asked.append(place)
        return row[place]

    return ask, asked


@pytest.mark.parametrize("count", range(2, 10))
def test_every_turn_with_every_set_of_skips(count):
    for turn in range(1, count):
        for skips in product([False, True], repeat=count - 2):
            row = [GOOD if place < turn else BAD for place in range(count)]
            row = [
                row[0],
                *(SKIP if skip else one for one, skip in zip(row[1:-1], skips, strict=True)),
                row[-1],
            ]
            ask, asked = asking(row)
            found = search(count, ask)
            below = max(place for place in range(turn) if row[place] == GOOD)
            above = min(place for place in range(turn, count) if row[place] == BAD)
            assert found.first == range(below + 1, above + 1)
            judged = [place for place in asked if row[place] != SKIP]
            assert len(judged) <= 2 + math.ceil(math.log2(count - 1)) + sum(skips)
            assert list(found.asked) == asked


def test_without_skips_it_asks_as_few_as_a_binary_search_does():
    for count in range(2, 70):
        for turn in range(1, count):
            ask, asked = asking([GOOD] * turn + [BAD] * (count - turn))
            assert search(count, ask).first == range(turn, turn + 1)
            assert len(asked) <= 2 + math.ceil(math.log2(count - 1)) if count > 2 else len(asked) == 2


@pytest.mark.parametrize("count", range(2, 8))
def test_in_any_row_what_it_finds_is_a_turn(count):
    for row in product([GOOD, BAD, SKIP], repeat=count):
        found = search(count, asking(row)[0])
        judged = [place for place in range(1, count) if row[place] != SKIP]
        top = judged[-1] if judged else 0
        assert found.top == top
        if row[0] != GOOD or row[top] != BAD:
            assert not found.first
            continue
        first, last = found.first[0], found.first[-1]
        assert row[first - 1] == GOOD
        assert row[last] == BAD
        assert all(row[place] == SKIP for place in found.first[:-1])
