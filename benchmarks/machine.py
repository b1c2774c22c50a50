"""The machine under a benchmark: its processors, its load, and the memory of this process.

A figure that the system does not offer is None: the load on Windows, memory growth outside Linux.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")


def processors() -> list[int]:
    """Return the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def load() -> float | None:
    """Return the load average of the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def peak(work: Callable[[], Value]) -> tuple[Value, int | None]:
    """Return the result of a piece of work, and the bytes by which the resident set grew at most (Linux)."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = _resident("VmRSS")
    except (OSError, AttributeError, TypeError, StopIteration):
        return work(), None
    return work(), max(0, _resident("VmHWM") - before)


def largest() -> int | None:
    """Return the largest resident set of this process so far, in bytes."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))
