"""What an expression may be, as far as dtypes go: tensors with the places that made them, dtypes, groups of these."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from dsv4.casts.dtypes import INT, UNKNOWN, promoted

MOST = 8  # ways a value may have come about; more are not told apart


@dataclass(frozen=True, order=True)
class Place:
    """A line of a file, and what stands there in short."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, order=True)
class Way:
    """One way in which a tensor may have come about.

    Attributes
    ----------
    dtype : "" where the tree does not tell.
    place : what wrote it to memory, or what gave it.
    made : written by an operation that was seen; not a parameter, an attribute or a global.
    """

    dtype: str
    place: Place | None = None
    made: bool = True


@dataclass(frozen=True)
class Tensor:
    """A tensor, by all ways in which it may have come about."""

    ways: frozenset[Way]

    @property
    def dtypes(self) -> frozenset[str]:
        """Dtypes that it may have."""
        return frozenset(way.dtype for way in self.ways)


@dataclass(frozen=True)
class Dtype:
    """A dtype as a value, one of these."""

    names: frozenset[str]


@dataclass(frozen=True)
class Scalar:
    """A Python number, string or None: it changes no tensor's dtype."""

    value: object = None


@dataclass(frozen=True)
class Group:
    """A tuple or list."""

    items: tuple["Value", ...]


@dataclass(frozen=True)
class Record:
    """A dict with string keys."""

    items: tuple[tuple[str, "Value"], ...]


@dataclass(frozen=True)
class Instance:
    """An object of a class of the tree: its file and name."""

    file: str
    name: str


Value = Tensor | Dtype | Scalar | Group | Record | Instance | None  # None: nothing is known


def tensor(dtype: str, place: Place | None, *, made: bool = True) -> Tensor:
    """A tensor that came about in one way."""
    return Tensor(frozenset({Way(dtype, place, made)}))


def of_dtype(dtype: Dtype, place: Place | None, *, made: bool = True) -> Tensor:
    """A tensor of one of some dtypes."""
    return Tensor(frozenset(Way(name, place, made) for name in dtype.names))


def ways_of(value: Value) -> frozenset[Way]:
    """Ways of a tensor, of all members of a group; one unknown way of what is not known."""
    if isinstance(value, Tensor):
        return value.ways
    if isinstance(value, Group) and value.items:
        return frozenset().union(*(ways_of(item) for item in value.items))
    return frozenset() if isinstance(value, Scalar | Dtype) else frozenset({Way(UNKNOWN, None, False)})


def joined(values: Iterable[Value]) -> Value:
    """What is one of ``values``; a way that is not known stays one of a tensor's ways."""
    found = list(dict.fromkeys(values))
    if len(found) < 2:
        return found[0] if found else None
    found = [value for value in found if not isinstance(value, Scalar)] or found
    if len(found) == 1:
        return found[0]
    if all(isinstance(value, Dtype) for value in found):
        return Dtype(frozenset().union(*(value.names for value in found if isinstance(value, Dtype))))
    if all(isinstance(value, Group) for value in found):
        groups = [value.items for value in found if isinstance(value, Group)]
        if len({len(items) for items in groups}) == 1:
            return Group(tuple(joined(column) for column in zip(*groups, strict=True)))
    if all(isinstance(value, Record) for value in found):
        keys = dict.fromkeys(key for value in found if isinstance(value, Record) for key, _ in value.items)
        parts = [dict(value.items) for value in found if isinstance(value, Record)]
        return Record(tuple((key, joined([part[key] for part in parts if key in part])) for key in keys))
    if any(isinstance(value, Tensor) for value in found):
        ways = frozenset().union(*(ways_of(value) for value in found))
        return Tensor(frozenset(sorted(ways, key=repr)[:MOST]))
    return None


def combined(values: Iterable[Value], place: Place) -> Value:
    """Result of an operation on ``values``, written at ``place`` in the dtype that torch promotes them to."""
    sets = [frozenset(way.dtype for way in ways_of(value)) for value in values]
    sets = [dtypes for dtypes in sets if dtypes]
    if not sets:
        return Scalar()
    if not any(any(dtypes - {UNKNOWN}) for dtypes in sets):
        return None
    found = {promoted(choice) for choice in product(*sets)} if len(sets) < 5 else {UNKNOWN}
    return Tensor(frozenset(Way(name, place) for name in found))


def in_one_dtype(values: Iterable[Value], place: Place) -> Value:
    """Result of an operation whose operands must have one dtype: what is known of any of them."""
    for value in values:
        names = frozenset(way.dtype for way in ways_of(value)) - {UNKNOWN, INT}
        if names:
            return Tensor(frozenset(Way(name, place) for name in names))
    return None


def member(value: Value) -> Value:
    """What one gets by indexing or iterating."""
    if isinstance(value, Group):
        return joined(value.items)
    return value if isinstance(value, Tensor) else None
