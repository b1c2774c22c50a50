"""The README's example is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import probhard as ph

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 23  # twenty lines, two imports and a check
    scope: dict[str, object] = {}
    exec(code, scope)
    said = re.search(r"# (tree of .*)", code).group(1)
    assert capsys.readouterr().out.strip() == said
    forecast = scope["forecast"]
    assert forecast.feasible
    assert isinstance(forecast, ph.Projected)


def test_every_method_is_in_the_table():
    for name in ph.METHODS:
        assert f"`{name}`" in README
