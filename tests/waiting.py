"""Waiting for what another process does."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def wait_for(path: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.01)


def wait_until_gone(process: int, seconds: float = 120) -> None:
    """The system is asked: a thread that reaps a process leaves others in the belief that it lives."""
    end = time.monotonic() + seconds
    while _exists(process):
        assert time.monotonic() < end, f"the process {process} did not end"
        time.sleep(0.01)


def _exists(process: int) -> bool:
    with suppress(ChildProcessError):
        os.waitpid(process, os.WNOHANG)  # else a child that has ended stays in the table
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
