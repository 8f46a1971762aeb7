"""The static half: casts of a tree's files, and what their markers say of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsv4.casts.engine import Engine
from dsv4.casts.hits import Cast
from dsv4.casts.source import Module, Tree

# What a plan runs in this project; refs emulate rounding on purpose. Another tree is swept whole.
AUDITED = ("dsv4/backend/*.py", "kernels/*/*kernel.py", "kernels/formats/device.py")
SKIPPED = ("test_", "conftest")
NOT_OURS = {".venv", "venv", ".git", "__pycache__", "node_modules", "build", "dist", "site-packages"}


class SweepError(ValueError):
    """What was asked for cannot be swept; the message names the path."""


@dataclass(frozen=True)
class Swept:
    """Casts of a tree's files.

    Attributes
    ----------
    modules : the files that were swept.
    warnings : a line for each file that does not parse.
    """

    casts: list[Cast]
    modules: list[Module]
    warnings: list[str]


def files_of(root: Path, paths: Sequence[Path]) -> list[Path]:
    """Python files to sweep: these and those below these folders, or what a plan runs, or the whole tree; no tests.

    Raises
    ------
    SweepError
        A path that is not there, or not below ``root``.
    """
    root = root.resolve()
    if not root.is_dir():
        raise SweepError(f"--root {root}: no such folder")
    if not paths:
        audited = sorted(path for glob in AUDITED for path in root.glob(glob))
        found = audited if audited_here(root) else sorted(root.rglob("*.py"))
    else:
        found = []
        for path in paths:
            place = path.resolve() if path.is_absolute() else (root / path).resolve()
            if not place.exists():
                raise SweepError(f"{path}: no such file or folder below {root}")
            if place != root and root not in place.parents:
                raise SweepError(f"{path}: not below --root {root}; name a root that holds it")
            found += [place] if place.is_file() else sorted(place.rglob("*.py"))
    named = {path.resolve() for path in paths if path.is_file()}
    wanted = [path for path in dict.fromkeys(found) if path.suffix == ".py" and _ours(path, root)]
    return [path for path in wanted if path in named or not path.name.startswith(SKIPPED)]


def _ours(path: Path, root: Path) -> bool:
    return not NOT_OURS & set(path.relative_to(root).parts)


def audited_here(root: Path) -> bool:
    """Whether a tree is this project."""
    return (root.resolve() / "dsv4" / "backend" / "step.py").is_file()


def sweep(root: Path, paths: Sequence[Path] = (), also: Sequence[str] = ()) -> Swept:
    """Sweep a tree; ``also``: further files, relative to ``root``."""
    tree = Tree(root)
    found = dict.fromkeys([*files_of(root, paths), *(root.resolve() / file for file in also)])
    modules = [module for path in found if (module := tree.module(path.resolve())) is not None]
    casts = Engine(tree).sweep(modules)
    return Swept(casts, modules, tree.warnings)
