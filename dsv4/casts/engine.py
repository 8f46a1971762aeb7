"""What is known of a whole tree while its functions are followed one by one, and the casts that were found."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsv4.casts.dtypes import BYTES, INT, UNKNOWN, named, narrower
from dsv4.casts.expressions import Expressions
from dsv4.casts.flow import Body, Bound
from dsv4.casts.forms import Form, one
from dsv4.casts.hits import Cast, Direction, Status
from dsv4.casts.source import Function, Module, Tree
from dsv4.casts.uses import base, consumer, written_at
from dsv4.casts.values import (
    Dtype,
    Group,
    Instance,
    Place,
    Record,
    Scalar,
    Tensor,
    Value,
    Way,
    joined,
    tensor,
    ways_of,
)

DEPTH = 4  # calls inside calls that are followed
WIDE = ("float32", "float64")
Key = tuple[str, str]  # a file, and a function's or class's name in it


@dataclass
class Facts:
    """What one pass over the tree learnt and the next one uses: values by their places, all that were seen."""

    attributes: defaultdict[tuple[str, str, str], list[Value]]
    keys: defaultdict[str, list[Value]]
    arguments: defaultdict[tuple[str, str, str], list[Value]]

    @classmethod
    def none(cls) -> "Facts":
        """Nothing is known."""
        return cls(defaultdict(list), defaultdict(list), defaultdict(list))


class Engine:
    """Follows functions of a tree.

    Attributes
    ----------
    casts : what was reported, in the order of their lines.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.known, self.learnt = Facts.none(), Facts.none()
        self.found: dict[tuple[str, int, int], Cast] = {}
        self._globals: dict[str, dict[str, Bound]] = {}
        self._returns: dict[Any, Value] = {}
        self._waiting: list[tuple[Expressions, ast.AST, Cast, ast.expr | None]] = []

    def sweep(self, modules: Iterable[Module]) -> list[Cast]:
        """Casts of these files. Twice over them: what is known of attributes and arguments comes from the first."""
        listed = list(modules)
        for _ in range(2):
            self.known, self.learnt = self.learnt, Facts.none()
            self.found, self._returns, self._globals = {}, {}, {}
            for module in listed:
                self._module(module)
        return sorted(self.found.values(), key=lambda cast: (cast.file, cast.line, cast.text))

    def _module(self, module: Module) -> None:
        self.follow(Body(self, module, report=True, jit=False), module.tree.body, top=True)
        for name, node in module.defined.items():
            if isinstance(node, Function):
                body = Body(self, module, name.rpartition(".")[0], report=True, jit=module.is_jit(node))
                body.names = self._parameters(module, name, node)
                self.follow(body, node.body)

    def follow(self, body: Body, statements: Sequence[ast.stmt], *, top: bool = False) -> None:
        """Follow a function to its end; then what is narrowed only is known."""
        body.in_function = not top
        body.run(statements)
        waiting, self._waiting = self._waiting, []
        for owner, node, cast, operand in waiting:
            if cast.consumer is None:
                cast = replace(cast, consumer=consumer(owner.module, node, owner.uses))
            bound = owner.names_at.get(operand) if operand is not None else None
            if bound is not None and not owner.uses.once(bound.definitions):
                cast = replace(cast, status=Status.FREE, reason="other readers take the wide value")
            self._keep(cast)

    def _parameters(self, module: Module, name: str, node: Function) -> dict[str, Bound]:
        arguments, owner = node.args, name.rpartition(".")[0]
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        found: dict[str, Bound] = {}
        for each in every:
            value = self.annotated(each, module)
            seen = self.known.arguments.get((module.file, name, each.arg))
            if value is None and seen:
                value = joined(seen)
            if owner and each.arg == "self":
                value = Instance(module.file, owner)
            found[each.arg] = Bound(value, frozenset({(each.lineno, each.col_offset)}))
        return found

    def annotated(self, argument: ast.arg, module: Module) -> Value:
        """What a parameter's annotation says: ``BFloat16[Tensor, "T D"]``, or a class of the tree."""
        node = argument.annotation
        place = Place(module.file, argument.lineno, f"parameter {argument.arg}")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            node = ast.Name(node.value)
        if isinstance(node, ast.Subscript) and (name := named(module.dotted(node.value))):
            return tensor(name, place, made=False)
        if isinstance(node, ast.Name | ast.Attribute):
            found = self.tree.find(module.dotted(node), module)
            if found and isinstance(found[0].defined.get(found[1]), ast.ClassDef):
                return Instance(found[0].file, found[1])
        return None

    # What the tree says of names, attributes and keys.

    def global_value(self, module: Module, name: str) -> Value:
        """A name that no function of the file binds."""
        if module.file not in self._globals:
            self._globals[module.file] = {}
            body = Body(self, module, report=False, jit=False)
            body.in_function = False
            body.run(module.tree.body)
            self._globals[module.file] = body.names
        if (bound := self._globals[module.file].get(name)) is not None:
            value = bound.value
            if isinstance(value, Tensor):
                return Tensor(frozenset(Way(way.dtype, way.place, made=False) for way in value.ways))
            return value
        imported = module.imports.get(name, "")
        if imported.partition(".")[0] in ("torch", "triton") and (dtype := named(imported)):
            return one(dtype)
        return self.global_of(module, imported) if imported else None

    def global_of(self, module: Module, dotted: str) -> Value:
        """A global of another file of the tree."""
        found = self.tree.find(dotted, module)
        if found is None or not found[1] or found[1] in found[0].defined or found[0] is module:
            return None
        return self.global_value(found[0], found[1]) if "." not in found[1] else None

    def set_attribute(self, module: Module, owner: str, name: str, value: Value) -> None:
        """``self.name = value`` in a method of ``owner``."""
        self.learnt.attributes[module.file, owner, name].append(value)

    def attribute(self, instance: Instance, name: str) -> Value:
        """An attribute of an object of the tree: all that its methods put there."""
        for file, owner in self._line(instance):
            if seen := self.known.attributes.get((file, owner, name)):
                value = joined(seen)
                ways = ways_of(value) if isinstance(value, Tensor) else ()
                return Tensor(frozenset(Way(w.dtype, w.place, made=False) for w in ways)) if ways else value
        return None

    def _line(self, instance: Instance) -> list[Key]:
        """A class and those that it inherits from, as far as the tree has them."""
        line, todo = [], [(instance.file, instance.name)]
        while todo and len(line) < 10:
            file, name = todo.pop(0)
            line.append((file, name))
            module = self.tree.module(self.tree.root / file)
            node = module.defined.get(name) if module else None
            for each in node.bases if module and isinstance(node, ast.ClassDef) else ():
                if found := self.tree.find(module.dotted(each), module):
                    todo.append((found[0].file, found[1]))
        return line

    def under_keys(self, module: Module, names: Sequence[object], values: Sequence[Value]) -> None:
        """A dict is made: what lies under its keys is looked for under these where a dict is not known."""
        for name, value in zip(names, values, strict=True):
            if isinstance(name, str):
                self.learnt.keys[name].append(value)

    def of_key(self, module: Module, name: str) -> Value:
        """What dicts of the swept files hold under this key, if it is a tensor."""
        value = joined(self.known.keys.get(name, ()))
        return value if isinstance(value, Tensor) else None

    # Calls of functions of the tree.

    def called(
        self, body: Expressions, node: ast.Call, dotted: str, positional: list[Value], given: dict[str, Value]
    ) -> Any:
        """What a function of the tree returns; NotImplemented where it is not one of the tree."""
        target = self._target(body, node, dotted)
        if target is None:
            return NotImplemented
        module, name, function, is_method = target
        if isinstance(function, ast.ClassDef):
            return Instance(module.file, name)
        if not isinstance(function, Function):
            return NotImplemented
        names = [each.arg for each in [*function.args.posonlyargs, *function.args.args]][is_method:]
        keywords = {each.arg for each in function.args.kwonlyargs} | set(names)
        plain = not any(isinstance(each, ast.Starred) for each in node.args)
        bound = dict(zip(names, positional, strict=False)) if plain else {}
        bound |= {key: value for key, value in given.items() if key in keywords}
        if body.report:
            for key in keywords:
                missing = None if key not in bound and not self._default(module, function, key) else Scalar()
                self.learnt.arguments[module.file, name, key].append(bound.get(key, missing))
        found = self._result(module, name, function, bound, body.depth)
        found = _received(found, [*positional, *given.values()], body.place(node))
        dtype = given.get("dtype")
        if not isinstance(found, Tensor | Record) and isinstance(dtype, Dtype):
            return NotImplemented
        return found

    def _target(
        self, body: Expressions, node: ast.Call, dotted: str
    ) -> tuple[Module, str, ast.AST, bool] | None:
        if dotted and (found := self.tree.find(dotted, body.module)):
            module, name = found
            if name in module.defined and "." not in name:
                return module, name, module.defined[name], False
        if isinstance(node.func, ast.Attribute):
            owner = body.evaluate(node.func.value)
            if isinstance(owner, Instance):
                for file, cls in self._line(owner):
                    module = self.tree.module(self.tree.root / file)
                    name = f"{cls}.{node.func.attr}"
                    if module and name in module.defined:
                        return module, name, module.defined[name], True
        return None

    @staticmethod
    def _default(module: Module, function: Function, name: str) -> ast.expr | None:
        arguments = function.args
        first = [*arguments.posonlyargs, *arguments.args]
        pairs = list(zip(reversed(first), reversed(arguments.defaults), strict=False))
        pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d]
        return next((default for argument, default in pairs if argument.arg == name), None)

    def _result(
        self, module: Module, name: str, function: Function, bound: dict[str, Value], depth: int
    ) -> Value:
        key = module.file, name, tuple(sorted(bound.items(), key=lambda item: item[0]))
        if key in self._returns or depth >= DEPTH:
            return self._returns.get(key)
        self._returns[key] = None  # of a function that calls itself
        owner = name.rpartition(".")[0]
        body = Body(self, module, owner, report=False, jit=module.is_jit(function), depth=depth + 1)
        body.names = self._parameters(module, name, function)
        for each in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]:
            value = bound.get(each.arg)
            if (
                value is None
                and each.arg not in bound
                and (default := self._default(module, function, each.arg))
            ):
                value = body.evaluate(default)
            if value is not None or each.arg in bound:
                body.names[each.arg] = Bound(value)
        body.run(function.body)
        self._returns[key] = joined(body.returned)
        return self._returns[key]

    # Casts.

    def cast(self, body: Expressions, node: ast.Call, form: Form, value: Value) -> None:
        """A cast was met."""
        if not body.report or not (form.target.names & BYTES.keys()):
            return
        ways = ways_of(value)
        pairs = [(way, name) for way in sorted(ways, key=repr) for name in sorted(form.target.names)]
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
            way = next(iter(sorted(ways, key=repr)), Way(UNKNOWN))
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
        wide = [way for way in sorted(ways_of(value), key=repr) if way.dtype in WIDE and way.made]
        if body.report and wide and not body.jit:
            cast = self._cast(body, node, Direction.NARROWED, (wide[0], UNKNOWN), "")
            self._narrowing(body, node, node.args[0], cast, made=True)

    def choice(self, body: Expressions, node: ast.AST, dtype: Dtype) -> None:
        """A producer's dtype is chosen here: never a hit by itself, but a site's marker may stand beside it."""
        if body.report and dtype.names & BYTES.keys():
            names = sorted(dtype.names & BYTES.keys(), key=lambda name: (BYTES[name], name))
            way = Way(names[0], body.place(node))
            cast = self._cast(body, node, Direction.WIDENED, (way, names[-1]), "a producer's dtype")
            self.found.setdefault((cast.file, cast.line, getattr(node, "col_offset", 0)), cast)

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
        key = cast.file, cast.end_line, cast.column
        before = self.found.get(key)
        if before is None or _rank(cast) >= _rank(before):
            self.found[key] = cast


def _rank(cast: Cast) -> tuple[bool, bool]:
    return cast.status is Status.OPEN, cast.direction is not Direction.UNCLEAR


def _received(value: Value, arguments: Iterable[Value], call: Place) -> Value:
    """What a call gives: the call is the producer of what the function made, and not of what was passed through."""
    if isinstance(value, Group):
        return Group(tuple(_received(each, arguments, call) for each in value.items))
    if not isinstance(value, Tensor):
        return value
    passed = frozenset().union(*(ways_of(each) for each in arguments))
    return Tensor(
        frozenset(
            way if way in passed else Way(way.dtype, _via(call, way.place), way.made) for way in value.ways
        )
    )


def _via(call: Place, inside: Place | None) -> Place:
    if inside is None or " in " in call.text:
        return call
    return Place(call.file, call.line, f"{call.text} in {inside.file}:{inside.line}")
