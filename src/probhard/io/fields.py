"""Files of gridded fields: ``.npz``, ``.zarr`` and HDF5 are read, ``.npz`` is written."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from probhard._util.atomic import replacing
from probhard.errors import MissingExtraError, ParameterError
from probhard.io.arrays import read_hdf5, read_npz, read_zarr
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
    read = {".npz": read_npz, ".zarr": read_zarr}.get(suffix, read_hdf5)
    try:
        return {name: _real(path, name, array) for name, array in read(path)}
    except (ParameterError, MissingExtraError):
        raise
    except Exception as error:  # damaged files make the libraries raise errors of any type
        raise ParameterError(
            f"{path} cannot be read ({error or type(error).__name__}).",
            "It must hold plain numeric arrays; pickled objects are never loaded.",
            "Save numbers only, for instance with numpy.savez(path, mean=mean.astype(float)).",
        ) from error


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
        with zipfile.ZipFile(file, "w", allowZip64=True) as archive:  # numpy.savez takes no array named "file"
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
