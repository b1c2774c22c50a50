"""Free memory, and settings of glibc's allocator that keep freed memory in the process.

By default glibc returns large freed blocks to the kernel and asks for new ones. On a CPU a training step can spend half
of its time on page faults. The command and its worker processes keep freed memory. In Python, call ``keep_freed()``.
"""

from __future__ import annotations

import ctypes
import os
import platform

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
    """Bytes of memory that a new allocation may take; None where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None
