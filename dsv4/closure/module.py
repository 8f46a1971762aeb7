"""One Python file, parsed: its statements with the conditions they stand under, its scopes, its names."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import PurePosixPath

from dsv4.closure.names import BeyondTopError, base

Function = ast.FunctionDef | ast.AsyncFunctionDef
IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
HERE = ""  # first part of a dotted name that starts at the tree's root, whatever the search path


class Rank(IntEnum):
    """How sure it is that a reference is followed."""

    LIVE = 0
    MAYBE = 1  # the name is built at run time and may mean this
    TYPES = 2  # under `if TYPE_CHECKING`: never at run time


@dataclass(frozen=True)
class Condition:
    """What holds where a statement stands."""

    types_only: bool = False
    main_only: bool = False  # under `if __name__ == "__main__"`
    guarded: bool = False  # a failed import is caught


@dataclass
class Binding:
    """One way in which a name gets its value, to be read in ``scope``.

    Attributes
    ----------
    node : the value; with kind "element" a sequence that the name runs over; with "param" its function.
    index : of a tuple, the part that the name gets; of a function, the parameter's name.
    """

    node: ast.AST
    scope: "Scope"
    kind: str = "value"
    index: int | str | None = None

    def before(self, node: ast.AST | None) -> bool:
        """Whether the value is known where ``node`` stands: ``path = path / name`` reads an earlier one."""
        if self.kind == "param" or node is None or not hasattr(node, "lineno"):
            return True
        end = getattr(self.node, "end_lineno", 0), getattr(self.node, "end_col_offset", 0)
        return end <= (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))


def qualified(binding: Binding) -> str:
    """Name of the function or class that a binding holds, with those around it."""
    assert isinstance(binding.node, Function | ast.ClassDef)
    return f"{binding.scope.owner}.{binding.node.name}".lstrip(".")


@dataclass
class Scope:
    """Names of one function, class or module."""

    module: "Module"
    parent: "Scope | None" = None
    owner: str = ""  # qualified name of the function or class
    names: dict[str, list[Binding]] = field(default_factory=dict)

    def lookup(self, name: str, node: ast.AST | None = None) -> list[Binding]:
        """Bindings of a name in the innermost scope that has it; of those, the ones before ``node`` if it has any."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                bindings = scope.names[name]
                before = [binding for binding in bindings if binding.before(node)] if scope is self else []
                return before or bindings
            scope = scope.parent
        return []

    def bind(self, name: str, binding: "Binding") -> None:
        """Note one more value of a name."""
        self.names.setdefault(name, []).append(binding)


@dataclass
class Placed:
    """A node with its scope and the conditions it stands under."""

    node: ast.AST
    scope: Scope
    condition: Condition


@dataclass
class Module:
    """A parsed file.

    Attributes
    ----------
    file : path below the tree's root.
    placed : imports, calls, sequences and strings, in the order of the source.
    functions : qualified name -> definition.
    aliases : local name -> dotted name that an import gave it, as parts; the first is :data:`HERE` if relative.
    beyond : relative imports that leave the tree, line -> text.
    returns : what a function returns, by its qualified name.
    inner : scopes of comprehensions, by the node's id.
    """

    file: str
    tree: ast.Module
    placed: list[Placed] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    beyond: dict[int, str] = field(default_factory=dict)
    returns: dict[str, list[Placed]] = field(default_factory=dict)
    inner: dict[int, Scope] = field(default_factory=dict)
    stars: bool = False
    scope: Scope = field(init=False)

    def __post_init__(self) -> None:
        self.scope = Scope(self)
        _Reader(self).body(self.tree.body, self.scope, Condition())

    @property
    def package(self) -> tuple[str, ...]:
        """Folder of the file, which is what relative imports start from."""
        return PurePosixPath(self.file).parent.parts

    def binds(self, name: str) -> bool:
        """Whether the module has this name, or may get it at run time."""
        known = name in self.scope.names or name in self.aliases or name in self.functions
        return known or self.stars or "__getattr__" in self.functions or "globals" in self._called()

    def _called(self) -> set[str]:
        calls = (placed.node for placed in self.placed if isinstance(placed.node, ast.Call))
        return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def parse(file: str, text: bytes | str) -> Module:
    """Parse one file.

    Raises
    ------
    SyntaxError, ValueError, RecursionError
        It is no Python of this version.
    """
    return Module(file, ast.parse(text, filename=file))


