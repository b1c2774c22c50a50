"""The example of points on the page of methods is run as it stands."""

from __future__ import annotations

import re
from typing import Any

import torch

from docs.pages import ROOT


def test_the_example_runs() -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    scope: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for code in re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M):
            if "score=lambda" in code:
                exec(code, scope)
    x, u = scope["x"], scope["u"].detach()
    assert (u.sum(-1, keepdim=True) - x).abs().max() < 1e-6
    assert u.min() >= 0
    assert u.max() <= 0.5
    best = x / (1 / scope["cost"]).sum() / scope["cost"]  # while no bound is active
    inside = best.max(-1).values < 0.5
    assert (u - best)[inside].abs().max() < 0.05
