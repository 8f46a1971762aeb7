"""What a source names: modules that it imports or has in a string, and files that a string may mean.

Parsing every source of the tree takes seconds, and each start of Snakemake asks for all of them. So what was found is
kept, under the content's hash: an edited file is read again, whatever its time and size say.
"""

import ast
import hashlib
import json
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dsv4.closure import names as import_names
from dsv4.closure.names import imported
from dsv4.files import WriteError, write_json

MOST = 4000  # sources that are kept: those of several trees, for commits have their own
# What was found by other code is not taken: by these two files, on this version of Python.
READER = hashlib.sha256(
    b"".join([sys.version.encode(), Path(__file__).read_bytes(), Path(import_names.__file__).read_bytes()])
).hexdigest()


class Names(NamedTuple):
    """What a source names. Whether there is such a module or file is the tree's to say."""

    imports: list[str]  # modules of our packages
    strings: list[str]  # each may be a module of our packages, or a file


def read(source: bytes, package: str, packages: Collection[str], filename: str) -> Names:
    """Read what a source names, each list sorted.

    Parameters
    ----------
    package : where a relative import starts from.
    packages : top-level packages whose modules count.
    filename : for the message of an error.

    Raises
    ------
    SyntaxError
        ``source`` is no Python.
    UnicodeDecodeError
        ``source`` is no UTF-8.
    """
    imports, strings = set[str](), set[str]()
    for node in ast.walk(ast.parse(source.decode("utf-8"), filename=filename)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(imported(node, package.split(".")))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
    return Names(
        sorted(name for name in imports if may_be_module(name, packages)),
        sorted(text for text in strings if names_module(text, packages) or may_be_file(text)),
    )


def may_be_module(name: str, packages: Collection[str]) -> bool:
    """Whether ``name`` can be a module of one of these packages."""
    parts = name.split(".")
    return parts[0] in packages and all(part.isidentifier() for part in parts)


def names_module(text: str, packages: Collection[str]) -> bool:
    """Whether a string can be a module's name: a package's name alone is a word of many texts."""
    return "." in text and may_be_module(text, packages)


def may_be_file(text: str) -> bool:
    """Whether a string can be a data file's name: short, one line, with a suffix, and not Python's."""
    if not 3 <= len(text) <= 80 or text.endswith(".py") or "\n" in text or "\0" in text:
        return False
    return "." in Path(text).name


class Kept:
    """Names of sources that were read before, in a file that any process may replace at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found = _load(path)
        self._new = False

    def names(self, source: bytes, package: str, packages: Collection[str], filename: str) -> Names:
        """As :func:`read`, which is asked only for what was not read before."""
        key = hashlib.sha256("\0".join([package, *sorted(packages), ""]).encode() + source).hexdigest()
        if key not in self._found:
            self._found[key] = read(source, package, packages, filename)
            self._new = True
        return self._found[key]

    def write(self) -> None:
        """Keep what is new. Of two processes that write at once the last one's file stays; both are right."""
        if not self._new or not self.path.parent.is_dir():  # where no Snakemake works nothing is left behind
            return
        self._new = False
        found = self._found if len(self._found) <= MOST else {}
        with suppress(WriteError):  # a read-only tree: the next start reads all again
            write_json(self.path, {"reader": READER, "found": found})


def _load(path: Path) -> dict[str, Names]:
    try:
        content = json.loads(path.read_bytes())
        if content["reader"] != READER:
            return {}
        return {key: Names(*names) for key, names in content["found"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or not as it was written
        return {}
