"""The tutorial is run as it stands: its Python, its configuration and its commands, in an empty folder."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.integrate import trapezoid

from probhard.cli import main

TEXT = (Path(__file__).parents[2] / "docs" / "tutorial-pde.md").read_text()
BLOCKS = re.findall(r"^```(python|yaml|sh|)\n(.*?)^```", TEXT, flags=re.S | re.M)


def test_thirty_lines() -> None:
    (code,) = [text for kind, text in BLOCKS if kind == "python" and "ConstrainedModel(" in text]
    assert len([line for line in code.splitlines() if line.strip()]) <= 30


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for kind, text in BLOCKS:
        if kind == "python":
            exec(text, scope)
        elif kind == "yaml":
            Path("run.yaml").write_text(text)
        elif kind == "sh":
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "probhard"
                capsys.readouterr()
                assert main(arguments) == 0
            printed = capsys.readouterr().out
    draws, mass = scope["draws"].numpy(), scope["new"][:, :1].numpy()
    assert draws.shape == (100, 20, 8, 40)
    assert draws.min() >= 0
    np.testing.assert_allclose(trapezoid(draws, scope["x"].numpy()), np.broadcast_to(mass, (100, 20, 8)), rtol=1e-13)
    error = np.mean((scope["forecast"].mean.detach().numpy() - scope["truth"]) ** 2)
    assert error < 0.05 * np.mean(scope["truth"] ** 2)
    assert Path("plume.pt").exists()
    _check_predictions(scope, printed)


def _check_predictions(scope: dict[str, Any], printed: str) -> None:
    with np.load("predictions.npz") as predictions:
        draws, mean, lower, upper = (predictions[name] for name in ("draws", "mean", "lower", "upper"))
    truth, x, mass = (scope["truth"], scope["cases"]["x"], scope["cases"]["released"])
    np.testing.assert_allclose(trapezoid(draws, x), np.broadcast_to(mass, (100, 20, 8)), rtol=1e-13)
    assert draws.min() >= 0
    assert np.mean((mean - truth) ** 2) < 0.2 * np.mean(truth**2)
    assert np.mean((lower <= truth) & (truth <= upper)) > 0.5
    certificate = json.loads(Path("predictions.json").read_text())
    assert (certificate["feasible"], certificate["checked"]) == (True, 20 * 8 * 101)
    (sample,) = [text for kind, text in BLOCKS if not kind]
    numbers = re.compile(r"[-\d.e]+\d|\b0\b")
    shown = [numbers.sub("#", line).split() for line in sample.splitlines()]
    assert [numbers.sub("#", line).split() for line in printed.splitlines()[: len(shown)]] == shown
    assert sample.splitlines()[-1] in printed
