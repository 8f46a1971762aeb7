"""Where an import statement points, without running it. Only the standard library: every start loads this."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path


class BeyondTopError(ImportError):
    """A relative import that leaves the tree: more dots than there are packages."""


def base(node: ast.ImportFrom, package: Sequence[str]) -> list[str]:
    """Parts of the module that ``from … import`` names, seen from a file of ``package``.

    Raises
    ------
    BeyondTopError
        More dots than ``package`` has parts, and one.
    """
    named = node.module.split(".") if node.module else []
    if not node.level:
        return named
    if node.level > len(package) + 1:
        raise BeyondTopError(f"{'.' * node.level}{node.module or ''}: more dots than packages")
    return [*package[: len(package) - node.level + 1], *named]


def imported(node: ast.Import | ast.ImportFrom, package: Sequence[str]) -> Iterator[str]:
    """Every name that may be a module: ``from a import b`` may mean ``a`` or ``a.b``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    try:
        parts = base(node, package)
    except BeyondTopError:
        return
    yield ".".join(parts)
    yield from (".".join([*parts, alias.name]) for alias in node.names)


def module_file(place: Path) -> Path | None:
    """Source of the module at ``place`` (its path without suffix): a package's ``__init__.py`` goes first."""
    return next(
        (path for path in (place / "__init__.py", place.with_name(f"{place.name}.py")) if path.is_file()),
        None,
    )
