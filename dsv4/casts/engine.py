"""What is known of a whole tree while its functions are followed one by one, and the casts that were found."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4.casts.dtypes import named
from dsv4.casts.expressions import Expressions
from dsv4.casts.flow import Body, Bound
from dsv4.casts.forms import one
from dsv4.casts.hits import Cast
from dsv4.casts.recorder import Recorder
from dsv4.casts.source import Function, Module, Tree
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
    known : from the pass before this one.
    recorder : casts that this pass met.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.known, self.learnt = Facts.none(), Facts.none()
        self.recorder = Recorder()
        self._globals: dict[str, dict[str, Bound]] = {}
        self._returns: dict[Any, Value] = {}

    def sweep(self, modules: Iterable[Module]) -> list[Cast]:
        """Casts of these files. Twice over them: what is known of attributes and arguments comes from the first."""
        listed = list(modules)
        for _ in range(2):
            self.known, self.learnt = self.learnt, Facts.none()
            self.recorder, self._returns, self._globals = Recorder(), {}, {}
            for module in listed:
                self._module(module)
        return sorted(self.recorder.found.values(), key=lambda cast: (cast.file, cast.line, cast.text))

    def _module(self, module: Module) -> None:
        self._follow(Body(self, module, report=True, jit=False), module.tree, top=True)
        for name, node in module.defined.items():
            if isinstance(node, Function):
                body = Body(self, module, name.rpartition(".")[0], report=True, jit=module.is_jit(node))
                body.names = self._parameters(module, name, node)
                self._follow(body, node)

    def _follow(self, body: Body, node: Function | ast.Module, *, top: bool = False) -> None:
        """Follow a function to its end; then what is narrowed only is known."""
        body.in_function = not top
        try:
            body.run(node.body)
        except RecursionError:
            line = getattr(node, "lineno", 1)
            self.tree.warn(f"{body.module.file}:{line}: not swept to its end, it is nested too deeply")
        self.recorder.finish()

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
        return self._instance(node, module)

    def _instance(self, node: ast.expr | None, module: Module) -> Value:
        """An object of the class that an annotation names, None or not (``Wide | None``)."""
        if isinstance(node, ast.BinOp):
            return self._instance(node.left, module) or self._instance(node.right, module)
        found = (
            self.tree.find(module.dotted(node), module)
            if isinstance(node, ast.Name | ast.Attribute)
            else None
        )
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
            module, node = self._class(file, owner)
            for each in node.body if module and node else ():  # a dataclass's field
                if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == name and module:
                    return self._instance(each.annotation, module)
        return None

    def _class(self, file: str, name: str) -> tuple[Module | None, ast.ClassDef | None]:
        module = self.tree.module(self.tree.root / file)
        node = module.defined.get(name) if module else None
        return module, node if isinstance(node, ast.ClassDef) else None

    def _line(self, instance: Instance) -> list[Key]:
        """A class and those that it inherits from, as far as the tree has them."""
        line, todo = [], [(instance.file, instance.name)]
        while todo and len(line) < 10:
            file, name = todo.pop(0)
            line.append((file, name))
            module, node = self._class(file, name)
            if module is None or node is None:
                continue
            for each in node.bases:
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
            if isinstance(owner, Instance) and (found := self._method(owner, node.func.attr)):
                return found
        owner = body.evaluate(node.func)
        return self._method(owner, "__call__") if isinstance(owner, Instance) else None

    def _method(self, owner: Instance, method: str) -> tuple[Module, str, ast.AST, bool] | None:
        for file, cls in self._line(owner):
            module, name = self.tree.module(self.tree.root / file), f"{cls}.{method}"
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
