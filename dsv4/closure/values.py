"""What a string or path expression may be, found without running it.

A value is a text in which :data:`HOLE` stands for a part that only a run knows. An expression has
several values if its name gets several, and none if it cannot be a text.
"""

import ast
import posixpath
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Protocol

from dsv4.closure import texts
from dsv4.closure.module import Binding, Function, Module, Scope, qualified, spelled
from dsv4.closure.once import Once
from dsv4.closure.texts import HOLE, LIMIT, UNKNOWN, Values

CallSite = tuple[Scope, ast.Call]
Placed = tuple[ast.AST, Scope]

# Functions of os, os.path, pathlib and builtins whose result names the same file as their first argument.
FIRST = {"abspath", "realpath", "normpath", "expanduser", "expandvars", "fspath"}
FIRST |= {"str", "open", "Path", "PurePath"}
SEQUENCES = {"list", "tuple", "set", "frozenset", "sorted", "reversed", "dict", "iter"}
GIVEN = {"sys.executable": "python", "os.sep": "/", "os.curdir": "."}


class Known(Protocol):
    """What is known of the tree that an expression stands in; :class:`dsv4.closure.program.Program`."""

    def name(self, parts: tuple[str, ...]) -> tuple[Module, str] | None:
        """Module and qualified name that dotted parts mean."""
        ...

    def callers(self, module: Module, function: str) -> list[CallSite]:
        """Calls of a function that are known so far."""
        ...

    def called(self, scope: Scope, call: ast.Call) -> tuple[Module | None, str] | None:
        """Function that a call runs."""
        ...

    def glob(self, pattern: str) -> list[str]:
        """Absolute paths of the tree's files that match."""
        ...


