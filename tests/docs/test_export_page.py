"""The page on export is run as it stands, up to the file that it writes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from docs.pages import ROOT


@pytest.fixture
def plain_dtype() -> torch.dtype:
    """The page leaves torch's own default."""
    return torch.float32


def test_the_examples_run() -> None:
    torch._dynamo.reset()
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "export.md").read_text(), flags=re.S | re.M)
    assert len(blocks) == 2
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(block, scope)
