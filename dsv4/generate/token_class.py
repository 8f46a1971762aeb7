"""What a token is by its own text: one class each, so that a text's errors can be told apart. Imports no torch."""

import unicodedata
from typing import Literal

from dsv4.prompts import PromptTokenizer

TokenClass = Literal["control", "newline", "space", "letter", "digit", "punctuation", "other"]
BY_CATEGORY: dict[str, TokenClass] = {
    "L": "letter",
    "M": "letter",
    "N": "digit",
    "P": "punctuation",
    "S": "punctuation",
}
BROKEN = "\ufffd"  # what part of a character decodes to
BLANK = "\u2581"  # SentencePiece's space, which a decoder drops at the beginning of a text


def token_class(tokenizer: PromptTokenizer, token: int) -> TokenClass:
    """Class of a token, of a byte as of a longer piece.

    A token of white space alone is a ``newline`` if it holds one, else ``space``. Any other goes by its first
    character that is no white space, so that `` the`` is a letter and ``):`` punctuation: letters and marks,
    digits and other numbers, punctuation and symbols (Unicode's L and M, N, P and S). ``control``: the tokenizer's
    added tokens. ``other``: control characters, part of a character alone, an id that the tokenizer does not know.
    """
    if tokenizer.is_control(token):
        return "control"
    name = tokenizer.name_of(token)
    return class_of(tokenizer.decode([token]) or (name or "").replace(BLANK, " "))


def class_of(text: str) -> TokenClass:
    """Class of a token that is no added one, by its text; see :func:`token_class`."""
    first = text.lstrip()[:1]
    if not first:
        return "newline" if "\n" in text or "\r" in text else "space" if text else "other"
    return "other" if first == BROKEN else BY_CATEGORY.get(unicodedata.category(first)[0], "other")
