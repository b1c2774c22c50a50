"""Waiting for what another process does."""

from __future__ import annotations

import time
from pathlib import Path


def wait_for(path: Path, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.01)
