"""Files of gridded fields: ``.npz``, ``.zarr`` and HDF5 are read, ``.npz`` is written."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from probhard._util.atomic import replacing
from probhard.errors import ParameterError, optional
from probhard.io.cells import Cells

__all__ = ["FORMATS", "Cells", "read_fields", "write_npz"]

FORMATS = (".npz", ".zarr", ".h5", ".hdf5")


def read_fields(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of an ``.npz``, ``.zarr`` or HDF5 file; pickled objects are never loaded.

    Args:
        path: Path of the file.

    Returns:
        Arrays in float64 by name.

    Raises:
        ParameterError: The file is missing, damaged, or holds anything but real numbers.
        MissingExtraError: The library for its format is not installed.
    """
    suffix = path.suffix.lower()
    if suffix not in FORMATS or not path.exists():
        raise ParameterError(
            f"There is no file {path}." if suffix in FORMATS else f"{path} does not end in {', '.join(FORMATS)}.",
            "Fields are read from these formats.",
            "Check the path, or save them with numpy.savez; docs/files.md has the names of the arrays.",
        )
    read = {".npz": _read_npz, ".zarr": _read_zarr}.get(suffix, _read_hdf5)
    try:
        return {name: _real(path, name, array) for name, array in read(path)}
    except (ValueError, EOFError, OSError, KeyError, zipfile.BadZipFile) as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(
            f"{path} cannot be read ({error}).",
            "It must hold plain numeric arrays; pickled objects are never loaded.",
            "Save numbers only, for instance with numpy.savez(path, mean=mean.astype(float)).",
        ) from error


def _read_npz(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    if not zipfile.is_zipfile(path):
        raise ValueError("not an .npz archive")
    with np.load(path, allow_pickle=False) as archive:
        for name in archive.files:
            yield name, archive[name]


def _read_zarr(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    group = optional("zarr", "fields", "Reading this file").open_group(str(path), mode="r")
    for name, array in group.arrays():
        if "pickle" in str(array.metadata.to_dict()).lower():
            raise ValueError(f"the array {name!r} is stored as pickled objects")
        yield name, array[...]


def _read_hdf5(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    library = optional("h5py", "fields", "Reading this file")
    with library.File(path, "r") as file:
        for name, array in file.items():
            if isinstance(array, library.Dataset):
                yield name, array[...]


def _real(path: Path, name: str, array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.kind not in "biuf":
        raise ParameterError(
            f"The array {name!r} of {path} holds {array.dtype}.",
            "Fields are real numbers.",
            "Leave it out, or save numbers; of complex ones, real and imaginary parts as two arrays.",
        )
    return array.astype(np.float64)


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name to an ``.npz`` file, atomically; memory maps are streamed."""
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez(file, **dict(arrays))  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
