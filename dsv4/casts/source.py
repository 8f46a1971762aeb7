"""A tree of Python files, parsed when first asked for, and what a name in one of them stands for."""

import ast
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

SHORT = 90  # characters of source that a place shows
Function = ast.FunctionDef | ast.AsyncFunctionDef
LIBRARIES = ("torch", "triton", "numpy", "math")
JIT = ("jit", "aggregate_jit")


@dataclass(eq=False)
class Module:
    """One parsed file.

    Attributes
    ----------
    file : relative to the root.
    imports : local name -> dotted name.
    defined : functions and classes at the top, and methods as ``Class.method``.
    """

    file: str
    source: str
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)
    defined: dict[str, Function | ast.ClassDef] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imports[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                for alias in node.names:
                    name = base + alias.name if base.endswith(".") else f"{base}.{alias.name}"
                    self.imports[alias.asname or alias.name] = name
        self._define(self.tree.body, "")

    def _define(self, body: list[ast.stmt], prefix: str) -> None:
        """Functions and classes of a body, also those that are defined under a condition."""
        for node in body:
            if isinstance(node, Function | ast.ClassDef):
                self.defined[prefix + node.name] = node
            if isinstance(node, ast.ClassDef):
                self._define(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try | ast.With):
                inner = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
                handlers = [each for handler in getattr(node, "handlers", []) for each in handler.body]
                self._define([*handlers, *inner], prefix)

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Of every node but the module."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def _lines(self) -> list[bytes]:
        return self.source.encode().split(b"\n")

    def text(self, node: ast.AST) -> str:
        """The node's source on one short line; ``ast.get_source_segment`` would split the file at every call."""
        first, last = getattr(node, "lineno", 0) - 1, (getattr(node, "end_lineno", 0) or 0) - 1
        if not 0 <= first <= last < len(self._lines):
            return ""
        lines = self._lines[first : last + 1]
        lines[-1] = lines[-1][: getattr(node, "end_col_offset", None)]
        lines[0] = lines[0][getattr(node, "col_offset", 0) :]
        said = " ".join(b" ".join(lines).decode(errors="replace").split())
        return said if len(said) <= SHORT else f"{said[: SHORT - 1]}…"

    def dotted(self, node: ast.AST) -> str:
        """A name in full, its first part as imported: ``torch.nn.functional.linear`` of ``F.linear``; or ''."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.imports.get(node.id, node.id), *reversed(parts)])

    def is_jit(self, function: ast.AST) -> bool:
        """Whether a function is compiled for a device, so that its values live in registers."""
        for each in getattr(function, "decorator_list", []):
            name = self.dotted(each.func if isinstance(each, ast.Call) else each)
            if name.rpartition(".")[2] in JIT and "torch" not in name:
                return True
        return False


class Tree:
    """Files below a folder.

    Attributes
    ----------
    warnings : a line for each file that does not parse.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.warnings: list[str] = []
        self._modules: dict[str, Module | None] = {}
        self._found: dict[tuple[str, str], tuple[Module, str] | None] = {}

    def module(self, path: Path) -> Module | None:
        """A file of the tree; None, and a warning, if Python cannot parse it."""
        file = path.relative_to(self.root).as_posix()
        if file not in self._modules:
            self._modules[file] = None
            try:
                source = path.read_text(encoding="utf-8")
                self._modules[file] = Module(file, source, ast.parse(source, filename=file))
            except (SyntaxError, ValueError, OSError, RecursionError) as error:
                line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
                said = error.msg if isinstance(error, SyntaxError) else str(error)
                self.warnings.append(f"{file}{line}: not swept, it does not parse: {said}")
        return self._modules[file]

    def warn(self, said: str) -> None:
        """Keep a warning, once."""
        if said not in self.warnings:
            self.warnings.append(said)

    def find(self, dotted: str, module: Module, depth: int = 0) -> tuple[Module, str] | None:
        """Where a dotted name, as ``module`` spells it, is defined: that module and the rest of the name."""
        key = module.file, dotted
        if key not in self._found:
            self._found[key] = self._find(dotted, module, depth)
        return self._found[key]

    def _find(self, dotted: str, module: Module, depth: int) -> tuple[Module, str] | None:
        if not dotted or depth > 5 or dotted.partition(".")[0] in LIBRARIES:
            return None
        if dotted.partition(".")[0] in module.defined:
            return module, dotted
        parts = dotted.lstrip(".").split(".")
        up = len(dotted) - len(dotted.lstrip("."))
        for cut in range(len(parts), 0, -1):
            found = self._file(parts[:cut], module, up)
            if found is None or found is module:
                continue
            rest = parts[cut:]
            if not rest or rest[0] in found.defined or rest[0] not in found.imports:
                return found, ".".join(rest)
            return self.find(".".join([found.imports[rest[0]], *rest[1:]]), found, depth + 1)
        if up and (package := self._file([], module, up)) and parts[0] in package.imports:
            return self.find(".".join([package.imports[parts[0]], *parts[1:]]), package, depth + 1)
        return None

    def _file(self, parts: list[str], module: Module, up: int) -> Module | None:
        here = (self.root / module.file).parent
        bases = [self.root, here]
        if up:
            bases = [here.parents[up - 2] if up > 1 else here]
        for base in bases:
            path = base.joinpath(*parts)
            for file in (path / "__init__.py", path.with_suffix(".py") if parts else path):
                if file.suffix == ".py" and file.is_file() and self.root in file.parents:
                    return self.module(file)
        return None
