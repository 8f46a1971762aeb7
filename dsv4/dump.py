"""Dumps: what one run of one prompt computed, as one HDF5 file and its SHA-256 beside it.

Layout: ``/<mode>/<phase>/<layer number | model>/<tap>``, axis 0 a row (token) or a compressed
entry; ``/<mode>/<phase>/positions`` holds the rows' token positions, ``entry_positions`` in a
layer's group the position at which each entry closed. BF16 is stored as its bits (uint16).
Large datasets are packed: one in fifty, which saves what packing all of them would.

A file appears whole or not at all: it is written under a unique temporary name, fsynced and
renamed, then its hash is. A dataset whose bytes a parent's dump already holds becomes an
external link to it; the link's own content hash is kept, so a parent that was rewritten
differently is refused, not silently read. Needs h5py and numpy only.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import h5py
import numpy as np

from dsv4 import hdf5
from dsv4.dump_reader import DTYPES, KINDS, LINKS, REQUIRED, SCHEMA, DumpReader
from dsv4.files import cannot_write, remove_stale, temporary_name
from dsv4.stored import (
    DumpError,
    content_sha256,
    file_sha256,
    from_bf16_bits,
    publish,
    same_bytes,
    sidecar,
    to_bf16_bits,
)
from dsv4.taps import BY_NAME, HISTORY, MODES, PHASES

__all__ = [
    "KINDS",
    "REQUIRED",
    "SCHEMA",
    "DumpError",
    "DumpReader",
    "DumpWriter",
    "file_sha256",
    "from_bf16_bits",
    "sidecar",
    "to_bf16_bits",
]


def _stored(array: np.ndarray, dtype: str, where: str) -> np.ndarray:
    """Bring ``array`` to what the file holds for ``dtype``, refusing every lossy step."""
    if dtype not in DTYPES:
        raise ValueError(f"{where}: dtype {dtype!r}; allowed: {', '.join(DTYPES)}")
    array = np.asarray(array)
    if dtype == "bf16" and array.dtype == np.float32:
        try:
            return to_bf16_bits(array)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if dtype == "i32" and array.dtype == np.int64 and np.array_equal(array, array.astype(np.int32)):
        return array.astype(np.int32)
    if array.dtype != DTYPES[dtype]:
        raise ValueError(f"{where}: {array.dtype} array for dtype {dtype!r}; convert it where it is made")
    return np.ascontiguousarray(array)


PACK_FROM = 65536  # bytes; packing a smaller one takes five times its write and saves next to nothing


class DumpWriter:
    """Write one dump; use as a context manager.

    Parameters
    ----------
    path : final name; its folder is made.
    attrs : file attributes; :data:`REQUIRED` must be among them. Mappings and lists go in as JSON.
    parent : dumps whose equal datasets are linked to instead of stored again; a reader of one is used, and left open.

    Raises
    ------
    DumpError
        The folder cannot be written or the disk is full; nothing is left behind.
    """

    required: ClassVar[Sequence[str]] = REQUIRED
    kinds: ClassVar[Sequence[str]] = KINDS

    def __init__(
        self,
        path: Path,
        attrs: Mapping[str, Any],
        parent: Path | DumpReader | Sequence[Path | DumpReader] | None = None,
    ) -> None:
        missing = [name for name in self.required if name not in attrs]
        if missing:
            raise ValueError(f"{path}: attributes missing: {', '.join(missing)}")
        if attrs["kind"] not in self.kinds:
            raise ValueError(f"{path}: kind {attrs['kind']!r}; allowed: {', '.join(self.kinds)}")
        self._path = Path(path)
        self._parents = [parent] if isinstance(parent, str | Path | DumpReader) else list(parent or ())
        self._attrs = {"schema": SCHEMA, **attrs}
        self._rows: dict[tuple[str, str], int] = {}
        self._groups: dict[str, h5py.Group] = {}  # of layers; h5py looks for one longer than it writes a tap
        self._entries: dict[str, np.ndarray] = {}  # group -> its entry_positions
        self._targets: dict[Path, str] = {}  # linked file -> its name in links, resolved once
        self._notes: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        self._opened = ExitStack()
        self._readers = [
            parent if isinstance(parent, DumpReader) else self._opened.enter_context(DumpReader(parent))
            for parent in self._parents
        ]
        self._temporary = temporary_name(self._path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(self._path)
            self._file = h5py.File(self._temporary, "w", libver=("v110", "v110"))
        except OSError as error:
            raise DumpError(cannot_write(self._path, error)) from error
        for name, value in self._attrs.items():
            self.attr(name, value)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for group, notes in self._notes.items():
                self._file[group].attrs[LINKS] = json.dumps(notes)
            self._file.close()
            self._opened.close()
            if kind is None:
                publish(self._temporary, self._path)
        except OSError as error:
            raise DumpError(cannot_write(self._path, error)) from error
        finally:
            self._temporary.unlink(missing_ok=True)

    def attr(self, name: str, value: Any) -> None:
        """Set a file attribute, also late: what only the end of a run knows."""
        self._file.attrs[name] = value if isinstance(value, str | int | float | bool) else json.dumps(value)

    def rows(self, mode: str, phase: str, positions: np.ndarray) -> None:
        """State the token positions of the rows of a phase, before its taps."""
        if mode not in (*MODES, HISTORY) or phase not in PHASES:
            raise ValueError(
                f"{self._path}: {mode}/{phase}; modes: {', '.join(MODES)}; phases: {', '.join(PHASES)}"
            )
        self._file.create_dataset(f"{mode}/{phase}/positions", data=np.asarray(positions, np.int64))
        self._rows[mode, phase] = len(positions)

    def put(
        self,
        mode: str,
        phase: str,
        layer: int | str,
        tap: str,
        array: np.ndarray,
        dtype: str,
        entry_positions: np.ndarray | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        """Store one tap.

        Parameters
        ----------
        layer : layer number, or ``"model"``.
        array : axis 0 counts the rows of :meth:`rows`, or the entries of ``entry_positions``.
        dtype : ``f32``, ``bf16`` (float32 that BF16 holds exactly, or its bits), ``u8``, ``i32``.
        attrs : attributes of this dataset (numbers, arrays, JSON).

        Raises
        ------
        ValueError
            Unknown tap, another number of rows, a lossy conversion; names the dataset.
        """
        where = f"{mode}/{phase}/{layer}/{tap}"
        if tap not in BY_NAME:
            raise ValueError(f"{where}: no such tap; taps: {', '.join(BY_NAME)}")
        if (mode, phase) not in self._rows:
            raise ValueError(f"{where}: rows({mode!r}, {phase!r}, positions) comes first")
        stored = _stored(array, dtype, where)
        self._count(where, mode, phase, tap, len(stored), entry_positions)
        for reader in self._readers:
            if reader.has(mode, phase, layer, tap) and same_bytes(
                reader.raw(mode, phase, layer, tap), stored
            ):
                self._link(reader.source(mode, phase, layer, tap), where, stored, attrs)
                return
        dataset = hdf5.write(self._group(where), tap, stored, packed=stored.nbytes >= PACK_FROM)
        hdf5.set_text(dataset, "dtype", dtype)
        for name, value in (attrs or {}).items():
            hdf5.set_number(dataset, name, np.asarray(value))

    def _group(self, where: str) -> h5py.Group:
        """Group of a dataset, made if there is none."""
        name = where.rsplit("/", 1)[0]
        if name not in self._groups:
            self._groups[name] = self._file.require_group(name)
        return self._groups[name]

    def _count(
        self, where: str, mode: str, phase: str, tap: str, rows: int, entry_positions: np.ndarray | None
    ) -> None:
        expected = self._rows[mode, phase]
        if BY_NAME[tap].axis == "entry":
            if entry_positions is None:
                raise ValueError(f"{where}: entry_positions are needed, axis 0 counts entries")
            expected, group = len(entry_positions), where.rsplit("/", 1)[0]
            if group not in self._entries:
                self._entries[group] = np.array(entry_positions, np.int64)
                self._file.create_dataset(f"{group}/entry_positions", data=self._entries[group])
            elif not np.array_equal(self._entries[group], entry_positions):
                raise ValueError(
                    f"{where}: entry_positions differ from those of an earlier tap of this layer"
                )
        if rows != expected:
            raise ValueError(f"{where}: {rows} on axis 0, {expected} positions were stated")

    def _link(
        self, source: tuple[Path, str], where: str, stored: np.ndarray, attrs: Mapping[str, Any] | None
    ) -> None:
        group, tap = where.rsplit("/", 1)
        if source[0] not in self._targets:
            here = self._path.parent.resolve()
            self._targets[source[0]] = os.path.relpath(source[0].resolve(), here)
        self._group(where)[tap] = h5py.ExternalLink(self._targets[source[0]], source[1])
        extra = {name: np.asarray(value).tolist() for name, value in (attrs or {}).items()}
        self._notes.setdefault(group, {})[tap] = {"sha256": content_sha256(stored), "attrs": extra}
