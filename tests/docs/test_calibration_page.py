"""The page on calibration is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

TEXT = (Path(__file__).parents[2] / "docs" / "calibration.md").read_text()


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    with torch.random.fork_rng():
        for code in re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.S | re.M):
            exec(code, scope)
    printed = capsys.readouterr().out
    assert "90/100 = 0.9000" in printed
    assert "promised coverage: 0.9000" in printed
    numbers = scope["calibrated"].calibration
    assert 2 < numbers.shared < 4  # the law has a third of the shared noise
    assert numbers.own == pytest.approx(0.3 / 0.2, rel=0.5)
    upper, lower = scope["upper"], scope["lower"]
    assert upper.shape == (5, 7)
    assert bool((upper > lower).all())
