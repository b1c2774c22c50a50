"""The README's example is run as it stands, and the tables of the guides miss no name."""

from __future__ import annotations

import re
from pathlib import Path

import probhard as ph

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


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


def test_the_first_screen_has_the_commands_and_a_picture():
    first = README.partition("## Example")[0]
    assert "make demo" in first
    assert "make test" in first
    assert "](docs/pictures/first.png)" in first


def test_every_method_is_in_the_table():
    text = (ROOT / "docs" / "methods.md").read_text()
    for name in ph.METHODS:
        assert f"`{name}`" in text


def test_every_constraint_is_in_the_table():
    text = (ROOT / "docs" / "constraints.md").read_text()
    for name, kind in ((name, getattr(ph, name)) for name in ph.__all__):
        if isinstance(kind, type) and issubclass(kind, ph.Constraint) and kind is not ph.Constraint:
            assert re.search(rf"`{name}\b", text), name
