from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import offline

torch.set_num_threads(1)
offline.guard()


@pytest.fixture(autouse=True)
def _no_network():
    """Fail a test that tried to reach another machine, even if the error was caught."""
    offline.ATTEMPTS.clear()
    yield
    assert not offline.ATTEMPTS, f"The test tried to reach {offline.ATTEMPTS}."


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """One thread in every test file, even if a test before has changed their number."""
    torch.set_num_threads(1)


@pytest.fixture
def plain_dtype() -> torch.dtype:
    """The default dtype of tests: float64. Test files that name every dtype override it."""
    return torch.float64


@pytest.fixture(autouse=True)
def _default_dtype(plain_dtype):
    """Set the default dtype and the seed, and restore the dtype after each test."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(plain_dtype)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def compiler():
    """Skip where torch.compile has no C++ compiler."""
    if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
        pytest.skip("torch.compile needs a C++ compiler and none was found")
    torch._dynamo.reset()


@pytest.fixture
def hierarchical_data() -> Path:
    """The folder of the five benchmark data sets."""
    folder = os.environ.get("PROBHARD_DATA")
    if not folder:
        pytest.skip("PROBHARD_DATA is not set, so the benchmark data sets cannot be read")
    return Path(folder) / "hierarchical"
