"""What is known of a tree so far: its parsed modules, search paths, include folders, and who calls what."""

import ast
from collections.abc import Iterable

from dsv4.closure.findings import Kind, Note
from dsv4.closure.module import HERE, Function, Module, Scope, parse, qualified
from dsv4.closure.once import Key
from dsv4.closure.tree import Found, Tree
from dsv4.closure.values import CallSite, Evaluator


class Program:
    """Grows while files are read; see :mod:`dsv4.closure.graph`.

    Attributes
    ----------
    paths : where absolute imports are looked for, as ``sys.path`` would be.
    includes : folders that ``#include`` is looked for in, after the including file's own.
    calls : the calls of each function.
    """

    def __init__(self, tree: Tree, paths: Iterable[str]) -> None:
        self.tree = tree
        self.paths = tuple(dict.fromkeys(paths))
        self.includes: tuple[str, ...] = ()
        self.calls: dict[Key, list[CallSite]] = {}
        self.unread: dict[str, Note] = {}
        self._found: dict[tuple[tuple[str, ...], tuple[str, ...]], Found] = {}
        self._modules: dict[str, Module | None] = {}
        self.evaluator = Evaluator(str(tree.root), self)

    def module(self, file: str) -> Module | None:
        """Parse a file, once; None and a note if it is no Python."""
        if file not in self._modules:
            try:
                self._modules[file] = parse(file, (self.tree.root / file).read_bytes())
            except (SyntaxError, ValueError, RecursionError, OSError) as error:
                line = (error.lineno if isinstance(error, SyntaxError) else None) or 1
                self.unread[file] = Note(
                    Kind.UNKNOWN, file, line, f"cannot be read: {type(error).__name__}: {error}"
                )
                self._modules[file] = None
        return self._modules[file]

    def find(self, parts: tuple[str, ...]) -> Found:
        """What importing dotted parts runs; the first part :data:`HERE` starts at the root."""
        key = parts, self.paths
        if key not in self._found:
            self._found[key] = self._find(parts)
        return self._found[key]

    def _find(self, parts: tuple[str, ...]) -> Found:
        """As :meth:`find`; the root may itself be a package, which imports itself by its own name."""
        inside = len(self.tree.package)
        if parts[:1] == (HERE,):
            inside = 1
        elif not inside or parts[:inside] != self.tree.package:
            return self.tree.find(parts, self.paths)
        found = self.tree.find(parts[inside:], (".",))
        first = ("__init__.py",) if self.tree.package else ()
        return Found((*first, *found.files), found.folders, found.rest)

    def name(self, parts: tuple[str, ...], depth: int = 8) -> tuple[Module, str] | None:
        """Module and qualified name that dotted parts mean, through re-exports; None outside the tree."""
        if len(parts) < 2 or depth == 0:
            return None
        found = self.find(parts)
        if not found.files or not found.rest or (module := self.module(found.files[-1])) is None:
            return None
        head = found.rest[0]
        if head in module.aliases and head not in module.scope.names:
            return self.name((*module.aliases[head], *found.rest[1:]), depth - 1)
        return module, ".".join(found.rest)

    def callers(self, module: Module, function: str) -> list[CallSite]:
        """Calls of a function; of a method also those on objects that are not known."""
        keys = [(module.file, function)]
        if "." in function and not function.endswith("__init__"):
            keys.append(("", function.rpartition(".")[2]))
        self.evaluator.once.asked.update(keys)
        return [site for key in keys for site in self.calls.get(key, [])]

    def called(self, scope: Scope, call: ast.Call) -> tuple[Module | None, str] | None:
        """Function of the tree that a call runs, a class's ``__init__``; without a module any method of that name."""
        function = call.func
        for binding in scope.lookup(function.id) if isinstance(function, ast.Name) else ():
            if isinstance(binding.node, Function | ast.ClassDef) and binding.kind == "value":
                return binding.scope.module, _run(binding.scope.module, qualified(binding))
        if (named := self.name(self.evaluator.dotted(function, scope))) is not None:
            return named[0], _run(*named)
        return (None, function.attr) if isinstance(function, ast.Attribute) else None

    def glob(self, pattern: str) -> list[str]:
        """Absolute paths of the tree's files that match."""
        return [f"{self.tree.root}/{file}" for file in self.tree.paths(pattern)]


def _run(module: Module, name: str) -> str:
    return name if name in module.functions else f"{name}.__init__"
