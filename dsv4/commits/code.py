"""What of a commit runs or is read: its files, each with a hash that comments and docstrings do not enter."""

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path

from dsv4.code_inputs import COMMITS, KERNELS, PACKAGES, ROOT, closure

STAGE = "dsv4.run.variant"  # what is run of a commit
WORDS = ("docs", "reports")  # folders that nothing runs or reads
TOOLS = (
    "Makefile",
    "Snakefile",
    "LICENSE",
    ".smk",
    ".ci",
)  # files, endings, folders that other programs read
LOADERS = {"__import__", "exec", "eval", "import_module", "run_module", "run_path", "exec_module"}
LOADERS |= {"load_module", "load_source", "spec_from_file_location", "SourceFileLoader"}


def fingerprint(tree: Path, backend: str) -> dict[str, str] | None:
    """Hash of every file of a tree that its stage may run or read; None if that cannot be told.

    Of Python below ``dsv4/`` and ``kernels/`` these are the files that imports reach. Every other file
    counts, whoever may read it: data, headers, sources of kernels, a module that would go before an
    installed one. Only ``*.md`` and what is below ``docs/`` and ``reports/`` are words, and :data:`TOOLS` are what
    none of these modules has in a string.

    Parameters
    ----------
    tree : a commit's files.
    backend : "kernel": the files of kernels too.
    """
    try:
        without = (COMMITS,) if backend == "kernel" else (COMMITS, KERNELS)
        runs = closure(STAGE, without, tree.resolve())
        modules = [_module((tree / file).read_bytes()) for file in runs if file.endswith(".py")]
        if any(module.loads_unnamed for module in modules):
            return None
        said = frozenset[str]().union(*(module.said for module in modules))
        unread = [tool for tool in TOOLS if tool not in said]
        read = {file for file in _read(tree) if not {file.split("/")[0], Path(file).suffix} & {*unread}}
        return {file: _hash(tree / file) for file in sorted({*runs, *read})}
    except (ModuleNotFoundError, SyntaxError, ValueError, OSError, RecursionError):
        return None


def _read(tree: Path) -> Iterator[str]:
    """Files that code may read without an import that names them; a link counts as itself."""
    for folder, folders, files in os.walk(tree):
        here = Path(folder).relative_to(tree)
        if here == Path():
            folders[:] = [name for name in folders if name not in (".git", *WORDS)]
        links = [name for name in folders if (tree / here / name).is_symlink()]
        for path in (here / name for name in (*files, *links)):
            judged = path.suffix == ".py" and path.parts[0] in PACKAGES
            if not judged and path.suffix != ".md" and path.name != ".git":
                yield path.as_posix()


@dataclass(frozen=True, kw_only=True)
class _Module:
    """What the text of a Python file says, wherever it lies.

    Attributes
    ----------
    loads_unnamed : see :func:`_loads_unnamed`.
    said : those of :data:`TOOLS` that stand in a string that is no docstring.
    sha256 : of its syntax tree without docstrings.
    """

    loads_unnamed: bool
    said: frozenset[str]
    sha256: str


@lru_cache(maxsize=4096)  # the commits of a branch share nearly all of their files
def _module(source: bytes) -> _Module:
    tree = ast.parse(source)
    unnamed = _loads_unnamed(tree)
    strings = [
        node.value
        for node in ast.walk(without_docstrings(tree))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    said = frozenset(tool for tool in TOOLS if any(tool in text for text in strings))
    return _Module(loads_unnamed=unnamed, said=said, sha256=sha256(ast.dump(tree).encode()).hexdigest())


def _loads_unnamed(module: ast.Module) -> bool:
    """Whether a file can run code that no import or constant of it names."""
    nodes = list(ast.walk(module))
    named = {id(node.func) for node in nodes if isinstance(node, ast.Call) and _names_module(node)}
    return any(_loader(node) for node in nodes if id(node) not in named)


def _names_module(call: ast.Call) -> bool:
    """Whether a call imports a module by a full name, which the closure reads."""
    name = call.args[0] if call.args else None
    function = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return (
        function in ("import_module", "__import__", "run_module")
        and isinstance(name, ast.Constant)
        and isinstance(name.value, str)
        and not name.value.startswith(".")
    )


def _loader(node: ast.AST) -> bool:
    """Whether a name is one that loads code; ``model.eval()`` of torch is none."""
    if isinstance(node, ast.Attribute):
        of_builtins = isinstance(node.value, ast.Name) and node.value.id in ("builtins", "__builtins__")
        return node.attr in LOADERS and (of_builtins or node.attr not in ("eval", "exec"))
    if isinstance(node, ast.alias):  # under another name its calls are not seen
        return node.name in LOADERS and node.asname is not None
    return isinstance(node, ast.Name) and node.id in LOADERS


def _hash(path: Path) -> str:
    content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
    if not path.is_symlink() and path.suffix == ".py":
        return _module(content).sha256
    return sha256(content).hexdigest()


def without_docstrings(tree: ast.Module) -> ast.Module:
    """Take the docstrings out of a module; comments and layout a syntax tree never holds."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            del node.body[0]
    return tree


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Files that only one of two trees has, or that differ between them."""
    return sorted(file for file in one.keys() | other.keys() if one.get(file) != other.get(file))


@cache
def own_sha256(module: str) -> str:
    """Hash of this audit's own files that a module runs: what it found rests on them."""
    digest = sha256()
    for file in closure(module):
        digest.update(file.encode() + (ROOT / file).read_bytes())
    return digest.hexdigest()


def prover_sha256() -> str:
    """Hash of the code that proves two trees equal."""
    return own_sha256("dsv4.commits.code")
