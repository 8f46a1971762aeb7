"""How dtypes flow through one function: its statements, in order, over what its names may be."""

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dsv4.casts import ops
from dsv4.casts.asked import Knows
from dsv4.casts.expressions import Expressions
from dsv4.casts.source import Function, Module
from dsv4.casts.uses import Definitions, base
from dsv4.casts.values import Dtype, Group, Scalar, Tensor, Value, joined, member, of_dtype

__all__ = ["Body"]


@dataclass(frozen=True)
class Bound:
    """What a local name holds, and where it was bound."""

    value: Value
    definitions: Definitions = frozenset()


class Body(Expressions):
    """One run through a function's statements, or a module's.

    Parameters
    ----------
    engine : knows the tree.
    module : the file.
    owner : the class that a method belongs to, or "".
    report : casts are handed to the engine; else only what is returned counts.
    jit : the function's values live in registers.
    """

    def __init__(
        self, engine: Knows, module: Module, owner: str = "", *, report: bool, jit: bool, depth: int = 0
    ) -> None:
        super().__init__(engine, module, owner, report=report, jit=jit, depth=depth)
        self.returned: list[Value] = []

    def inner(self, node: Function | ast.Lambda) -> None:
        """A function inside: it sees this one's names, and its reads are reads of them."""
        body = Body(self.engine, self.module, self.owner, report=self.report, jit=self.jit, depth=self.depth)
        body.uses, body.names = self.uses, dict(self.names)
        arguments = node.args
        for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            body.names[each.arg] = Bound(self.engine.annotated(each, self.module))
        if isinstance(node, ast.Lambda):
            body.evaluate(node.body)
        else:
            body.run(node.body)

    def run(self, statements: Iterable[ast.stmt]) -> None:
        """Follow statements in order."""
        for each in statements:
            self._statement(each)

    def _statement(self, node: ast.stmt) -> None:
        self.memo.clear()
        match node:
            case ast.Assign(targets=targets, value=value):
                self._assign(targets, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign([target], value)
            case ast.AugAssign(target=target, value=value):
                self._augment(target, value)
            case ast.Return(value=value):
                self.returned.append(self.evaluate(value) if value else Scalar())
            case ast.If(test=test, body=body, orelse=orelse):
                self.evaluate(test)
                self._branches([body, orelse])
            case ast.For(target=target, iter=source, body=body, orelse=orelse):
                self._bind(target, member(self.evaluate(source)))
                self._loop([*body, *orelse])
            case ast.While(test=test, body=body, orelse=orelse):
                self.evaluate(test)
                self._loop([*body, *orelse])
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    value = self.evaluate(item.context_expr)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, value)
                self.run(body)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                self._branches([[*body, *orelse], *([*body, *handler.body] for handler in handlers)])
                self.run(final)
            case ast.Match(subject=subject, cases=cases):
                self.evaluate(subject)
                self._branches([case.body for case in cases] + [[]])
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if self.in_function:
                    self.inner(node)
            case ast.ClassDef() | ast.Import() | ast.ImportFrom():
                pass
            case _:
                for each in ast.iter_child_nodes(node):
                    if isinstance(each, ast.expr):
                        self.evaluate(each)

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr) -> None:
        found = self.evaluate(value)
        under = base(value, self.uses)
        viewed = frozenset[tuple[int, int]]()
        if isinstance(under, ast.Name) and isinstance(known := self.names.get(under.id), Bound):
            viewed = known.definitions
        two = isinstance(value, ast.Call) and self.last_name(value.func) in ops.SECOND_IS_INDEX
        for target in targets:
            if two and isinstance(target, ast.Tuple) and len(target.elts) == 2 and isinstance(found, Tensor):
                self._bind(target, Group((found, Scalar())))
            else:
                self._bind(target, found, viewed)
        if isinstance(found, Dtype) and not isinstance(value, ast.Name | ast.Attribute):
            self.chosen(value, found)

    def _bind(self, target: ast.expr, value: Value, viewed: Definitions = frozenset()) -> None:
        if isinstance(target, ast.Name):
            definition = target.lineno, target.col_offset
            self.names[target.id] = Bound(value, frozenset({definition}))
            if viewed:
                self.uses.from_views[definition] = viewed - {definition}
        elif isinstance(target, ast.Tuple | ast.List):
            items = value.items if isinstance(value, Group) and len(value.items) == len(target.elts) else None
            for index, each in enumerate(target.elts):
                under = each.value if isinstance(each, ast.Starred) else each
                self._bind(under, items[index] if items else member(value))
        elif isinstance(target, ast.Attribute):
            if isinstance(target.value, ast.Name) and target.value.id == "self" and self.owner:
                self.engine.set_attribute(self.module, self.owner, target.attr, value)
        elif isinstance(target, ast.Subscript):
            self.evaluate(target.value)
            self.evaluate(target.slice)

    def _augment(self, target: ast.expr, value: ast.expr) -> None:
        """In place: the tensor keeps its dtype and has a new producer; that it was read for it does not count."""
        self.evaluate(value)
        bound = self.names.get(target.id) if isinstance(target, ast.Name) else None
        if bound is None:
            self.evaluate(target)
        elif isinstance(bound.value, Tensor):
            place = self.place(self.module.parents.get(target, target))
            self._bind(target, of_dtype(Dtype(bound.value.dtypes), place))

    def _branches(self, branches: Sequence[Sequence[ast.stmt]]) -> None:
        before = dict(self.names)
        after = []
        for branch in branches:
            self.names = dict(before)
            self.run(branch)
            if not (branch and isinstance(branch[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)):
                after.append(self.names)
        self.names = self._merged(after) if after else dict(before)

    def _loop(self, body: Sequence[ast.stmt]) -> None:
        before = dict(self.names)
        for _ in range(2):  # the second time round names may hold what the first left
            self.run(body)
            self.names = self._merged([before, self.names])

    @staticmethod
    def _merged(states: Sequence[dict[str, Bound]]) -> dict[str, Bound]:
        merged: dict[str, Bound] = {}
        for name in dict.fromkeys(name for state in states for name in state):
            bound = [state[name] for state in states if name in state]
            definitions = frozenset().union(*(each.definitions for each in bound))
            merged[name] = replace(bound[0], value=joined(b.value for b in bound), definitions=definitions)
        return merged
