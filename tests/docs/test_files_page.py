"""The page on files: its examples are run as they stand, and no name is missing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probhard.cli import main
from probhard.io.spec import REGISTRY
from probhard.pde.surrogate import READERS as TRAINING

pd = pytest.importorskip("pandas")

PAGE = (Path(__file__).parents[2] / "docs" / "files.md").read_text()
BLOCKS = re.findall(r'^```(\w+)(?: title="(\S+)")?\n(.*?)^```', PAGE, flags=re.S | re.M)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    printed, scope = [], dict[str, Any]()
    for kind, name, text in BLOCKS:
        if kind == "python":
            exec(text, scope)
        elif kind == "bash":
            program, *arguments = shlex.split(text)
            assert program == "probhard"
            assert main(arguments) == 0
            printed.append(capsys.readouterr().out)
        else:
            Path(name or "forecasts.csv").write_text(text)
    assert len(printed) == 4
    assert all("all feasible" in text for text in printed)
    assert "3 bottom nodes, 3 aggregates (made as their sums)." in printed[1]
    with np.load("fields-projected.npz") as projected:
        inside, mean = scope["sea"], projected["mean"]
    np.testing.assert_allclose((mean * scope["volumes"])[:, inside].sum(1), 0.8, rtol=1e-13)
    assert mean[:, inside].min() >= 0
    np.testing.assert_array_equal(mean[:, ~inside], scope["mean"][:, ~inside])


def test_no_name_is_missing() -> None:
    options = pytest.importorskip("probhard.cli._forecast_options")
    own = {"method", "format", "output", "draws", "epochs", "seed", "nonnegative", "time_column", "target_column"}
    unusual = {"num_feat_dynamic_real", "coherence"}
    for name in (*REGISTRY, *TRAINING, *(set(options.READERS) - own - unusual)):
        assert re.search(rf"\b{name}\b", PAGE), name


def test_the_history_and_its_settings_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = pytest.importorskip("probhard.cli._forecast_options")
    forecast = pytest.importorskip("probhard.cli._forecast")
    pytest.importorskip("gluonts")
    monkeypatch.chdir(tmp_path)
    for _, name, text in BLOCKS:
        if name in ("history.csv", "run.yaml"):
            Path(name).write_text(text)
    job = forecast.ForecastRun.of("history.csv", {}, options.read_configuration(Path("run.yaml")))
    assert job.options["upper"] == {"Total": 100.0, "Total/A/north": 40.0}
    assert set(job.options["upper"]) < set(job.data.names)
    assert job.network["family"].df == 5
