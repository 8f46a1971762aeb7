"""Texts of which a part may not be known, and what Python's string and path functions make of them."""

import os
import posixpath
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import product

HOLE = "\0"  # a part that only a run knows
UNKNOWN = (HOLE,)
LIMIT = 256  # values of one expression; of more, none is told apart
Values = tuple[str, ...]

# Methods that leave a path or name as it is, or read the file that it names.
SAME = {"resolve", "absolute", "as_posix", "expanduser", "strip", "encode", "decode", "read", "read_text"}
SAME |= {"read_bytes", "open"}


def joined(parts: Sequence[Values], join: Callable[[Iterable[str]], str] = "".join) -> Iterable[str]:
    """Join one value of each part, in every combination."""
    number = 1
    for part in parts:
        number *= len(part)
    return UNKNOWN if number > LIMIT else [join(choice) for choice in product(*parts)]


def path(parts: Iterable[str]) -> str:
    """``os.path.join``."""
    return os.path.join(*parts)  # noqa: PTH118 - pathlib would lose a hole's meaning and "./"


def above(text: str, steps: int) -> str:
    """Folder so many steps above a path."""
    for _ in range(steps):
        text = posixpath.dirname(text)
    return text


def percent(text: str) -> str:
    """``text % …``: what is put in is not looked at."""
    return re.sub(r"%[-#0-9. ]*[a-z]", HOLE, text)


def attribute(name: str, texts: Values) -> Values:
    """``path.parent`` and its like."""
    parts: dict[str, Callable[[str], str]] = {
        "parent": posixpath.dirname,
        "name": posixpath.basename,
        "stem": lambda text: posixpath.splitext(posixpath.basename(text))[0],
        "suffix": lambda text: posixpath.splitext(text)[1],
    }
    if name not in parts:
        return UNKNOWN
    return tuple(parts[name](text) if "/" in text or HOLE not in text else HOLE for text in texts)


def method(name: str, texts: Values, given: Sequence[Values]) -> Iterable[str]:
    """``text.name(*given)`` of a string or a path."""
    if name in SAME:
        return texts
    if name == "joinpath":
        return joined([texts, *given], path)
    if name == "with_name" and given:
        return joined([tuple(map(posixpath.dirname, texts)), given[0]], path)
    if name == "with_suffix" and given:
        return joined([tuple(posixpath.splitext(text)[0] for text in texts), given[0]])
    if name == "format":
        values = given[0] if len(given) == 1 else UNKNOWN
        return [re.sub(r"\{[^{}]*\}", lambda _, v=value: v, text) for text in texts for value in values]
    if name == "replace" and len(given) == 2:
        return [t.replace(old, new) for t in texts for old in given[0] for new in given[1] if HOLE not in old]
    if name in ("lower", "upper"):
        return [getattr(text, name)() for text in texts]
    return UNKNOWN
