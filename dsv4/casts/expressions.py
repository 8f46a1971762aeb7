"""What an expression may be, as far as dtypes go, and the casts in it."""

import ast
from typing import Any

from dsv4.casts import ops
from dsv4.casts.asked import Knows
from dsv4.casts.dtypes import INT, UNKNOWN, named
from dsv4.casts.forms import Form, cast_form, keyword, one
from dsv4.casts.source import Function, Module
from dsv4.casts.uses import Uses, written_at
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
    combined,
    in_one_dtype,
    joined,
    member,
    of_dtype,
    tensor,
    ways_of,
)

LIBRARIES = ("torch", "triton", "math", "numpy")
DTYPE_LIBRARIES = ("torch", "triton")


class Expressions:
    """Evaluation of expressions in one function; see :class:`dsv4.casts.flow.Body`."""

    def __init__(
        self, engine: Knows, module: Module, owner: str, *, report: bool, jit: bool, depth: int
    ) -> None:
        self.engine, self.module, self.owner = engine, module, owner
        self.report, self.jit, self.depth = report, jit, depth
        self.names: dict[str, Any] = {}
        self.names_at: dict[ast.AST, Any] = {}  # operands, as they were bound when they were narrowed
        self.in_function = True
        self.memo: dict[ast.expr, Value] = {}  # of one statement, in which no name changes
        self.uses = Uses()
        self.stored: dict[str, Tensor] = {}  # by pointer, what a kernel has written

    def inner(self, node: Function | ast.Lambda) -> None:
        """Follow a function inside this one."""
        raise NotImplementedError

    def place(self, node: ast.AST) -> Place:
        """Where a node stands."""
        return Place(self.module.file, written_at(node), self.module.text(node))

    def last_name(self, function: ast.expr) -> str:
        """The last part of a function's name."""
        if isinstance(function, ast.Attribute):
            return function.attr
        return self.module.dotted(function).rpartition(".")[2]

    def read(self, node: ast.Name) -> Value:
        """A name's value; that it was read here counts."""
        bound = self.names.get(node.id)
        if bound is None:
            return self.engine.global_value(self.module, node.id)
        for definition in bound.definitions:
            self.uses.reads[definition][node] = None
        return bound.value

    def evaluate(self, node: ast.expr) -> Value:
        """What an expression may be."""
        if node not in self.memo:
            self.memo[node] = self._evaluated(node)
        return self.memo[node]

    def _evaluated(self, node: ast.expr) -> Value:
        match node:
            case ast.Name():
                return self.read(node)
            case ast.Constant(value=value):
                return Scalar(value)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
            case ast.BinOp(left=left, right=right):
                return combined([self.evaluate(left), self.evaluate(right)], self.place(node))
            case ast.UnaryOp(operand=operand):
                value = self.evaluate(operand)
                return Scalar() if isinstance(node.op, ast.Not) else value
            case ast.Compare(left=left, comparators=others):
                values = [self.evaluate(each) for each in (left, *others)]
                tensors = any(isinstance(value, Tensor) for value in values)
                return tensor(INT, self.place(node)) if tensors else Scalar()
            case ast.BoolOp(values=values):
                return joined([self.evaluate(each) for each in values])
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self.evaluate(test)
                found = joined([self.evaluate(body), self.evaluate(orelse)])
                if isinstance(found, Dtype):
                    self.chosen(node, found)
                return found
            case ast.Subscript(value=value, slice=index):
                return self._subscript(value, index)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return Group(tuple(self.evaluate(each) for each in items))
            case ast.Starred(value=value):
                return self.evaluate(value)
            case ast.Dict(keys=keys, values=values):
                return self._dict(keys, values)
            case ast.NamedExpr(target=target, value=value):
                found = self.evaluate(value)
                self._bind(target, found)  # type: ignore[attr-defined]
                return found
            case ast.Lambda():
                self.inner(node)
                return None
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                return self._comprehension(node)
            case ast.Await(value=value) | ast.YieldFrom(value=value):
                return self.evaluate(value)
            case _:
                for each in ast.iter_child_nodes(node):
                    if isinstance(each, ast.expr):
                        self.evaluate(each)
                return None

    def _dict(self, keys: list[ast.expr | None], values: list[ast.expr]) -> Value:
        found = [self.evaluate(each) for each in values]
        names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
        self.engine.under_keys(self.module, names, found)
        if all(isinstance(name, str) for name in names):
            return Record(tuple((str(name), value) for name, value in zip(names, found, strict=True)))
        return None

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp) -> Value:
        kept = dict(self.names)
        for each in node.generators:
            self._bind(each.target, member(self.evaluate(each.iter)))  # type: ignore[attr-defined]
            for test in each.ifs:
                self.evaluate(test)
        if isinstance(node, ast.DictComp):
            self.evaluate(node.key)
            found = self.evaluate(node.value)
        else:
            found = self.evaluate(node.elt)
        self.names = kept
        return found if isinstance(found, Tensor) else None

    def _subscript(self, value: ast.expr, index: ast.expr) -> Value:
        found = self.evaluate(value)
        self.evaluate(index)
        key = index.value if isinstance(index, ast.Constant) else None
        if isinstance(found, Group) and isinstance(key, int) and -len(found.items) <= key < len(found.items):
            return found.items[key]
        if isinstance(found, Record):
            items = dict(found.items)
            return items[key] if key in items else joined(items.values())
        if found is None and isinstance(key, str):
            return self.engine.of_key(self.module, key)
        return member(found)

    def _attribute(self, node: ast.Attribute) -> Value:
        dotted = self.module.dotted(node)
        first = dotted.partition(".")[0]
        if first in DTYPE_LIBRARIES and node.value and (name := named(dotted)):
            return one(name)
        if first in LIBRARIES:
            return None
        if node.attr == "dtype" or node.attr == "element_ty":
            value = self.evaluate(node.value)
            dtype = isinstance(value, Dtype)
            return value if dtype else Dtype(frozenset({way.dtype for way in ways_of(value)} or {UNKNOWN}))
        if node.attr in ("shape", "device", "ndim", "is_cuda"):
            self.evaluate(node.value)
            return Scalar()
        local = isinstance(node.value, ast.Name) and node.value.id in self.names
        if dotted and not local and (found := self.engine.global_of(self.module, dotted)) is not None:
            return found
        value = self.evaluate(node.value)
        if isinstance(value, Tensor) and node.attr in ops.VIEWS:
            return value
        if isinstance(value, Instance):
            return self.engine.attribute(value, node.attr)
        return None

    def _call(self, node: ast.Call) -> Value:
        dotted = self.module.dotted(node.func)
        if dotted and isinstance(node.func, ast.Attribute) and self._is_local(node.func):
            dotted = ""
        if form := cast_form(node, dotted, self.evaluate):
            return self._cast(node, form)
        positional = [self.evaluate(each) for each in node.args]
        named_values = {each.arg or "**": self.evaluate(each.value) for each in node.keywords}
        if dotted.startswith("triton."):
            return self._kernel(node, dotted, positional)
        name = self.last_name(node.func)
        dtype = named_values.get("dtype")
        if isinstance(dtype, Dtype):
            self.chosen(node, dtype)
        if ops.quantises(name) and not dotted.startswith("torch.") and node.args:
            self.engine.recorder.quantiser(self, node, positional[0])
        if dotted.startswith("torch."):
            return self._library(node, name, positional, named_values)
        called = self.engine.called(self, node, dotted, positional, named_values)
        if called is not NotImplemented:
            return called
        if isinstance(dtype, Dtype):  # whatever it is, its caller says what it emits
            return of_dtype(dtype, self.place(node))
        if isinstance(node.func, ast.Attribute):
            return self._method(node, node.func, positional)
        value = self.evaluate(node.func)
        if isinstance(value, Tensor):  # a module that was made with a dtype
            return of_dtype(Dtype(value.dtypes), self.place(node))
        return None

    def _is_local(self, function: ast.Attribute) -> bool:
        node: ast.expr = function
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self.names

    def _cast(self, node: ast.Call, form: Form) -> Value:
        self.uses.casts.add(node)
        if form.operand is node:  # tl.dot(..., out_dtype=...)
            for each in node.args:
                self.evaluate(each)
            value: Value = None
        else:
            value = self.evaluate(form.operand)
        for each in [*node.args, *(each.value for each in node.keywords)]:
            if each is not form.operand:
                self.evaluate(each)
        self.engine.recorder.cast(self, node, form, value)
        if isinstance(value, Scalar):
            return of_dtype(form.target, self.place(node))
        same = [way for way in ways_of(value) if form.target.names == {way.dtype}]
        other = len(same) < len(ways_of(value)) or not same
        ways = {*same, *(Way(name, self.place(node)) for name in form.target.names if other)}
        return Tensor(frozenset(ways))

    def _library(self, node: ast.Call, name: str, positional: list[Value], given: dict[str, Value]) -> Value:
        """A function of torch's."""
        dtype = given.get("dtype")
        place = self.place(node)
        if isinstance(dtype, Dtype):
            return of_dtype(dtype, place)
        if name == "promote_types":
            names = frozenset(name for v in positional if isinstance(v, Dtype) for name in v.names)
            return Dtype(names) if names else None
        if name in ops.LIKE and positional:
            return of_dtype(Dtype(frozenset(way.dtype for way in ways_of(positional[0]))), place)
        if name in ops.FLOAT_FACTORIES:
            return tensor("float32", place)
        if name == "full":
            value = positional[1] if len(positional) > 1 else given.get("fill_value")
            whole = isinstance(value, Scalar) and isinstance(value.value, int)
            return tensor(INT if whole else "float32", place)
        if name in ops.CONVERTING and positional and isinstance(positional[0], Tensor):
            return positional[0]
        if name in ops.INDICES or name == "arange":
            return tensor(INT, place)
        values = [*positional, *(given[key] for key in ("input", "other") if key in given)]
        if name in ops.COMPUTES:
            return self._computed(name, values, place)
        if name in ops.VIEWS and values:
            return member(values[0]) if isinstance(values[0], Group) else values[0]
        if name in ("Linear", "Embedding", "RMSNorm", "LayerNorm", "Parameter"):
            return values[0] if name == "Parameter" and values else None
        return None

    def _method(self, node: ast.Call, function: ast.Attribute, positional: list[Value]) -> Value:
        """A method of a tensor, as far as it is known to be one."""
        value, name, place = self.evaluate(function.value), function.attr, self.place(node)
        if name in ("append", "extend") and isinstance(function.value, ast.Name) and positional:
            bound = self.names.get(function.value.id)
            if bound is not None and (bound.value is None or isinstance(bound.value, Group | Tensor)):
                before = [] if bound.value == Group(()) else [bound.value]
                self.names[function.value.id] = type(bound)(joined([*before, *positional]), bound.definitions)
            return Scalar()
        if name in ("get", "pop") and node.args and isinstance(node.args[0], ast.Constant) and value is None:
            return self.engine.of_key(self.module, str(node.args[0].value))
        if name in ops.INDICES:
            return tensor(INT, place)
        if name == "view" and positional and isinstance(positional[0], Dtype):
            ways = value.ways if isinstance(value, Tensor) else [Way(UNKNOWN, place)]
            return Tensor(
                frozenset(Way(to, way.place, way.made) for way in ways for to in positional[0].names)
            )
        if isinstance(value, Instance) and isinstance(kept := self.engine.attribute(value, name), Tensor):
            return of_dtype(Dtype(kept.dtypes), place)  # a module that was made with a dtype
        if not isinstance(value, Tensor):
            return None
        if name in ("item", "tolist", "dim", "size", "stride", "data_ptr", "element_size"):
            return Scalar()
        if name in ops.LIKE:
            return of_dtype(Dtype(value.dtypes), place)
        if name in ops.COMPUTES:
            return self._computed(name, [value, *positional], place)
        return value if name in ops.VIEWS else None

    @staticmethod
    def _computed(name: str, values: list[Value], place: Place) -> Value:
        """Result of one of torch's operations, new memory written at ``place``."""
        if name in ops.SAME_DTYPE:
            return in_one_dtype(values, place)
        return combined(values if name in ops.PROMOTING else values[:1], place)

    def _kernel(self, node: ast.Call, dotted: str, positional: list[Value]) -> Value:
        """A function of Triton's: what a kernel stored to a pointer is what it loads from there."""
        name = dotted.rpartition(".")[2]
        if name in ("store", "load") and node.args:
            pointer = next((n.id for n in ast.walk(node.args[0]) if isinstance(n, ast.Name)), "")
            if name == "load":
                return self.stored.get(pointer)
            if len(positional) > 1:
                ways = frozenset(Way(way.dtype, self.place(node)) for way in ways_of(positional[1]))
                self.stored[pointer] = Tensor(ways)
            return None
        dtype = keyword(node, "dtype")
        value = self.evaluate(dtype) if dtype else positional[1] if len(positional) > 1 else None
        if name in ("zeros", "full") and isinstance(value, Dtype):
            return of_dtype(value, self.place(node))
        if name in ("trans", "reshape", "join", "broadcast_to", "expand_dims"):
            return positional[0] if positional else None
        return combined([v for v in positional if not isinstance(v, Scalar)], self.place(node))

    def chosen(self, node: ast.AST, dtype: Dtype) -> None:
        """A producer's dtype is named here."""
        self.engine.recorder.choice(self, node, dtype)
