"""Read dumps; see :mod:`dsv4.dump` for what they hold."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np

from dsv4 import hdf5
from dsv4.stored import DumpError, content_sha256, file_sha256, from_bf16_bits, sidecar
from dsv4.taps import BY_NAME, MODEL, MODES

SCHEMA = 1
KINDS = ("reference", "plain", "variant", "floor")
DTYPES = {"f32": np.float32, "bf16": np.uint16, "u8": np.uint8, "i32": np.int32}
LINKS = "links"  # attribute of a layer's group: content hash and attributes of each linked tap, JSON
REQUIRED = ("kind", "variant", "plan", "checkpoint", "prompt", "prompt_id", "compress_ratios")
_NAMES = {np.dtype(stored): name for name, stored in DTYPES.items()}


class DumpReader:
    """Read one dump after checking its hash, schema and identity.

    Parameters
    ----------
    path : the dump.
    expect : file attributes that must have these values, e.g. ``checkpoint`` and ``prompt``.
    verify : check the whole-file hash.
    keep : keep in memory what was read, for readers that come back to it.
    beside : dumps that are open already; what this one links to in them is read through them.

    Raises
    ------
    DumpError
        Missing, truncated, changed since it was written, another schema, or another identity.
    """

    def __init__(
        self,
        path: Path,
        expect: Mapping[str, Any] | None = None,
        *,
        verify: bool = True,
        keep: bool = False,
        beside: Sequence["DumpReader"] = (),
    ) -> None:
        self.path, self._keep = Path(path), keep
        self._groups: dict[str, frozenset[str]] = {}
        self._rows: dict[str, np.ndarray] = {}
        self._kept: dict[str, np.ndarray] = {}
        self._notes: dict[str, dict[str, Any]] = {}
        self._sources: dict[str, tuple[Path, str]] = {}
        self._targets: dict[bytes, Path] = {}  # what links name -> one Path a file
        self._absolutes: dict[Path, str] = {}
        self._linked: dict[Path, h5py.File] = {}
        self._beside = {other._absolute(other.path): other for other in beside}
        if verify:
            self._verify()
        self._file = _opened(self.path)
        self.attrs = {name: _decode(value) for name, value in self._file.attrs.items()}
        wanted = {"schema": SCHEMA, **(expect or {})}
        for name, value in wanted.items():
            if self.attrs.get(name) != value:
                self._file.close()
                raise DumpError(
                    f"{path}: {name} is {self.attrs.get(name)!r}, expected {value!r}; this dump belongs to another run:"
                    " delete it and run again, or point --results at its own folder"
                )

    def _verify(self) -> None:
        note = sidecar(self.path)
        if not self.path.exists():
            raise DumpError(f"{self.path}: no such dump; the stage that writes it has not finished")
        if not note.exists():
            raise DumpError(
                f"{self.path}: {note.name} is missing, the write was cut short; delete the dump and run again"
            )
        stated, found = (note.read_text().split() or [""])[0], file_sha256(self.path)
        if stated != found:
            raise DumpError(
                f"{self.path}: SHA-256 is {found[:12]}…, {note.name} says {stated[:12] or 'nothing'}…;"
                " truncated or changed since it was written: delete both and run again"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close this file and those it links to."""
        for file in self._linked.values():
            file.close()
        self._file.close()

    def mode(self, mode: str) -> str:
        """Name of the group that answers for ``mode``: the reference has one set of values."""
        return "compounded" if self.attrs["kind"] == "reference" and mode in MODES else mode

    def _names(self, group: str) -> frozenset[str]:
        """Names in a group, none if there is no such group; listed once (HDF5 lists slowly)."""
        if group not in self._groups:
            self._groups[group] = frozenset(hdf5.names(self._file, group))
        return self._groups[group]

    def _positions(self, name: str) -> np.ndarray:
        if name not in self._rows:
            group, dataset = name.rsplit("/", 1)
            here = dataset in self._names(group)
            self._rows[name] = hdf5.read(self._file, name) if here else np.empty(0, np.int64)
        return self._rows[name]

    def rows(self, mode: str, phase: str) -> np.ndarray:
        """Token positions of the rows, int64; empty where the phase was not run."""
        return self._positions(f"{self.mode(mode)}/{phase}/positions")

    def layers(self, mode: str, phase: str) -> list[int | str]:
        """Layer numbers in order, then ``"model"`` if it has taps."""
        names = [name for name in self._names(f"{self.mode(mode)}/{phase}") if name != "positions"]
        return [*sorted(int(name) for name in names if name != MODEL), *([MODEL] if MODEL in names else [])]

    def taps(self, mode: str, phase: str, layer: int | str) -> list[str]:
        """Names of the taps that a layer's group holds, in the order of the model."""
        names = self._names(f"{self.mode(mode)}/{phase}/{layer}")
        return [tap for tap in BY_NAME if tap in names]

    def has(self, mode: str, phase: str, layer: int | str, tap: str) -> bool:
        """Whether the tap was dumped."""
        return tap in self._names(f"{self.mode(mode)}/{phase}/{layer}")

    def raw(self, mode: str, phase: str, layer: int | str, tap: str) -> np.ndarray:
        """One tap as stored: BF16 as uint16."""
        where = f"{self.mode(mode)}/{phase}/{layer}/{tap}"
        if f"/{where}" in self._kept:
            return self._kept[f"/{where}"]
        if not self.has(mode, phase, layer, tap):
            raise DumpError(f"{self.path}: no {where}; {self.attrs['variant']} did not dump it")
        source, path = self.source(mode, phase, layer, tap)
        if source is self.path:
            return self._own(path)
        found = self._through(source, path, where)
        if self._keep:
            self._kept[f"/{where}"] = found
        return found

    def _own(self, path: str) -> np.ndarray:
        """Dataset of this very file."""
        if path in self._kept:
            return self._kept[path]
        found = hdf5.read(self._file, path)
        if self._keep:
            self._kept[path] = found
        return found

    def _through(self, source: Path, path: str, where: str) -> np.ndarray:
        """Dataset that a link names, if it still holds what it held when the link was made."""
        beside = self._beside.get(self._absolute(source))
        try:
            found = beside._own(path) if beside else hdf5.read(self._follow(source), path)
        except KeyError:
            found = None
        if found is None or content_sha256(found) != self._link_note(where)["sha256"]:
            raise DumpError(
                f"{self.path}: {where} is a link to {source}, which was rewritten with other values;"
                f" delete {self.path.name} and run again"
            )
        return found

    def get(self, mode: str, phase: str, layer: int | str, tap: str) -> np.ndarray:
        """One tap as float32, int32 or uint8."""
        return widened(self.raw(mode, phase, layer, tap))

    def entry_positions(self, mode: str, phase: str, layer: int | str) -> np.ndarray:
        """Token positions at which the layer's compressed entries closed, int64."""
        return self._positions(f"{self.mode(mode)}/{phase}/{layer}/entry_positions")

    def dataset_attrs(self, mode: str, phase: str, layer: int | str, tap: str) -> dict[str, Any]:
        """Attributes of one tap: ``dtype`` and what the writer added."""
        source, path = self.source(mode, phase, layer, tap)
        file = self._file if source is self.path else self._follow(source)
        dataset = h5py.h5d.open(file.id, path.encode())
        dtype = {"dtype": _NAMES[dataset.dtype]}
        if source is self.path:
            return hdf5.numbers(dataset) | dtype
        note = self._link_note(f"{self.mode(mode)}/{phase}/{layer}/{tap}")
        return {key: np.asarray(value) for key, value in note["attrs"].items()} | dtype

    def source(self, mode: str, phase: str, layer: int | str, tap: str) -> tuple[Path, str]:
        """File and dataset that hold a tap's bytes: this dump's own, or the one it links to."""
        where = f"{self.mode(mode)}/{phase}/{layer}/{tap}"
        if where not in self._sources:  # every comparison asks for it
            self._sources[where] = self._found(where)
        return self._sources[where]

    def _found(self, where: str) -> tuple[Path, str]:
        links, name = self._file.id.links, where.encode()
        if links.get_info(name).type != h5py.h5l.TYPE_EXTERNAL:
            return self.path, f"/{where}"
        file, dataset = links.get_val(name)
        if file not in self._targets:
            self._targets[file] = self.path.parent / os.fsdecode(file)
        return self._targets[file], dataset.decode()

    def shares(self, other: "DumpReader", mode: str, phase: str, layer: int | str, tap: str) -> bool:
        """Whether both dumps take this tap from one dataset of one file."""
        ours, theirs = (reader.source(mode, phase, layer, tap) for reader in (self, other))
        return ours[1] == theirs[1] and self._absolute(ours[0]) == other._absolute(theirs[0])

    def _absolute(self, path: Path) -> str:
        """Absolute path without ``..``, by its text alone: asking the file system costs more than the read."""
        if path not in self._absolutes:
            self._absolutes[path] = os.path.normpath(Path.cwd() / path)
        return self._absolutes[path]

    def _link_note(self, where: str) -> dict[str, Any]:
        group, tap = where.rsplit("/", 1)
        if group not in self._notes:
            self._notes[group] = json.loads(str(self._file[group].attrs[LINKS]))
        return self._notes[group][tap]

    def _follow(self, target: Path) -> h5py.File:
        """Linked file; of its attributes nothing is asked, since the link says what it must hold."""
        if target not in self._linked:
            if not target.exists():
                raise DumpError(
                    f"{self.path}: links to {target}, which is gone; delete {self.path.name} and run again"
                )
            self._linked[target] = _opened(target)
        return self._linked[target]


def _opened(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise DumpError(f"{path}: not a readable HDF5 file ({error}); delete it and run again") from error


def widened(stored: np.ndarray) -> np.ndarray:
    """A tap's values: BF16 bits as float32, all else as it is stored."""
    return from_bf16_bits(stored) if stored.dtype == np.uint16 else stored


def _decode(value: object) -> Any:
    """Undo :meth:`DumpWriter.attr`: JSON objects and lists come back as such."""
    if isinstance(value, str) and value[:1] in "{[" and value:
        return json.loads(value)
    return value.item() if isinstance(value, np.generic) else value
