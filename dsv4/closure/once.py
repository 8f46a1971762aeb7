"""Answers that are found once, and dropped when what they rest on has changed."""

import ast
from collections.abc import Callable, Collection
from typing import Any, TypeVar

T = TypeVar("T")
Key = tuple[str, str]  # file and qualified name of a function; file "" if a method's object is not known
DEEP = 80  # questions that are asked through each other


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
        self._cut = set[tuple[str, int]]()  # what was asked again while it was being answered
        self._provisional = set[tuple[str, int]]()  # answered while something was cut: kept for one question

    def __call__(self, what: str, node: ast.AST, answer: Callable[[], T], cycle: T) -> T:
        """Answer once; in a cycle the inner answer is ``cycle``, and what rests on that is not kept."""
        place = what, id(node)
        if place in self._known:
            found, asked, _ = self._known[place]
            self.asked |= asked
            return found
        if place in self._open or len(self._open) > DEEP:
            self._cut.add(place)
            return cycle
        before, self.asked = self.asked, set()
        self._open.add(place)
        try:
            found = answer()
        finally:
            self._open.discard(place)
            self._cut.discard(place)
            mine, self.asked = frozenset(self.asked), before | self.asked
        self._known[place] = found, mine, node
        if self._cut:
            self._provisional.add(place)
        if not self._open:
            self._drop_provisional()
        return found

    def _drop_provisional(self) -> None:
        for place in self._provisional if self._cut else ():
            del self._known[place]
        self._cut.clear()
        self._provisional.clear()

    def forget(self, changed: Collection[Key] | None = None) -> None:
        """Drop what rests on calls of these functions, or all."""
        if changed is None:
            self._known.clear()
            return
        stale = [place for place, (_, asked, _) in self._known.items() if not asked.isdisjoint(changed)]
        for place in stale:
            del self._known[place]
