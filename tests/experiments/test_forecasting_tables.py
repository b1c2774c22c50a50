"""Experiments of the forecasting table: lines, origins, resuming, rendering."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from experiments.forecasting import rows, tables
from experiments.forecasting import runs as experiments
from experiments.forecasting.origins import origins
from experiments.forecasting.rows import CLASSICAL, KEYS
from experiments.forecasting.runs import Job

from probhard.cli import main
from probhard.forecasting.data.datasets import load

needs_data = pytest.mark.skipif(
    "PROBHARD_DATA" not in os.environ, reason="the benchmark data are not here: PROBHARD_DATA is not set"
)
FIELDS = {*KEYS, "crps", "crps_levels", "incoherence", "incoherence_relative", "smallest_draw", "seconds"}


@needs_data
def test_the_window_of_the_paper(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("gluonts", reason="gluonts is not installed")
    arguments = ["bench", "forecasting", "--quick", "--output", str(tmp_path), "--problems", "tourism"]
    arguments += ["--windows", "paper", "--methods", "naive,base"]
    assert main(arguments) == 0
    file = tmp_path / "quick" / "forecasting.jsonl"
    lines = {line["method"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert set(lines) == {"last-value", "seasonal-naive", "seasonal-bootstrap", "base", "probconserv"}
    assert all(set(line) == FIELDS for line in lines.values())
    assert lines["seasonal-naive"]["crps"] == pytest.approx(0.119, abs=5e-4)
    assert lines["last-value"]["crps"] == pytest.approx(0.186, abs=5e-4)
    for name, line in lines.items():
        assert (line["incoherence_relative"] > 1e-6) == (name == "base")
    page = (tmp_path / "quick" / "forecasting.md").read_text()
    assert "| seasonal-naive |  | 119" in page
    before = file.stat().st_mtime_ns
    assert main(arguments) == 0
    assert file.stat().st_mtime_ns == before
    assert "2 of 2 units done" in capsys.readouterr().out


@needs_data
@pytest.mark.parametrize(("dataset", "step", "count"), [("labour", 8, 8), ("tourism", 1, 8), ("wiki", 1, 8)])
def test_rolling_origins_end_at_the_last_row_and_see_nothing_of_their_future(
    dataset: str, step: int, count: int
) -> None:
    places = origins(dataset, "rolling")
    (last,) = origins(dataset, "paper")
    assert len(places) == count
    assert places[-1].number == 0
    assert np.array_equal(places[-1].future.values, last.future.values)
    for place in places:
        assert place.known.index[-1] + 1 == place.future.index[0]
    starts = [place.future.index[0].ordinal for place in places]
    assert set(np.diff(starts)) == {step}


@needs_data
def test_the_pool_is_weighted_on_past_windows_and_obeys(tmp_path: Path) -> None:
    pytest.importorskip("gluonts", reason="gluonts is not installed")
    job = Job("tourism", "probhard-pool", quick=True)
    (line,) = job.run(tmp_path / "work" / job.name, progress=False)
    assert set(line) == FIELDS | {"weights"}
    assert sum(line["weights"].values()) == pytest.approx(1)
    assert line["smallest_draw"] >= 0
    assert line["incoherence_relative"] < 1e-12
    assert len(list((tmp_path / "work" / "fits").glob("tourism-ets-*.npz"))) == 4  # three past windows and the last


def test_jobs_of_the_table() -> None:
    grid = experiments.grid("none")
    paper = [unit for unit in grid.units if unit.window == "paper"]
    rolling = [unit for unit in grid.units if unit.window == "rolling"]
    assert {unit.kind for unit in paper} == {
        "naive",
        "ets",
        "arima",
        "probhard-pool",
        "probhard-default",
        *rows.TRAINED,
    }
    assert {unit.seed for unit in paper if unit.kind == "base"} == set(range(5))
    assert {unit.seed for unit in rolling if unit.kind == "base"} == set(range(3))
    assert {unit.kind for unit in rolling} == {"naive", "ets", "arima", "probhard-pool", *rows.ROLLED}
    assert len({unit.name for unit in grid.units}) == len(grid.units)
    assert len(Job("tourism_large", "arima", "rolling").expected()) == 2 * 4  # two origins, no permbu
    assert {key["method"] for key in Job("labour", "ets").expected()} == {n for n in CLASSICAL if n.startswith("ets")}


def line(method: str, crps: float, seed: int = 0, window: str = "paper", origin: int = 0) -> dict:
    return {
        "dataset": "labour", "method": method, "seed": seed, "window": window, "origin": origin, "crps": crps,
        "incoherence_relative": 1e-16, "smallest_draw": -2.0, "seconds": 1.0,
    }  # fmt: skip


def test_tables_show_spread_and_the_paper() -> None:
    page = tables.render([line("base", 0.03, 0), line("base", 0.04, 1), line("last-value", 0.0391)])
    assert "| base | 35.0 +- 5.0 (38.2) |" in page
    assert "| last-value | 39.1 |" in page
    assert "1e-16, -2" in page
    assert "Rolling" not in page


@needs_data
def test_traffic_repeats_as_the_page_says() -> None:
    values = load("traffic").values
    period = tables.TRAFFIC_PERIOD
    np.testing.assert_array_equal(values[period:], values[: len(values) - period])
    assert "row 267" in tables.render([line("base", 0.03)])


def test_only_significant_differences_count_as_beaten() -> None:
    clear = [line("base", 0.03 + 0.001 * k, 0, "rolling", k) for k in range(8)]
    clear += [line("last-value", 0.05 + 0.0012 * k, 0, "rolling", k) for k in range(8)]
    rng = np.random.default_rng(0)
    clear += [line("seasonal-naive", 0.033 + 0.03 * rng.standard_normal(), 0, "rolling", k) for k in range(8)]
    row = next(text for text in tables.render(clear).splitlines() if text.startswith("| base | seasonal-naive"))
    assert row.startswith("| base | seasonal-naive |  |")  # nothing is said of a set without lines
    only = [entry for entry in clear if entry["method"] != "seasonal-naive"]
    assert "| base | none |  |" in tables.render(only)
