"""Freed memory is kept: fewer fresh pages for the same work, and a user's own choice of allocator is left alone."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from probhard._util import memory

FAULTS = """
import resource, sys
import torch
from probhard import DPPL  # loads the library, as every process of the command does
from probhard._util import memory
asked = sys.argv[1] == "keep"
assert not asked or memory.keep_freed()
torch.ones(2**23)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(2**23)  # 32 MiB, 8,192 pages
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", *memory.OPTIONS)
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")


def _faults(how: str, **more: str) -> int:
    command, environment = [sys.executable, "-c", FAULTS, how], {**os.environ, **more}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which nobody has set the allocator."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@glibc
def test_fewer_fresh_pages(untouched: None) -> None:
    given = _faults("default")
    assert _faults("keep") < given / 5
    assert _faults("default", **memory.environment()) < given / 5  # as worker processes are started


@pytest.mark.parametrize("name", VARIABLES)
def test_own_choice_is_left_alone(untouched: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(memory.environment()) == set(memory.OPTIONS)
    monkeypatch.setenv(name, "1")
    assert memory.environment() == {}
    assert not memory.keep_freed()


def test_other_allocators(untouched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not memory.keep_freed()