class Evaluator:
    """Reads expressions of one tree.

    Parameters
    ----------
    root : absolute path of the tree.
    known : its modules and calls.

    Attributes
    ----------
    settled : whether all calls are known: a parameter that nobody gives is then a hole, before it has no value.
    """

    def __init__(self, root: str, known: Known) -> None:
        self.root, self.known, self.settled, self.once = root, known, False, Once()

    def values(self, node: ast.AST | None, scope: Scope) -> Values:
        """Texts that an expression may be; of a sequence, those of its elements."""
        if node is None:
            return ()
        return self.once("values", node, lambda: self._distinct(node, scope), (), UNKNOWN)

    def _distinct(self, node: ast.AST, scope: Scope) -> Values:
        found = tuple(dict.fromkeys(self._values(node, scope)))
        return found if len(found) <= LIMIT else UNKNOWN

    def _of(self, pairs: Iterable[Placed]) -> list[str]:
        return [text for node, scope in pairs for text in self.values(node, scope)]

    def _values(self, node: ast.AST, scope: Scope) -> Iterable[str]:
        match node:
            case ast.Constant(value=str() | int() as value) if not isinstance(value, bool):
                return (str(value),)
            case ast.Constant():
                return ()
            case ast.JoinedStr():
                return texts.joined([self.values(part, scope) for part in node.values])
            case ast.FormattedValue():
                return UNKNOWN if node.format_spec else self.values(node.value, scope)
            case ast.BinOp():
                return self._operation(node, scope)
            case ast.Name() | ast.Attribute():
                return self._named(node, scope)
            case ast.Call():
                return self._call(node, scope)
            case ast.Subscript():
                return self._subscript(node, scope)
            case ast.Dict():
                return self._of((value, scope) for value in node.values)
            case ast.List() | ast.Tuple() | ast.Set() | ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self._of(self.elements(node, scope))
            case ast.IfExp():
                return (*self.values(node.body, scope), *self.values(node.orelse, scope))
            case ast.BoolOp():
                return self._of((part, scope) for part in node.values)
            case ast.NamedExpr() | ast.Starred() | ast.Await():
                return self.values(node.value, scope)
        return UNKNOWN

    def _operation(self, node: ast.BinOp, scope: Scope) -> Iterable[str]:
        if not isinstance(node.op, ast.Add | ast.Div | ast.Mod):
            return UNKNOWN
        left = self.values(node.left, scope)
        if isinstance(node.op, ast.Mod):
            return map(texts.percent, left)
        right = self.values(node.right, scope)
        if isinstance(node.op, ast.Div):
            return texts.joined([left, right], texts.path)
        sequences = (ast.List, ast.Tuple, ast.ListComp)
        both = isinstance(node.left, sequences) or isinstance(node.right, sequences)
        return (*left, *right) if both else texts.joined([left, right])

    # names

    def dotted(self, node: ast.AST, scope: Scope) -> tuple[str, ...]:
        """Parts of ``a.b.c`` with what an import says ``a`` is; empty for anything else, or a local name."""
        parts = list[str]()
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ()
        aliases = scope.module.aliases
        if node.id in aliases and not _hidden(node.id, scope):
            return (*aliases[node.id], *reversed(parts))
        return (node.id, *reversed(parts))

    def _named(self, node: ast.Name | ast.Attribute, scope: Scope) -> Iterable[str]:
        name = spelled(node)
        if name == "__file__":
            return (f"{self.root}/{scope.module.file}",)
        if name in ("__name__", "__package__"):
            parts = PurePosixPath(scope.module.file).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" or name == "__package__" else parts
            return (".".join(parts),)
        if name in GIVEN:
            return (GIVEN[name],)
        if bindings := scope.lookup(name, node) or (
            scope.module.scope.lookup(name) if name.startswith("self.") else []
        ):
            return [text for binding in bindings for text in self._bound(binding)]
        if (named := self.known.name(self.dotted(node, scope))) is not None:
            module, attribute = named
            if attribute in ("__file__", "__path__"):
                place = f"{self.root}/{module.file}"
                return (place if attribute == "__file__" else posixpath.dirname(place),)
            return [
                text for binding in module.scope.names.get(attribute, []) for text in self._bound(binding)
            ]
        return (
            texts.attribute(node.attr, self.values(node.value, scope))
            if isinstance(node, ast.Attribute)
            else UNKNOWN
        )

    def _bound(self, binding: Binding) -> Iterable[str]:
        if binding.kind == "param":
            assert isinstance(binding.node, Function)
            return self._argument(binding)
        if isinstance(binding.node, Function | ast.ClassDef):
            return ()
        pairs = (
            self.elements(binding.node, binding.scope)
            if binding.kind == "element"
            else [(binding.node, binding.scope)]
        )
        found = list[str]()
        for node, scope in pairs:
            if isinstance(binding.index, int):
                parts = self.elements(node, scope)
                node, scope = parts[binding.index] if binding.index < len(parts) else (ast.Pass(), scope)
            found += self.values(node, scope)
        return found

    def _argument(self, binding: Binding) -> Iterable[str]:
        """Values of a parameter: its default, and what the known calls give."""
        name, scope = str(binding.index), binding.scope
        found = list[str]()
        for node, inner in self._given(binding):
            found += self.values(node, inner)
        calls = self.known.callers(scope.module, qualified(binding))
        return found if calls or found or not self.settled else UNKNOWN if name not in ("self", "cls") else ()

    def _given(self, binding: Binding) -> Iterator[tuple[ast.AST, Scope]]:
        function, name = binding.node, str(binding.index)
        assert isinstance(function, Function)
        arguments = function.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        defaults = dict(zip(reversed(names), reversed(arguments.defaults), strict=False))
        defaults |= {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d}
        if name in defaults:
            yield defaults[name], binding.scope
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
        for scope, call in self.known.callers(binding.scope.module, qualified(binding)):
            yield from ((word.value, scope) for word in call.keywords if word.arg == name)
            if name in names and names.index(name) < len(call.args):
                yield call.args[names.index(name)], scope
            elif arguments.vararg and arguments.vararg.arg == name:
                yield from ((node, scope) for node in call.args[len(names) :])

    # sequences

    def elements(self, node: ast.AST, scope: Scope) -> list[Placed]:
        """Elements of a sequence, as expressions; of a string or an unknown one, the node itself."""
        return self.once("elements", node, lambda: self._elements(node, scope), [], [(node, scope)])

    def _elements(self, node: ast.AST, scope: Scope) -> list[Placed]:
        match node:
            case ast.List() | ast.Tuple() | ast.Set():
                return [pair for part in node.elts for pair in self._spread(part, scope)]
            case ast.Dict():
                return [(key, scope) for key in node.keys if key is not None]
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return [(node.elt, scope.module.inner.get(id(node), scope))]
            case ast.Call(
                func=ast.Attribute(attr=("items" | "values" | "keys") as part, value=held), args=[]
            ):
                return self._of_dicts(part, held, scope)
            case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in SEQUENCES:
                return self.elements(first, scope)
            case ast.Call(func=ast.Name(id="enumerate"), args=[first, *_]):
                return [
                    (_pair(ast.Constant(None), part), inner) for part, inner in self.elements(first, scope)
                ]
            case ast.BinOp(op=ast.Add()):
                return self.elements(node.left, scope) + self.elements(node.right, scope)
            case ast.Name() | ast.Attribute():
                held = [pair for pair in self._resolved(node, scope) if pair[0] is not node]
                return [found for pair in held for found in self.elements(*pair)] or [(node, scope)]
        return [(node, scope)]

    def _of_dicts(self, part: str, node: ast.expr, scope: Scope) -> list[Placed]:
        """What ``node.items()`` and its like run over, of every dictionary that ``node`` may be."""
        found = list[Placed]()
        for held, inner in self._resolved(node, scope):
            for key, value in zip(held.keys, held.values, strict=True) if isinstance(held, ast.Dict) else ():
                if key is not None:
                    found.append(({"items": _pair(key, value), "keys": key, "values": value}[part], inner))
        return found

    def _spread(self, part: ast.AST, scope: Scope) -> list[Placed]:
        return self.elements(part.value, scope) if isinstance(part, ast.Starred) else [(part, scope)]

    def _resolved(self, node: ast.AST, scope: Scope) -> list[Placed]:
        """What a name is bound to, as expressions."""
        itself = [(node, scope)]
        return self.once("resolved", node, lambda: self._follow(node, scope), itself, itself)

    def _follow(self, node: ast.AST, scope: Scope) -> list[Placed]:
        if not isinstance(node, ast.Name | ast.Attribute):
            return [(node, scope)]
        bindings = scope.lookup(spelled(node), node)
        if not bindings and (named := self.known.name(self.dotted(node, scope))) is not None:
            bindings = named[0].scope.names.get(named[1], [])
        found = list[Placed]()
        for binding in bindings:
            if binding.kind == "param":
                found += list(self._given(binding))
            elif binding.kind == "value" and binding.index is None:
                found += self._resolved(binding.node, binding.scope)
        return found or [(node, scope)]

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Iterable[str]:
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(node.value, ast.Attribute) and node.value.attr == "parents" and isinstance(index, int):
            return [texts.above(text, index + 1) for text in self.values(node.value.value, scope)]
        found = list[str]()
        for held, inner in self._resolved(node.value, scope):
            if isinstance(held, ast.Dict):
                keys = [key.value if isinstance(key, ast.Constant) else None for key in held.keys]
                chosen = [v for k, v in zip(keys, held.values, strict=True) if index in (None, k)]
                found += [text for value in chosen for text in self.values(value, inner)]
            elif isinstance(held, ast.List | ast.Tuple):
                parts = held.elts[index : index + 1] if isinstance(index, int) and index >= 0 else held.elts
                found += [text for value in parts for text in self.values(value, inner)]
        return found or UNKNOWN

    # calls

    def _call(self, node: ast.Call, scope: Scope) -> Iterable[str]:
        parts = self.dotted(node.func, scope)
        name = parts[-1] if parts else node.func.attr if isinstance(node.func, ast.Attribute) else ""
        of_paths = parts[:1] in (("os",), ("pathlib",), ("posixpath",)) or len(parts) == 1
        first = node.args[0] if node.args else None
        if (key := self.known.called(scope, node)) is not None and (module := key[0]) is not None:
            return [
                text
                for placed in module.returns.get(key[1], [])
                for text in self.values(placed.node, placed.scope)
            ]
        if name in ("getcwd", "cwd") and first is None:
            return (self.root,)
        if name in ("join", "Path", "PurePath") and of_paths and len(node.args) > 1:
            return texts.joined([self.values(part, scope) for part in node.args], texts.path)
        if name in ("dirname", "basename") and first is not None:
            return map(getattr(posixpath, name), self.values(first, scope))
        if name in FIRST and first is not None and of_paths:
            return self.values(first, scope)
        if name in SEQUENCES and len(parts) == 1 and first is not None:
            return self._of(self.elements(first, scope))
        if name == "map" and len(parts) == 1 and len(node.args) == 2 and spelled(node.args[0]) in FIRST:
            return self._of(self.elements(node.args[1], scope))
        if name == "files" and parts[:1] == ("importlib",):
            packages = (self.known.name((*text.split("."), "__path__")) for text in self.values(first, scope))
            return [f"{self.root}/{posixpath.dirname(named[0].file)}" for named in packages if named]
        if name in ("glob", "iglob") and parts[:1] == ("glob",):
            return [file for text in self.values(first, scope) for file in self._matching(text)]
        return self._method(node, node.func, scope) if isinstance(node.func, ast.Attribute) else UNKNOWN

    def _method(self, node: ast.Call, function: ast.Attribute, scope: Scope) -> Iterable[str]:
        held, name = self.values(function.value, scope), function.attr
        if name in ("glob", "rglob") and node.args:
            deep = ("**/",) if name == "rglob" else ("",)
            patterns = texts.joined(
                [tuple(f"{folder}/" for folder in held), deep, self.values(node.args[0], scope)]
            )
            return [file for pattern in patterns for file in self._matching(pattern)]
        if name == "join" and node.args:
            if not isinstance(node.args[0], ast.List | ast.Tuple):
                return UNKNOWN
            parts = [self.values(*pair) for pair in self.elements(node.args[0], scope)]
            return [text for glue in held for text in texts.joined(parts, glue.join)]
        return texts.method(name, held, [self.values(part, scope) for part in node.args])

    def _matching(self, pattern: str) -> list[str]:
        return [pattern] if HOLE in pattern else self.known.glob(pattern)


def _hidden(name: str, scope: Scope) -> bool:
    """Whether a local variable of a function has the name of an import."""
    while scope.parent is not None:
        if name in scope.names:
            return True
        scope = scope.parent
    return False


def _pair(first: ast.AST, second: ast.AST) -> ast.Tuple:
    return ast.Tuple(elts=[first, second])  # pyright: ignore[reportArgumentType] - both are expressions
