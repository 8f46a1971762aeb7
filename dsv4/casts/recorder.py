"""Casts as they are met, and what can be said of each once its function was followed to the end."""

import ast
from collections.abc import Iterable
from dataclasses import replace

from dsv4.casts.dtypes import BYTES, INT, UNKNOWN, narrower
from dsv4.casts.expressions import Expressions
from dsv4.casts.forms import Form
from dsv4.casts.hits import CHOICE, Cast, Direction, Status
from dsv4.casts.uses import base, consumer, written_at
from dsv4.casts.values import Dtype, Instance, Place, Scalar, Value, Way, ways_of

WIDE = ("float32", "float64")


class Recorder:
    """Casts of a pass over the tree.

    Attributes
    ----------
    found : by file, and the line and column at which the cast's source ends.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, int, int], Cast] = {}
        self._waiting: list[tuple[Expressions, ast.AST, Cast, ast.expr | None]] = []

    def finish(self) -> None:
        """A function was followed to its end: what reads its values is known."""
        waiting, self._waiting = self._waiting, []
        for owner, node, cast, operand in waiting:
            if cast.consumer is None:
                cast = replace(cast, consumer=consumer(owner.module, node, owner.uses))
            bound = owner.names_at.get(operand) if operand is not None else None
            if bound is not None and not owner.uses.once(bound.definitions):
                cast = replace(cast, status=Status.FREE, reason="other readers take the wide value")
            self._keep(cast)

    def cast(self, body: Expressions, node: ast.Call, form: Form, value: Value) -> None:
        """A cast was met."""
        if not body.report or not (form.target.names & BYTES.keys()):
            return
        if isinstance(value, Instance):
            return  # a module's parameters, once
        ways = ways_of(value)
        pairs = [(way, name) for way in sorted(ways, key=_last_first) for name in sorted(form.target.names)]
        widened = [(way, name) for way, name in pairs if narrower(way.dtype, name)]
        narrowed = [(way, name) for way, name in pairs if narrower(name, way.dtype)]
        unknown = [(way, name) for way, name in pairs if way.dtype == UNKNOWN and name in WIDE]
        free = form.fused or ("in registers" if body.jit and not self._stored(body, ways) else "")
        if widened:
            self._wait(body, node, self._cast(body, node, Direction.WIDENED, widened[0], free))
        elif narrowed:
            made = [pair for pair in narrowed if pair[0].made]
            cast = self._cast(body, node, Direction.NARROWED, (made or narrowed)[0], free)
            self._narrowing(body, node, form.operand, cast, bool(made))
        elif unknown:
            free = free or ("not a tensor" if isinstance(value, Scalar) else "")
            way = replace(unknown[0][0], place=unknown[0][0].place or self._given(body, form.operand))
            self._wait(body, node, self._cast(body, node, Direction.UNCLEAR, (way, unknown[0][1]), free))
        else:
            way = min(ways, key=_last_first, default=Way(UNKNOWN))
            name = sorted(form.target.names)[0]
            said = {INT: "of integers", UNKNOWN: "of a value whose dtype is not known"}
            free = free or said.get(way.dtype, f"it is {way.dtype} already")
            self._wait(body, node, self._cast(body, node, Direction.UNCLEAR, (way, name), free))

    def _narrowing(
        self, body: Expressions, node: ast.Call, operand: ast.expr, cast: Cast, made: bool
    ) -> None:
        """A narrowing counts if nothing else reads what it narrows: known when the function ends."""
        cast = replace(cast, consumer=body.place(node))
        if cast.status is not Status.FREE and not made:
            reason = "its operand is kept, or its producer is not seen"
            cast = replace(cast, status=Status.FREE, reason=reason)
        under = base(operand, body.uses)
        if isinstance(under, ast.Name) and under.id in body.names:
            body.names_at[operand] = body.names[under.id]
        self._wait(body, node, cast, operand)

    def _wait(self, body: Expressions, node: ast.AST, cast: Cast, operand: ast.expr | None = None) -> None:
        self._waiting.append((body, node, cast, operand))

    def quantiser(self, body: Expressions, node: ast.Call, value: Value) -> None:
        """A call that stores its first argument in a narrow format."""
        wide = [way for way in sorted(ways_of(value), key=_last_first) if way.dtype in WIDE and way.made]
        if body.report and wide and not body.jit:
            cast = self._cast(body, node, Direction.NARROWED, (wide[0], UNKNOWN), "")
            self._narrowing(body, node, node.args[0], cast, made=True)

    def choice(self, body: Expressions, node: ast.AST, dtype: Dtype) -> None:
        """A producer's dtype is chosen here: never a hit by itself, but a site's marker may stand beside it."""
        if body.report and dtype.names & BYTES.keys():
            names = sorted(dtype.names & BYTES.keys(), key=lambda name: (BYTES[name], name))
            way = Way(names[0], body.place(node))
            wide = names[0] in WIDE  # then what narrows it next may be what is meant
            direction, target = (Direction.NARROWED, UNKNOWN) if wide else (Direction.WIDENED, names[-1])
            cast = self._cast(body, node, direction, (way, target), CHOICE)
            self.found.setdefault(cast.key, cast)

    @staticmethod
    def _given(body: Expressions, operand: ast.expr) -> Place | None:
        """Where a name of which nothing is known was bound last."""
        under = base(operand, body.uses)
        bound = body.names.get(under.id) if isinstance(under, ast.Name) else None
        if bound is None or not bound.definitions or not isinstance(under, ast.Name):
            return None
        return Place(body.module.file, max(bound.definitions)[0], under.id)

    @staticmethod
    def _stored(body: Expressions, ways: Iterable[Way]) -> bool:
        stored = {way for value in body.stored.values() for way in value.ways}
        return any(way in stored for way in ways)

    @staticmethod
    def _cast(
        body: Expressions, node: ast.AST, direction: Direction, pair: tuple[Way, str], free: str
    ) -> Cast:
        way, target = pair
        return Cast(
            file=body.module.file,
            line=written_at(node),
            end_line=getattr(node, "end_lineno", 0) or 0,
            text=body.module.text(node),
            direction=direction,
            source=way.dtype,
            target=target,
            producer=way.place,
            consumer=None,
            status=Status.FREE if free else Status.OPEN,
            reason=free,
            column=getattr(node, "end_col_offset", 0) or 0,
        )

    def _keep(self, cast: Cast) -> None:
        """The worst that any pass over a cast says of it stands (a loop's body is followed twice)."""
        before = self.found.get(cast.key)
        if before is None or _rank(cast) >= _rank(before):
            self.found[cast.key] = cast


def _last_first(way: Way) -> tuple[bool, int, str]:
    """Of several producers the one that stands last is named."""
    return way.place is None, -way.place.line if way.place else 0, way.dtype


def _rank(cast: Cast) -> tuple[bool, bool]:
    return cast.status is Status.OPEN, cast.direction is not Direction.UNCLEAR
