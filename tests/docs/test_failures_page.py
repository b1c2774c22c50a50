"""The page on failures: its example runs."""

from __future__ import annotations

import re

import torch

from docs.pages import ROOT


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "failures.md").read_text(), flags=re.S)
    names: dict[str, object] = {}
    torch.manual_seed(0)
    exec(code, names)
    assert torch.isfinite(names["loss"])
