"""Fixtures of projection tests."""

from __future__ import annotations

import pytest
import torch

from registry import CONSTRAINTS, generator


@pytest.fixture
def same_data_in_any_order():
    """Seed the registry's generator for each test, and restore its state after it."""
    before = generator.get_state()
    generator.manual_seed(7)
    yield
    generator.set_state(before)


@pytest.fixture(scope="module")
def constraints():
    """The registry's constraints by name, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    built = {name: make() for name, make in CONSTRAINTS.items()}
    torch.set_default_dtype(before)
    return built
