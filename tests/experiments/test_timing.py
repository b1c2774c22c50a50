"""Training time per epoch: lines, table and figure."""

import json
from pathlib import Path

import pytest

from experiments import timing
from probhard.cli import main


def test_one_problem_is_measured_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "timing", "--quick", "--problems", "heat", "--output", str(tmp_path)]) == 0
    folder = tmp_path / "quick"
    lines = {line["method"]: line for line in map(json.loads, (folder / "timing.jsonl").read_text().splitlines())}
    assert list(lines) == list(timing.PDE_METHODS)
    assert lines["base"]["over_base"] == 1
    assert all(line["seconds_per_epoch"] > 0 and line["rounds"] >= 4 for line in lines.values())
    page = (folder / "timing.md").read_text()
    assert "| heat |" in page
    assert (folder / "timing.png").stat().st_size > 5_000
    assert "Written" in capsys.readouterr().out
