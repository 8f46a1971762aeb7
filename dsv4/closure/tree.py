"""A source tree: its files, and where Python and a C compiler would look in it."""

import fnmatch
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from dsv4.closure.names import module_file
from dsv4.closure.texts import HOLE

KERNEL_SUFFIXES = {
    ".cu",
    ".cuh",
    ".c",
    ".cc",
    ".cpp",
    ".cxx",
    ".h",
    ".hh",
    ".hpp",
    ".hxx",
    ".inl",
    ".cl",
    ".hip",
}
SUFFIXES = KERNEL_SUFFIXES | {".py", ".smk"}
BUILT = frozenset({"__pycache__", "node_modules", "build", "dist", "site-packages"})  # no sources of the tree
TEST = re.compile(r"(^|/)(tests?/|test_[^/]*$|conftest\.py$)|_test\.[^/.]+$")


class ClosureError(ValueError):
    """What cannot be audited, and what to do."""


@dataclass(frozen=True)
class Found:
    """What importing a dotted name runs.

    Attributes
    ----------
    files : files that run, outermost package first.
    folders : where submodules of the last one lie; empty if it is no package.
    rest : parts that were not found.
    """

    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()


@dataclass
class Tree:
    """Files below ``root``; all paths in and out are relative to it, with ``/``."""

    root: Path
    left_out: Counter[str] = field(default_factory=Counter)

    @cached_property
    def files(self) -> frozenset[str]:
        """Sources, tests among them; not those of environments, builds and hidden folders."""
        found = set[str]()
        for folder, names, files in os.walk(self.root):
            for name in list(names):
                place = Path(folder, name)
                if (place / "pyvenv.cfg").is_file() or (place / "conda-meta").is_dir():
                    self.left_out["virtual environments"] += 1
                elif name.startswith(".") or name in BUILT or name.endswith(".egg-info"):
                    self.left_out["hidden and build folders"] += 1
                elif not place.is_symlink():
                    continue
                names.remove(name)
            here = Path(folder).relative_to(self.root)
            chosen = (name for name in files if Path(name).suffix in SUFFIXES or name == "Snakefile")
            found.update((here / name).as_posix() for name in chosen)
        return frozenset(found)

    @cached_property
    def package(self) -> tuple[str, ...]:
        """Name of the package that the root is, with those around it; empty if it is none."""
        place, parts = self.root, list[str]()
        while (place / "__init__.py").is_file():
            parts.insert(0, place.name)
            place = place.parent
        return tuple(parts)

    def is_test(self, file: str) -> bool:
        """Whether a file is a test or serves tests alone."""
        return TEST.search(file) is not None

    def relative(self, path: str) -> str | None:
        """A path that may be absolute or hold ``..``, seen from the root; None outside the tree."""
        whole = os.path.normpath(os.path.join(self.root, path))  # noqa: PTH118 - no links are resolved
        inside = whole.startswith(f"{self.root}{os.sep}")
        return (
            Path(whole).relative_to(self.root).as_posix()
            if inside
            else "."
            if whole == str(self.root)
            else None
        )

    def is_file(self, file: str | None) -> bool:
        """Whether a path inside the tree is a file; one that was left out is none."""
        return file is not None and (file in self.files or (self.root / file).is_file())

    def find(self, parts: Sequence[str], bases: Iterable[str]) -> Found:
        """What importing ``parts`` runs, looked for in ``bases`` as Python does.

        A package or module in any base goes before a folder without ``__init__.py``; such folders
        of several bases are one namespace package.
        """
        files, folders = list[str](), tuple(bases)
        for index, part in enumerate(parts):
            if index == 0 and part in sys.builtin_module_names:
                return Found(rest=tuple(parts))
            places = [place for folder in folders if (place := self._below(folder, part))]
            hit = next((file for place in places if (file := module_file(self.root / place))), None)
            if hit is None:
                folders = tuple(place for place in places if (self.root / place).is_dir())
                if not folders:
                    return Found(tuple(files), (), tuple(parts[index:]))
                continue
            files.append(hit.relative_to(self.root).as_posix())
            folders = (PurePosixPath(files[-1]).parent.as_posix(),) if hit.name == "__init__.py" else ()
        return Found(tuple(files), folders)

    def _below(self, folder: str, part: str) -> str | None:
        return self.relative(f"{folder}/{part}") if part else None

    def holds(self, folder: str, bases: Iterable[str]) -> bool:
        """Whether a folder of any base has Python files."""
        starts = tuple(f"{folder}/" if base == "." else f"{base}/{folder}/" for base in bases)
        return any(file.endswith(".py") and file.startswith(starts) for file in self.files)

    def modules(self, pattern: str, bases: Iterable[str]) -> list[tuple[str, ...]]:
        """Modules whose dotted name matches, as their parts; ``pattern`` holds :data:`HOLE` for what is not known."""
        match = re.compile(".*".join(map(re.escape, pattern.split(HOLE)))).fullmatch
        found = set[tuple[str, ...]]()
        for base in bases:
            prefix = "" if base == "." else f"{base}/"
            for file in self.files:
                if file.endswith(".py") and file.startswith(prefix) and not self.is_test(file):
                    name = file.removeprefix(prefix).removesuffix(".py").removesuffix("/__init__")
                    if match(name.replace("/", ".")):
                        found.add(tuple(name.split("/")))
        return sorted(found)

    def paths(self, pattern: str) -> list[str]:
        """Files that a path with :data:`HOLE` or ``*`` in it may mean; a hole at the start may be any folder."""
        rough = pattern.replace(HOLE, "*")
        if rough.startswith("*"):
            return sorted(file for file in self.files if fnmatch.fnmatchcase(f"/{file}", rough))
        inside = self.relative(rough)
        if inside is None:
            return []
        match = re.compile(_glob(inside)).fullmatch
        return sorted(file for file in self.files if match(file))

    def ending(self, path: str) -> list[str]:
        """Files whose path ends in ``path``."""
        tail = os.path.normpath(path).lstrip("./")
        return sorted(file for file in self.files if f"/{file}".endswith(f"/{tail}"))


def _glob(pattern: str) -> str:
    """A glob as a regular expression: ``*`` stays within a folder, ``**/`` is any number of folders."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(meaning.get(part, re.escape(part)) for part in parts)


def matches(file: str, pattern: str) -> bool:
    """Whether a file's path matches a glob as :meth:`pathlib.Path.glob` means it."""
    return re.fullmatch(_glob(pattern.removeprefix("./")), file) is not None
