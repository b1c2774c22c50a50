"""Freed memory that stays with the process.

glibc gives every large block back to the kernel when it is freed and asks for it anew: on a CPU a training step then
spends up to half of its time on fresh pages. The command keeps them, and so do the worker processes that it starts.
Python users decide for their own process: call ``keep_freed()``.
"""

from __future__ import annotations

import ctypes
import os
import platform

OPTIONS = {  # glibc's variables, their numbers in malloc.h, and what they are set to
    "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1),
    "MALLOC_TOP_PAD_": (-2, 2**28),
    "MALLOC_MMAP_MAX_": (-4, 0),
}


def environment() -> dict[str, str]:
    """Variables with which a process keeps freed memory from its start; none where its user has set the allocator."""
    chosen = any(name in os.environ for name in (*OPTIONS, "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"))
    return {} if chosen else {name: str(value) for name, (_, value) in OPTIONS.items()}


def keep_freed() -> bool:
    """Keep freed memory from now on; False where the allocator is another one or was set by its user."""
    if not environment() or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(number, value) == 1 for number, value in OPTIONS.values())
