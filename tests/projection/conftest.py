"""Fixtures of projection tests."""

from __future__ import annotations

import pytest

from registry import generator


@pytest.fixture
def same_data_in_any_order():
    """Seed the registry's generator for each test, and restore its state after it."""
    before = generator.get_state()
    generator.manual_seed(7)
    yield
    generator.set_state(before)
