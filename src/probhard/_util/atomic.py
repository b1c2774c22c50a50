"""Files on disk: atomic writes, memory maps with reserved space, and free space.

A process that is killed leaves at most a ``.partial`` file, never half a file under its own name. The next writer of
the same file removes it. Memory maps lie in files without a name, which the system removes with the process.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from probhard.errors import ParameterError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".partial"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file atomically: yields a temporary path that replaces ``path`` on success and is removed on failure.

    Args:
        path: The file to write or replace.
    """
    remove_stale(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}{SUFFIX}")
    try:
        with partial.open("ab") as held:
            _lock(held)
            yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replacing_parts(path: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Write a folder of several files: yields a folder whose entries replace those of ``path`` on success.

    Args:
        path: The folder, which is made if need be; entries of other names stay.
        parts: Names of all entries that it may have. The last one marks a complete folder: it is removed first and
            put in place last.
    """
    new = path / f".new{SUFFIX}"
    shutil.rmtree(new, ignore_errors=True)  # of a killed writer
    new.mkdir(parents=True)
    try:
        yield new
        for part in reversed(parts):
            (shutil.rmtree if (path / part).is_dir() else _unlink)(path / part)
        for part in parts:
            if (new / part).exists():
                (new / part).rename(path / part)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write text in UTF-8 atomically."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_figure(path: Path, figure: Any) -> None:
    """Write a figure of matplotlib atomically, in the format of the path's suffix."""
    with replacing(path) as partial:
        figure.savefig(partial, format=path.suffix[1:])


def remove_stale(path: Path) -> None:
    """Remove what killed writers of a file left behind; those at work hold a lock."""
    for partial in path.parent.glob(f"{_escaped(path.name)}.*{SUFFIX}"):
        with suppress(OSError), partial.open("rb") as file:
            if _lock(file):
                partial.unlink()


def reserved_map(folder: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Make a memory map of float64 zeros whose space on disk is reserved, so that no write can fail later.

    Args:
        folder: Folder on the disk to use; no file appears in it.
        shape: Shape of the array.

    Raises:
        OSError: The disk has too little space.
    """
    size = 8 * math.prod(shape)
    if not size:
        return np.zeros(shape)
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        return np.memmap(file, np.float64, "r+" if hasattr(os, "posix_fallocate") else "w+", shape=shape)


def check_space(folder: Path, size: float, what: str, fix: str) -> None:
    """Check that a disk has room, before any work is done.

    Args:
        folder: Folder of the files, which need not exist yet.
        size: Bytes that will be written.
        what: What will be written, for the error.
        fix: What the user can do.

    Raises:
        ParameterError: There is too little space.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ParameterError(
            f"{what} would take about {size / 1e6:,.3g} MB on disk, and {folder} has {free / 1e6:,.3g} MB left.",
            "The results would be lost after all the work.",
            fix,
        )


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


def _lock(file: BinaryIO) -> bool:
    """Lock an open file until it is closed; False if another process holds it, or nothing is known."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _escaped(name: str) -> str:
    """A file name for use in a glob pattern."""
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in name)
