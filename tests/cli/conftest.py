"""Fixtures of the commands' tests."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture
def no_classical(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without statsforecast, as where it is not installed."""
    monkeypatch.setitem(sys.modules, "statsforecast", None)
