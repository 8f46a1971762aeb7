"""Datasets and attributes past h5py's own layer, which takes ten times what HDF5 does for a small one.

What is written is what h5py would write, and any reader of HDF5 reads it. Needs h5py and numpy only.
"""

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5p, h5s, h5t


def read(file: h5py.File, path: str) -> np.ndarray:
    """Read a whole dataset of a file.

    Returns
    -------
    array of the dataset's shape and dtype

    Raises
    ------
    KeyError
        There is none of that name.
    """
    dataset = h5d.open(file.id, path.encode())
    out = np.empty(dataset.shape, dataset.dtype)
    if out.size:
        dataset.read(h5s.ALL, h5s.ALL, out)
    return out


def names(file: h5py.File, group: str) -> list[str]:
    """Names in a group of a file, none if there is no such group."""
    found: list[bytes] = []
    if group in file:
        opened = h5g.open(file.id, group.encode())  # its links do not keep it open
        opened.links.iterate(found.append)
    return [name.decode() for name in found]


def numbers(dataset: h5d.DatasetID) -> dict[str, np.ndarray]:
    """Attributes of a dataset that are numbers or arrays of them, each as it was stored; () is a number's shape."""
    found = {}
    for index in range(h5a.get_num_attrs(dataset)):
        attr = h5a.open(dataset, index=index)
        if attr.dtype.kind != "O":  # not a string
            out = np.empty(attr.shape, attr.dtype)
            attr.read(out)
            found[attr.name.decode()] = out
    return found


def write(group: h5py.Group, name: str, values: np.ndarray, *, packed: bool = False) -> h5d.DatasetID:
    """Write a contiguous array of numbers as a dataset of ``group``.

    Parameters
    ----------
    values : of any shape and numeric dtype, in C order; none may be 0 along an axis if packed.
    packed : bytes of equal weight together, then deflate, without loss; else as it is.

    Raises
    ------
    ValueError
        There is something of that name.
    """
    made = h5p.create(h5p.DATASET_CREATE)
    made.set_obj_track_times(False)  # a dump written twice is the same bytes
    if packed:
        made.set_chunk(values.shape)
        made.set_shuffle()
        made.set_deflate(1)
    space = h5s.create_simple(values.shape)
    dataset = h5d.create(group.id, name.encode(), h5t.py_create(values.dtype), space, made)
    if values.size:
        dataset.write(h5s.ALL, h5s.ALL, values)
    return dataset


def set_number(dataset: h5d.DatasetID, name: str, value: np.ndarray) -> None:
    """Give a new dataset an attribute: a number, or an array of them."""
    space = h5s.create_simple(value.shape) if value.ndim else h5s.create(h5s.SCALAR)
    h5a.create(dataset, name.encode(), h5t.py_create(value.dtype), space).write(value)


def set_text(dataset: h5d.DatasetID, name: str, text: str) -> None:
    """Give a new dataset an attribute that is a string."""
    kind = h5t.string_dtype()
    attr = h5a.create(dataset, name.encode(), h5t.py_create(kind, logical=True), h5s.create(h5s.SCALAR))
    attr.write(np.array(text, dtype=kind), mtype=h5t.py_create(kind))
