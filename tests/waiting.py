"""Wait for the effects of another process."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def wait_for(path: Path, seconds: float = 120) -> None:
    """Wait until a file exists, and fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.01)


def wait_until_gone(process: int, seconds: float = 120) -> None:
    """Wait until a process has ended, and fail after ``seconds``.

    The operating system is asked, since a ``Popen`` does not notice if another thread has reaped the process.
    """
    end = time.monotonic() + seconds
    while _exists(process):
        assert time.monotonic() < end, f"the process {process} did not end"
        time.sleep(0.01)


def _exists(process: int) -> bool:
    with suppress(ChildProcessError):
        os.waitpid(process, os.WNOHANG)  # else a child that has ended stays in the process table
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
