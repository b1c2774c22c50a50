"""Rooms of the forecasting package: exported names exist, and importing them stays light."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

ROOMS = ["forecasting", *(f"forecasting.{room}" for room in ("data", "models", "reconciliation", "report"))]


@pytest.mark.parametrize("room", ROOMS)
def test_exported_names_exist(room):
    module = import_module(f"probhard.{room}")
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


def test_importing_the_package_loads_no_extra():
    code = "import sys, probhard.forecasting; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"pandas", "gluonts", "lightning", "statsforecast", "jinja2"} & set(run.stdout.split())
