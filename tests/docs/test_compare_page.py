"""The page of comparisons: its example runs, and says what it says."""

from __future__ import annotations

import re
from typing import Any

import torch

from docs.pages import ROOT


def test_the_example_runs() -> None:
    text = (ROOT / "docs" / "compare.md").read_text()
    scope: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for code in re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M):
            exec(code, scope)
    result = scope["result"]
    assert set(result.skipped) == {"hardnet-aff"}
    assert "3 rows on 2 variables" in result.skipped["hardnet-aff"]
    assert [row.method for row in result.means()] == ["base", "probhard-ob", "hardnet++", "dc3"]
    assert [row.feasible for row in result.means()] == [False, True, False, False]
    for column in re.findall(r"^\| (`.*?`) \|", text, flags=re.M):
        for name in re.findall(r"`(\w+)`", column):
            assert hasattr(result.rows[0], name)


def test_cells_of_ours_name_tests() -> None:
    text = (ROOT / "docs" / "features.md").read_text()
    rows = [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for cell in rows:
        files = re.findall(r"`(tests/[^`]*)`", cell)
        assert files or cell == "no", cell
        assert all((ROOT / file).exists() for file in files)
