"""Streams of text: whole characters, and stop strings however tokens cut them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.generate.text import TextStream
from dsv4.prompts import PromptTokenizer

TOKENIZER = PromptTokenizer(Path(__file__).parents[2] / "data/nano")  # every byte is a token
TEXT = "a\u00e9\u20ac\U0001f600b"


def streamed(data, stop=()):
    """Pieces that came out token by token, and the stream."""
    stream, pieces = TextStream(TOKENIZER, stop), []
    for byte in data:
        pieces.append(stream.push(byte))
        if stream.stopped is not None:
            break
    return [*pieces, stream.close()], stream


def test_a_character_comes_out_whole():
    pieces, stream = streamed(TEXT.encode())
    assert "".join(pieces) == stream.text == TEXT
    assert [piece for piece in pieces if piece] == list(TEXT)


@pytest.mark.parametrize("data", [b"ab\xe2\x82", b"ab\xff", b"a\xe2b\x82", b"\xf0\x9f\x98"])
def test_bytes_that_are_no_text_are_marked_and_lose_nothing_else(data):
    pieces, stream = streamed(data)
    assert "".join(pieces) == stream.text
    assert stream.text.replace("\ufffd", "") == data.decode(errors="ignore")
    assert "\ufffd" in stream.text


BYTES = [0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xEF, 0xBF, 0xBD, 65, 258]


@given(st.lists(st.sampled_from(BYTES), max_size=12))
def test_a_streamed_text_is_that_of_its_tokens_together(ids):
    """Halves of characters, bytes that begin none, U+FFFD itself, control tokens in between."""
    pieces, stream = streamed(ids)
    assert "".join(pieces) == stream.text == TOKENIZER.decode(ids)


def test_control_tokens_show_by_name():
    assert "".join(streamed([97, 258, 98])[0]) == "a<|user|>b"


@pytest.mark.parametrize(
    ("text", "stop", "before", "by"),
    [
        ("one\ntwo", ["\n"], "one", "\n"),
        ("abENDcd", ["END"], "ab", "END"),
        ("abEN", ["END"], "abEN", None),
        ("aEENDb", ["END"], "aE", "END"),
        ("caf\u00e9 au lait", ["\u00e9 a"], "caf", "\u00e9 a"),
        ("abcd", ["bcd", "c"], "ab", "c"),  # whole first
        ("abcd", ["bc", "abc"], "", "abc"),  # whole at once: the longer
        ("abc", [], "abc", None),
    ],
)
def test_a_stop_string_ends_the_text(text, stop, before, by):
    pieces, stream = streamed(text.encode(), stop)
    assert (stream.text, stream.stopped) == (before, by)
    assert "".join(pieces) == before


def test_the_first_whole_stop_string_counts_inside_a_token_too():
    pieces, stream = streamed([97, 258], ["<|user", "us"])  # one token, "<|user|>"
    assert (stream.text, stream.stopped) == ("a<|", "us")
    assert "".join(pieces) == "a<|"


def test_what_may_become_a_stop_string_is_held_back():
    stream = TextStream(TOKENIZER, ["END", "EN\u00e9"])
    assert [stream.push(byte) for byte in b"xEN "] == ["x", "", "", "EN "]
    assert [stream.push(byte) for byte in "EN\u00e9".encode()] == ["", "", "", ""]
    assert stream.stopped == "EN\u00e9"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_no_piece_is_ever_taken_back(text, stop):
    pieces, stream = streamed(text.encode(), stop)
    assert "".join(pieces) == stream.text
    ends = [text.find(one) + len(one) for one in stop if one in text]
    assert (stream.stopped is None) == (not ends)
    if ends:
        assert len(stream.text) + len(stream.stopped) == min(ends)
    assert not any(one in stream.text for one in stop)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        TextStream(TOKENIZER, [""])
