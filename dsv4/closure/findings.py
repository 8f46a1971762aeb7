"""What reading one file gives: references to other files, and what is to be told about it."""

from dataclasses import dataclass, field
from enum import StrEnum

from dsv4.closure.module import Condition, Rank
from dsv4.closure.tree import Found


class Kind(StrEnum):
    """What a note is about."""

    UNKNOWN = "unknown"  # a run may reach more here than was found
    BROKEN = "broken"  # names something of the tree that is not there
    OPTIONAL = "optional"  # the same, and the failure is caught
    EXTERNAL = "external"  # not of the tree
    EMBEDDED = "embedded"  # kernel source in a string


@dataclass(frozen=True)
class Reference:
    """One file names another.

    Attributes
    ----------
    target : path below the root.
    line : in the file that names it.
    how : "import", "import_module", "include", …
    main : the target runs as ``__main__``.
    main_only : followed only where the naming file runs as ``__main__``.
    """

    target: str
    line: int
    how: str
    rank: Rank = Rank.LIVE
    main: bool = False
    main_only: bool = False


@dataclass(frozen=True, order=True)
class Note:
    """One line of the report about one place."""

    kind: Kind
    file: str
    line: int
    text: str


@dataclass
class Findings:
    """All of one file, and what it tells about others: search paths and include folders."""

    file: str
    references: list[Reference] = field(default_factory=list)
    notes: set[Note] = field(default_factory=set)
    paths: list[str] = field(default_factory=list)
    includes: list[str] = field(default_factory=list)

    def note(self, kind: Kind, line: int, text: str) -> None:
        """Tell about a place."""
        self.notes.add(Note(kind, self.file, line, text))

    def refer(
        self, target: str, line: int, how: str, condition: Condition, maybe: bool = False, main: bool = False
    ) -> None:
        """Name another file."""
        rank = Rank.TYPES if condition.types_only else Rank.MAYBE if maybe else Rank.LIVE
        if target != self.file or main:
            self.references.append(Reference(target, line, how, rank, main, condition.main_only))

    def run(self, found: Found, line: int, how: str, condition: Condition, maybe: bool = False) -> None:
        """Name every file that importing a module runs."""
        for file in found.files:
            self.refer(file, line, how, condition, maybe)
