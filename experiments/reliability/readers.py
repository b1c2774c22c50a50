"""Damaged files: valid ones with changed bytes, given to every reader of the library.

A reader may read the file or reject it in three parts. Anything else is a defect: a bare traceback, or memory of more
than ``MOST`` bytes for a file of some kilobytes.
"""

from __future__ import annotations

import contextlib
import io
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reliability.trial import TimeLimitError, limited
from probhard.errors import ProbhardError

MOST, LIMIT = 500_000_000, 20  # bytes, CPU seconds
PIECES = (b"\x00", b"\xff", b"\xff\xff\xff\x7f", b"9" * 30, b"nan", b"-1", b"1e400", b"&a", b"*a", b"[[", b"{", b",")
SPEC = """axes: [time, x]
constraints:
  - conservation: {mass: 1.0, weights: 1}
  - box: {lower: 0.0, upper: 2.5}
  - linear_inequality: {matrix: [[1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]], bound: 3}
"""


@dataclass(frozen=True)
class Reader:
    """A kind of file.

    Args:
        suffix: How its name ends.
        write: Writes a valid file, or folder.
        read: Reads it.
    """

    suffix: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]


def attempt(name: str, number: int, folder: Path) -> dict[str, Any]:
    """Damage a file and read it.

    Args:
        name: A key of ``READERS``.
        number: Seed of the damage.
        folder: An empty folder for the file.

    Returns:
        A record: ``ended`` is ``"read"``, ``"rejected"`` or the name of a defect, ``why`` its traceback.
    """
    reader, random = READERS[name], np.random.default_rng([number, len(name)])
    path = folder / f"f{reader.suffix}"
    reader.write(path)
    files = sorted(x for x in path.rglob("*") if x.is_file()) if path.is_dir() else [path]
    target = files[int(random.integers(len(files)))]
    target.write_bytes(damaged(target.read_bytes(), random))
    started, before = time.process_time(), _memory()
    record: dict[str, Any] = {"ended": "read", "why": None}
    try:
        with limited(LIMIT), warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
            reader.read(path)
    except ProbhardError as error:
        record["ended"] = "rejected" if error.what and error.why and error.fix else "incomplete"
    except TimeLimitError:
        record["ended"] = "slow"
    except Exception as error:
        record |= {"ended": type(error).__name__, "why": traceback.format_exc()[-600:]}
    if _memory() - before > MOST:
        record["ended"] = "memory"
    record["seconds"] = round(time.process_time() - started, 3)
    return record


def damaged(content: bytes, random: np.random.Generator) -> bytes:
    """Bytes with one to four changes: flipped, cut, repeated or replaced by numbers that parsers dislike."""
    data = bytearray(content)
    for _ in range(int(random.integers(1, 5))):
        at = int(random.integers(len(data) + 1))
        to = min(len(data), at + int(random.integers(1, 40)))
        change = int(random.integers(6))
        if change == 0 and at < len(data):
            data[at] ^= 1 << int(random.integers(8))
        elif change == 1:
            del data[at:to]
        elif change == 2:
            data[at:at] = data[at:to]
        elif change == 3:
            data[at:to] = PIECES[int(random.integers(len(PIECES)))]
        elif change == 4:
            data[at:to] = random.bytes(to - at)
        elif random.uniform() < 0.2:
            del data[at:]
    return bytes(data)


def _memory() -> int:
    """Largest memory of this process so far, in bytes; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _arrays() -> dict[str, np.ndarray]:
    return {"mean": np.linspace(0, 1, 24).reshape(2, 4, 3), "stddev": np.ones((2, 4, 3)), "mask": np.ones((4, 3), bool)}


def _fields(path: Path) -> object:
    from probhard.io.fields import read_fields

    return read_fields(path)


def _npz(path: Path) -> None:
    np.savez_compressed(path, **_arrays())


def _zarr(path: Path) -> None:
    import zarr

    group = zarr.open_group(str(path), mode="w")
    for name, array in _arrays().items():
        group.create_array(name, data=array)


def _hdf5(path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in _arrays().items():
            file.create_dataset(name, data=array, compression="gzip")


def _spec(path: Path) -> object:
    from probhard.io.data import Data
    from probhard.io.spec import cells_from, constraint_from, read_spec

    spec, arrays = read_spec(path), _arrays()
    return constraint_from(spec, Data(cells_from(spec, arrays, arrays["mean"].shape), arrays))


def _table(path: Path) -> object:
    from probhard.cli import _frames

    return _frames.read(path, ("unique_id",))


def _frame() -> Any:
    import pandas

    days = pandas.date_range("2024-01-01", periods=12).strftime("%Y-%m-%d")
    return pandas.DataFrame({"unique_id": ["a", "b"] * 6, "ds": days, "y": np.linspace(0, 5, 12), "lo-90": 0.1})


def _parquet(path: Path) -> None:
    from probhard.cli import _frames

    _frames.write(path, _frame())


def _model(path: Path) -> None:
    import torch

    torch.save({"format": "probhard", "version": 1, "method": "base", "state": {"w": torch.ones(3)}}, path)


def _saved(path: Path) -> object:
    from probhard._util.saved import read_model

    return read_model(path, "probhard", 1)


READERS = {
    "npz": Reader(".npz", _npz, _fields),
    "zarr": Reader(".zarr", _zarr, _fields),
    "hdf5": Reader(".h5", _hdf5, _fields),
    "yaml": Reader(".yaml", lambda path: path.write_text(SPEC), _spec),
    "csv": Reader(".csv", lambda path: _frame().to_csv(path, index=False), _table),
    "parquet": Reader(".parquet", _parquet, _table),
    "model": Reader(".pt", _model, _saved),
}
