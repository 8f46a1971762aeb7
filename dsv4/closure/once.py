"""Answers that are found once, and dropped when what they rest on has changed."""

import ast
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
Key = tuple[str, str]  # file and qualified name of a function; file "" if a method's object is not known
DEEP = 400  # questions that are asked through each other; this project's tree asks 143
FRAMES = 12  # calls of Python that one question takes at most, with room


class Once:
    """Keeps answers about nodes of syntax trees.

    Attributes
    ----------
    asked : functions whose calls were looked at since it was last emptied.
    """

    def __init__(self) -> None:
        self.asked = set[Key]()
        self._known: dict[
            tuple[str, int], tuple[Any, frozenset[Key], ast.AST]
        ] = {}  # a node's id lives as it does
        self._open = set[tuple[str, int]]()  # what is being answered now

    def __call__(self, what: str, node: ast.AST, answer: Callable[[], T], cycle: T, unknown: T) -> T:
        """Answer once; in a cycle the inner answer is ``cycle``, deeper than :data:`DEEP` it is ``unknown``.

        What rests on either is kept: if it were asked again for each question, the work would be the
        square of the tree's size. An answer cut at :data:`DEEP` says that more is possible than it names.
        """
        place = what, id(node)
        if place in self._known:
            found, asked, _ = self._known[place]
            self.asked |= asked
            return found
        if place in self._open:
            return cycle
        if len(self._open) >= DEEP:
            return unknown
        before, self.asked = self.asked, set()
        self._open.add(place)
        try:
            found = answer()
        finally:
            self._open.discard(place)
            mine, self.asked = frozenset(self.asked), before | self.asked
        self._known[place] = found, mine, node
        return found

    def forget(self, changed: Collection[Key] | None = None) -> None:
        """Drop what rests on calls of these functions, or all."""
        if changed is None:
            self._known.clear()
            return
        stale = [place for place, (_, asked, _) in self._known.items() if not asked.isdisjoint(changed)]
        for place in stale:
            del self._known[place]


@contextmanager
def room() -> Iterator[None]:
    """Let Python's calls nest as deep as :data:`DEEP` questions need."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 1000 + FRAMES * DEEP))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