class _Reader:
    """Walks a module once and fills it."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def body(self, statements: list[ast.stmt], scope: Scope, condition: Condition) -> None:
        for statement in statements:
            text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not text:  # a docstring names files and modules without using them
                self.node(statement, scope, condition)

    def node(self, node: ast.AST, scope: Scope, condition: Condition) -> None:
        match node:
            case ast.If():
                self._branch(node, scope, condition)
            case ast.Try() | ast.TryStar():
                self._try(node, scope, condition)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, scope, condition)
            case ast.ClassDef():
                self._class(node, scope, condition)
            case ast.Import() | ast.ImportFrom():
                self._import(node)
                self.module.placed.append(Placed(node, scope, condition))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                inner = self.module.inner[id(node)] = Scope(self.module, scope, scope.owner)
                self.children(node, inner, condition)
            case _:
                self._bind(node, scope)
                if isinstance(node, ast.Return) and node.value is not None:
                    self.module.returns.setdefault(scope.owner, []).append(
                        Placed(node.value, scope, condition)
                    )
                if isinstance(node, ast.Call | ast.List | ast.Tuple | ast.Constant):
                    self.module.placed.append(Placed(node, scope, condition))
                self.children(node, scope, condition)

    def children(self, node: ast.AST, scope: Scope, condition: Condition) -> None:
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self.body(value, scope, condition)
            elif isinstance(value, list):
                for child in value:
                    if isinstance(child, ast.AST):
                        self.node(child, scope, condition)
            elif isinstance(value, ast.AST):
                self.node(value, scope, condition)

    def _branch(self, node: ast.If, scope: Scope, condition: Condition) -> None:
        test = ast.unparse(node.test)
        then = other = condition
        if test.rpartition(".")[2] == "TYPE_CHECKING" and not test.startswith("not "):
            then = replace(condition, types_only=True)
        elif test.rpartition(".")[2].removeprefix("not ") == "TYPE_CHECKING":
            other = replace(condition, types_only=True)
        elif test in ("__name__ == '__main__'", "'__main__' == __name__"):
            then = replace(condition, main_only=True)
        self.node(node.test, scope, condition)
        if test not in ("False", "0"):
            self.body(node.body, scope, then)
        if test not in ("True", "1"):
            self.body(node.orelse, scope, other)

    def _try(self, node: ast.Try | ast.TryStar, scope: Scope, condition: Condition) -> None:
        caught = {name for handler in node.handlers for name in _exceptions(handler.type)}
        guarded = condition.guarded or bool(caught & IMPORT_ERRORS)
        self.body(node.body, scope, replace(condition, guarded=guarded))
        for handler in node.handlers:
            self.body(handler.body, scope, condition)
        self.body([*node.orelse, *node.finalbody], scope, condition)

    def _function(self, node: Function, scope: Scope, condition: Condition) -> None:
        inner = self._inner(node, scope)
        self.module.functions[inner.owner] = node
        scope.bind(node.name, Binding(node, scope))
        for part in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
            if part is not None:
                self.node(part, scope, condition)
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in (*named, arguments.vararg, arguments.kwarg):
            if argument is not None:
                inner.bind(argument.arg, Binding(node, scope, "param", argument.arg))
        self.body(node.body, inner, condition)

    def _class(self, node: ast.ClassDef, scope: Scope, condition: Condition) -> None:
        scope.bind(node.name, Binding(node, scope))
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.node(part, scope, condition)
        self.body(node.body, self._inner(node, scope), condition)

    def _inner(self, node: Function | ast.ClassDef, scope: Scope) -> Scope:
        return Scope(self.module, scope, f"{scope.owner}.{node.name}".lstrip("."))

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        aliases = self.module.aliases
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = tuple(alias.name.split("."))
                aliases[alias.asname or parts[0]] = parts if alias.asname else parts[:1]
            return
        try:
            parts = tuple(base(node, self.module.package))
        except BeyondTopError as error:
            self.module.beyond[node.lineno] = str(error)
            return
        start = (HERE, *parts) if node.level else parts
        for alias in node.names:
            if alias.name == "*":
                self.module.stars = True
            else:
                aliases[alias.asname or alias.name] = (*start, alias.name)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._target(target, Binding(node.value, scope))
            case (
                ast.AnnAssign(value=ast.expr() as value)
                | ast.AugAssign(value=value)
                | ast.NamedExpr(value=value)
            ):
                self._target(node.target, Binding(value, scope))
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                self._target(node.target, Binding(node.iter, scope, "element"))
            case ast.withitem(optional_vars=ast.expr() as target):
                self._target(target, Binding(node.context_expr, scope))

    def _target(self, target: ast.expr, binding: Binding) -> None:
        match target:
            case ast.Name():
                binding.scope.bind(target.id, binding)
            case ast.Attribute(
                value=ast.Name(id="self")
            ):  # one name for all classes of a file: it rarely matters
                self.module.scope.bind(f"self.{target.attr}", binding)
            case ast.Tuple() | ast.List():
                for place, part in enumerate(target.elts):
                    self._target(part, replace(binding, index=place))


def _exceptions(node: ast.expr | None) -> Iterator[str]:
    if node is None:
        yield "Exception"
    elif isinstance(node, ast.Tuple):
        for part in node.elts:
            yield from _exceptions(part)
    else:
        yield ast.unparse(node).rpartition(".")[2]


def spelled(node: ast.AST) -> str:
    """``a.b.c`` as written, "" for anything else."""
    parts = list[str]()
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""
