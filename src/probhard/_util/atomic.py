"""Files on disk: atomic writes, and memory maps with reserved space."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file atomically: yields a temporary path that replaces ``path`` on success and is removed on failure.

    Args:
        path: The file to write or replace.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def reserved_map(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Make a memory map of float64 zeros whose space on disk is reserved, so that no write can fail later.

    Raises:
        OSError: The disk has too little space; the file is removed.
    """
    mapped = np.lib.format.open_memmap(path, "w+", np.float64, shape)
    size = path.stat().st_size
    if math.prod(shape) and hasattr(os, "posix_fallocate"):
        try:
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            path.unlink()
            raise
    return mapped
