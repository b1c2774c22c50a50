"""Readers of arrays in ``.npz``, ``.zarr`` and HDF5 files, safe against files that are not what they seem.

The declared size of every array is compared with the free memory before anything is allocated. Pickled objects, links
to other files and encrypted archives are rejected.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from probhard._util.memory import available
from probhard.errors import optional

SHARE = 0.5  # of the free memory that the arrays of a file may take in float64
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

Arrays = Iterator[tuple[str, np.ndarray]]


class Budget:
    """The memory that the arrays of one file may take."""

    def __init__(self) -> None:
        free = available()
        self.allowed = None if free is None else SHARE * free
        self.taken = 0.0

    def take(self, name: str, shape: tuple[int, ...]) -> None:
        """Count an array of this shape in float64.

        Raises:
            ValueError: It does not fit into the memory.
        """
        self.taken += 8.0 * math.prod(shape)
        if self.allowed is not None and self.taken > self.allowed:
            raise ValueError(
                f"the array {name!r} of shape {shape} brings the arrays to {self.taken / 1e9:.3g} GB of memory, more "
                f"than {SHARE:.0%} of what is free"
            )


def read_npz(path: Path) -> Arrays:
    """Yield the arrays of an archive of ``.npy`` files.

    Raises:
        ValueError: It is no such archive, or an array is pickled, encrypted, too large or declared with another size.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError("not an .npz archive")
    budget = Budget()
    with zipfile.ZipFile(path) as archive:
        if len(set(archive.namelist())) < len(archive.namelist()):
            raise ValueError("two arrays have one name")
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            if entry.flag_bits & 1:
                raise ValueError(f"the array {name!r} is encrypted")
            if entry.compress_type not in COMPRESSIONS:
                raise ValueError(f"the array {name!r} has the unknown compression {entry.compress_type}")
            with archive.open(entry) as stream:
                shape, bytes_each, header = _header(name, stream)
            budget.take(name, shape)
            if header + math.prod(shape) * bytes_each != entry.file_size:
                raise ValueError(f"the array {name!r} declares the shape {shape}, but has {entry.file_size} bytes")
            with archive.open(entry) as stream:
                yield name, np.lib.format.read_array(stream, allow_pickle=False)


def read_zarr(path: Path) -> Arrays:
    """Yield the arrays of a zarr group.

    Raises:
        ValueError: An array is pickled or too large.
    """
    group, budget = optional("zarr", "fields", "Reading this file").open_group(str(path), mode="r"), Budget()
    for name, array in group.arrays():
        if "pickle" in str(array.metadata.to_dict()).lower():
            raise ValueError(f"the array {name!r} is stored as pickled objects")
        budget.take(name, tuple(array.shape))
        if math.prod(array.chunks) > max(1, math.prod(array.shape)) * 2 ** len(array.shape):
            raise ValueError(f"the array {name!r} of shape {array.shape} has chunks of shape {array.chunks}")
        yield name, array[...]


def read_hdf5(path: Path) -> Arrays:
    """Yield the data sets at the root of an HDF5 file.

    Raises:
        ValueError: A data set lies in another file, or is too large.
    """
    library, budget = optional("h5py", "fields", "Reading this file"), Budget()
    with library.File(path, "r") as file:
        for name in file:
            link = file.get(name, getlink=True)
            if isinstance(link, library.ExternalLink):
                raise ValueError(f"{name!r} is a link to the file {link.filename!r}")
            array = file[name]
            if not isinstance(array, library.Dataset):
                continue
            if array.external or array.is_virtual:
                raise ValueError(f"the data of {name!r} lie in another file")
            if array.shape is None:
                raise ValueError(f"the array {name!r} is empty")
            budget.take(name, tuple(array.shape))
            yield name, array[...]


def _header(name: str, stream: Any) -> tuple[tuple[int, ...], int, int]:
    """Shape, bytes of an element and length of the header of a ``.npy`` file."""
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"the array {name!r} has the unknown format version {version}")
    shape, _, dtype = readers[version](stream)
    if dtype.hasobject:
        raise ValueError(f"the array {name!r} holds pickled objects")
    return shape, dtype.itemsize, stream.tell()
