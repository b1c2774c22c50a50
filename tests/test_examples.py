"""The gallery: each script runs, is short, leaves a picture and ends with feasible points."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import matplotlib
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def test_the_gallery_is_complete():
    names = {"portfolio", "dc_opf", "power_flow", "robot_arm", "quaternion", "covariance", "quantiles", "compare"}
    assert {script.stem for script in SCRIPTS} == names
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    for name in names:
        assert f'--8<-- "examples/{name}.py"' in page
        assert f"pictures/{name}.png" in page
        assert (EXAMPLES.parent / "docs" / "pictures" / f"{name}.png").is_file()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_draws_feasible_points(script, tmp_path, monkeypatch):
    assert len(script.read_text().splitlines()) <= 40
    picture = tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", [script.name, str(picture)])
    backend = matplotlib.get_backend()
    matplotlib.use("Agg")
    try:
        names = runpy.run_path(str(script))
    finally:
        matplotlib.use(backend)
    assert picture.stat().st_size > 5_000
    before, after = names.get("before"), names["after"]
    tolerance = 1e-10 if after.element_size() == 8 else 1e-6
    assert names["constraint"].violation(after).max() < tolerance
    if before is not None:
        assert names["constraint"].violation(before).max() > 1e-3
