"""What of a commit runs: its files, each with a hash that its comments and docstrings do not enter."""

import ast
from hashlib import sha256
from pathlib import Path

from dsv4.code_inputs import COMMITS, KERNELS, closure

STAGE = "dsv4.run.variant"  # what is run of a commit
ALSO = ("rules/*.schema.yaml",)  # read by the stage, and named by no string that the closure sees


def fingerprint(tree: Path, backend: str) -> dict[str, str] | None:
    """Hash of every file that the stage of a tree runs; None if that cannot be told without running it.

    Parameters
    ----------
    tree : a commit's files.
    backend : "kernel": the files of kernels too.
    """
    try:
        without = (COMMITS,) if backend == "kernel" else (COMMITS, KERNELS)
        files = list(closure(STAGE, without, tree.resolve()))
        files += [str(path.relative_to(tree)) for pattern in ALSO for path in sorted(tree.glob(pattern))]
        return {file: _hash(tree / file) for file in files}
    except (ModuleNotFoundError, SyntaxError, ValueError, OSError, RecursionError):
        return None


def _hash(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix == ".py":
        content = ast.dump(without_docstrings(ast.parse(content))).encode()
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
