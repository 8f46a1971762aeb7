"""Loops and distinct n-grams of hand-made sequences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.generate.repetition import Loop, distinct, final_loop

SMALL = {"max_period": 8, "copies": 3, "min_length": 3}
PROSE = list(range(100, 140))  # all different


def loop_of(tokens, **changes):
    return final_loop(tokens, **SMALL | changes)


@pytest.mark.parametrize(
    ("tokens", "loop"),
    [
        pytest.param([], None, id="empty"),
        pytest.param([1], None, id="one-token"),
        pytest.param([1, 1], None, id="shorter-than-three-copies"),
        pytest.param(PROSE, None, id="none"),
        pytest.param([*PROSE, 1, 1, 1], Loop(40, 1, 3.0), id="period-1-in-the-last-tokens"),
        pytest.param([*PROSE, 1, 1], None, id="two-copies-are-none"),
        pytest.param([1, 1, 1], Loop(0, 1, 3.0), id="all-of-it"),
        pytest.param([*PROSE, *[1, 2] * 5], Loop(40, 2, 5.0), id="period-2"),
        pytest.param([*PROSE, *[1, 2] * 5, 1], Loop(40, 2, 5.5), id="the-last-copy-in-part"),
        pytest.param([*PROSE, *[1, 2, 3, 4, 5, 6, 7] * 3], Loop(40, 7, 3.0), id="period-7"),
        pytest.param([*PROSE, *range(9), *range(9), *range(9)], None, id="period-9-over-the-largest"),
        pytest.param([*[1, 2] * 9, *PROSE], None, id="a-loop-that-ends-again"),
        pytest.param([*[1, 2] * 9, 3], None, id="a-loop-that-ends-in-the-last-token"),
        pytest.param([*[1, 2] * 9, *PROSE, 5, 5, 5, 5], Loop(58, 1, 4.0), id="the-last-of-two-loops"),
        pytest.param([*[1, 2] * 4, *[1, 1] * 2], Loop(8, 1, 4.0), id="another-phrase"),
        pytest.param([2, *[1, 2] * 4], Loop(0, 2, 4.5), id="begins-inside-a-phrase"),
        # the smallest period, as twice the phrase begins where the phrase does
        pytest.param([9, *[1, 2] * 6], Loop(1, 2, 6.0), id="the-shortest-phrase"),
        pytest.param([1, 1, 2] * 3, Loop(0, 3, 3.0), id="a-run-inside-the-phrase"),
    ],
)
def test_final_loop(tokens, loop):
    assert loop_of(tokens) == loop


@pytest.mark.parametrize(("length", "found"), [(50, False), (51, True)])
def test_short_runs_of_sound_text_are_no_loop_by_default(length, found):
    assert (final_loop([*PROSE, *[32] * length]) is not None) == found


def test_long_phrases_are_found_by_default():
    phrase = [*range(255), 7]
    assert final_loop([*PROSE, *phrase * 3]) == Loop(40, 256, 3.0)
    assert final_loop([*PROSE, *[*phrase, 300] * 3]) is None


@given(st.lists(st.integers(0, 2), max_size=40))
def test_it_is_the_definition(tokens):
    """By trying every onset and every period."""
    size = len(tokens)

    def loops(onset, period):
        long = size - onset >= max(3 * period, 3)
        return long and all(tokens[i] == tokens[i + period] for i in range(onset, size - period))

    every = [(onset, p) for onset in range(size) for p in range(1, 9) if loops(onset, p)]
    found = loop_of(tokens)
    assert (found and (found.onset, found.period)) == min(every, default=None)


@pytest.mark.parametrize("wrong", [{"max_period": 0}, {"copies": 1}, {"min_length": 0}])
def test_parameters_that_find_everything_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} = "):
        loop_of([1], **wrong)


@pytest.mark.parametrize(
    ("tokens", "n", "share"),
    [
        ([1, 2, 3], 1, 1.0),
        ([1, 1, 1, 1], 1, 0.25),
        ([1, 2, 1, 2, 1], 2, 0.5),
        ([1, 2], 3, None),
        ([], 1, None),
    ],
)
def test_distinct(tokens, n, share):
    assert distinct(tokens, n) == share


def test_distinct_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="n = 0"):
        distinct([1], 0)
