"""What tests of the code itself read from its syntax trees: ops, modules, and what each imports."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "dsv4")
OPS = (
    "compress",
    "fp8_quantise",
    "gather_dequantise",
    "grouped_ffn",
    "hadamard",
    "hc",
    "index_key",
    "index_logits",
    "index_query",
    "index_topk",
    "kv_norm_rope_store",
    "kv_store",
    "linear",
    "matmul",
    "mhc_rmsnorm_quantise_nvfp4",
    "nvfp4_quantise",
    "page_slots",
    "q_norm_rope_quantise",
    "rmsnorm",
    "rmsnorm_quantise_nvfp4",
    "rope",
    "route",
    "sparse_attn",
    "swiglu",
    "swiglu_quantise_nvfp4",
)
HELPERS = ("conftest.py", "_check.py", "_mutate.py", "_oracle.py", "_tree.py")  # of tests


@dataclass(frozen=True)
class Import:
    """One imported module: ``name`` of it if one was named, and when the import happens."""

    module: str
    name: str | None
    at_start: bool  # runs when the module is imported, so that it can close a circle
    typing_only: bool


def sources() -> dict[str, Path]:
    """Modules of ours by dotted name, without tests."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name.startswith("test_") or path.name in HELPERS:
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


SOURCES = sources()


@cache
def parsed(path: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imports(module: str) -> tuple[Import, ...]:
    """What a module imports, anywhere in it."""
    path = SOURCES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return tuple(imports_of(parsed(path), package, at_start=True, typing_only=False))


def imports_of(node: ast.AST, package: str, *, at_start: bool, typing_only: bool) -> Iterator[Import]:
    """Imports below a node of a module of ``package``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, None, at_start, typing_only)
        elif isinstance(child, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            base = ".".join([*above, *filter(None, [child.module])])
            for alias in child.names:
                inner = f"{base}.{alias.name}"
                is_module = inner in SOURCES
                yield Import(
                    inner if is_module else base, None if is_module else alias.name, at_start, typing_only
                )
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from imports_of(child, package, at_start=False, typing_only=True)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports_of(child, package, at_start=at_start and not inside, typing_only=typing_only)


def runs(module: str) -> Iterator[str]:
    """Modules that running ``module`` can import, its packages included; not those for type checkers."""
    parts = module.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts)))
    yield from (found.module for found in imports(module) if not found.typing_only)


def below(module: str, *prefixes: str) -> bool:
    """Whether a module is one of these or in one of them."""
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def offenders(inside: tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    """``module -> import`` for every direct import of something forbidden, wherever it stands."""
    return [
        f"{module} -> {found.module}"
        for module in SOURCES
        if below(module, *inside)
        for found in imports(module)
        if below(found.module, *forbidden)
    ]
