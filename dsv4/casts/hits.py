"""A cast as the sweep lists it."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from dsv4.casts.dtypes import BYTES
from dsv4.casts.values import Place

CHOICE = "a producer's dtype"  # why such a one is free: it is no cast


class Direction(StrEnum):
    """Which half of the plan's rule a cast breaks."""

    WIDENED = "widened_after_narrow"
    NARROWED = "narrowed_only_next"
    UNCLEAR = "unclear"

    @property
    def words(self) -> str:
        """As a person reads it."""
        return "dtype not evident" if self is Direction.UNCLEAR else self.value.replace("_", " ")


class Status(StrEnum):
    """What became of a cast."""

    OPEN = "open"
    EXEMPT = "exempt"
    FIXED = "fixed"
    FREE = "free"


def arrow(source: str, target: str) -> str:
    """``BF16 → FP32``; what a dtype is not known is a question mark, what a quantiser makes its own affair."""
    short = []
    for dtype in (source, target):
        name = dtype.replace("bfloat", "BF").replace("float8_e", "E").replace("float", "FP")
        short.append(name.removesuffix("fn").upper())
    return f"{short[0] or '?'} → {short[1] or 'quantised'}"


@dataclass(frozen=True, kw_only=True)
class Cast:
    """One cast.

    Attributes
    ----------
    file, line, end_line : where it is written.
    text : its source in short.
    direction : which half of the rule; of a free one, what its dtypes say.
    source, target : dtypes; "" where the tree does not tell.
    producer : what wrote the operand, or gave it; None if that is not known.
    consumer : what reads the result next, or the narrowing that the wide result waits for.
    status, reason : open (why, if the producer alone does not say), exempt (its marker's reason), fixed (by which
        rung), free (why).
    column : where its source ends, which tells casts of one line apart.
    """

    file: str
    line: int
    end_line: int
    text: str
    direction: Direction
    source: str
    target: str
    producer: Place | None
    consumer: Place | None
    status: Status = Status.OPEN
    reason: str = ""
    column: int = 0

    @property
    def key(self) -> tuple[str, int, int]:
        """Where its source ends: the same for the sweep and for a trace."""
        return self.file, self.end_line, self.column

    @property
    def bytes_now(self) -> float | None:
        """Bytes an element from the producer's store to the consumer's load, as it is."""
        sizes = BYTES.get(self.source), BYTES.get(self.target)
        if None in sizes or self.source == self.target:
            return None
        return 2 * (sizes[0] or 0) + 2 * (sizes[1] or 0)

    @property
    def bytes_fixed(self) -> float | None:
        """The same where the producer emits what the consumer needs."""
        size = BYTES.get(self.target)
        return None if size is None or self.bytes_now is None else 2 * size

    def as_json(self) -> dict[str, Any]:
        """As :mod:`json` takes it."""
        said = asdict(self)
        return said | {"bytes_now": self.bytes_now, "bytes_fixed": self.bytes_fixed}
