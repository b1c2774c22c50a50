"""Free memory, and settings of glibc's allocator that keep freed memory in the process.

By default glibc returns large freed blocks to the kernel and asks for new ones. On a CPU a training step can spend half
of its time on page faults. The command and its worker processes keep freed memory. In Python, call ``keep_freed()``.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from probhard.errors import ParameterError

OPTIONS = {  # glibc's variables: number in malloc.h, value
    "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1),
    "MALLOC_TOP_PAD_": (-2, 2**28),
    "MALLOC_MMAP_MAX_": (-4, 0),
}


def environment() -> dict[str, str]:
    """Environment variables for a new process that keeps freed memory; none if the user has set the allocator."""
    chosen = any(name in os.environ for name in (*OPTIONS, "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"))
    return {} if chosen else {name: str(value) for name, (_, value) in OPTIONS.items()}


def keep_freed() -> bool:
    """Keep freed memory in this process from now on.

    Returns:
        False if the allocator is not glibc's, or the user has set it.
    """
    if not environment() or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(number, value) == 1 for number, value in OPTIONS.values())


def available() -> int | None:
    """Bytes of memory that a new allocation may take; None where the system does not tell.

    Limits of the process (``ulimit -v``) and of its container are respected.
    """
    known = [room for room in (_of_machine(), _of_container(), _of_process()) if room is not None]
    return max(0, min(known)) if known else None


def check_memory(size: float, what: str, fix: str) -> None:
    """Check that arrays will fit into memory, before any work is done.

    Args:
        size: Bytes of all arrays at the time when most of them are there.
        what: What takes them, for the error.
        fix: What the user can do.

    Raises:
        ParameterError: There is too little memory.
    """
    free = available()
    if free is not None and size > free:
        raise ParameterError(
            f"{what} would take about {size / 1e9:,.3g} GB of memory, and {free / 1e9:,.3g} GB are free.",
            "The system would end the run when memory is used up.",
            fix,
        )


def _of_machine() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _of_container() -> int | None:
    """What a control group (version 2) leaves; cached files count as free."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit) - int(used) + int(cached.get("inactive_file", 0))
    except (OSError, ValueError):  # no such group, or the limit "max"
        return None


def _of_process() -> int | None:
    """What a limit of the address space leaves."""
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError, ValueError):
        return None
    return None if limit == resource.RLIM_INFINITY else limit - used
