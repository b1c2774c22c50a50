"""``probhard forecast`` by members: the pool, one member, kept fits, saved models, key columns in all outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from forecasting.helpers import frame
from probhard.cli import main

OPTIONS = ["--keys", "state,region", "--horizon", "3", "--models", "naive,smoothing", "--no-backtest"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command on a frame: status and the folder of its files."""
    monkeypatch.chdir(tmp_path)

    def command(table: pd.DataFrame, *options: str, name: str = "shop") -> tuple[int, Path]:
        table.rename(columns={"ds": "date"}).to_csv(f"{name}.csv", index=False)
        return main(["forecast", f"{name}.csv", *options]), tmp_path / f"{name}-forecast"

    return command


def test_members_and_key_columns(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, folder = run(frame(60), *OPTIONS, "--draws", "5")
    assert status == 0
    printed = capsys.readouterr()
    assert "3 steps ahead by naive, smoothing." in printed.out
    assert "all rows: naive, 7 series" in printed.err  # a line per member, also without a terminal
    forecasts = pd.read_csv(folder / "forecasts.csv", keep_default_na=False)
    assert forecasts.columns.tolist()[:5] == ["unique_id", "state", "region", "ds", "probhard"]
    nodes = forecasts.drop_duplicates("unique_id").set_index("unique_id")[["state", "region"]]
    assert nodes.loc["Total"].tolist() == ["", ""]
    assert nodes.loc["Total/B"].tolist() == ["B", ""]
    assert nodes.loc["Total/B/z"].tolist() == ["B", "z"]
    draws = pd.read_csv(folder / "draws.csv", keep_default_na=False)
    assert (draws["unique_id"] == "Total/A/y").sum() == ((draws["state"] == "A") & (draws["region"] == "y")).sum() == 15
    certificate = json.loads((folder / "certificate.json").read_text())
    assert certificate["models"] == ["naive", "smoothing"]


def test_a_second_run_with_other_bounds_reads_the_fits(
    run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from probhard.forecasting.members import kept_tuning
    from probhard.forecasting.members.series import SeriesMember

    assert run(frame(60), *OPTIONS)[0] == 0
    monkeypatch.setattr(SeriesMember, "forecast", lambda *given, **options: pytest.fail("fitted again"))
    monkeypatch.setattr(kept_tuning, "tune_pool", lambda *given: pytest.fail("tuned again"))
    status, folder = run(frame(60), *OPTIONS, "--nonnegative", "--upper", "900")
    assert status == 0
    forecasts = pd.read_csv(folder / "forecasts.csv")
    assert forecasts["probhard-hi-95"].max() <= 900 * (1 + 1e-9)


def test_saved_models_read_new_rows(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    later = frame(64)
    status, folder = run(later[later["ds"] < "2023-01-01"], *OPTIONS, "--nonnegative")
    assert status == 0
    new = later[later["ds"] >= "2023-01-01"]  # 4 rows of each series
    status, again = run(new, "--model", str(folder), name="new")
    assert status == 0
    assert "new: 64 rows of 7 nodes, 2018-01 to 2023-04; 3 steps ahead by the model in" in capsys.readouterr().out
    forecasts = pd.read_csv(again / "forecasts.csv")
    assert forecasts["ds"].min() == "2023-05-01"
    whole, other = run(later, "--model", str(folder), name="whole")
    assert whole == 0
    np.testing.assert_allclose(pd.read_csv(other / "forecasts.csv")["probhard"], forecasts["probhard"])
    assert "region" in forecasts
    gap = later[later["ds"] >= "2023-03-01"]
    assert run(gap, "--model", str(folder), name="gap")[0] == 2
    assert "Pass rows from 2023-01 on" in capsys.readouterr().err
    assert run(new, "--model", str(folder), "--models", "ets", name="both")[0] == 2
    assert "--model was given with --models" in capsys.readouterr().err


def test_one_member_and_unknown_ones(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--keys", "state,region", "--horizon", "3", "--no-backtest"]
    status, folder = run(frame(40), *options, "--fast")
    assert status == 0
    saved = json.loads((folder / "model" / "forecaster.json").read_text())
    assert [member["name"] for member in saved["pool"]["members"]] == ["ets"]
    assert saved["keys"] == "state,region"
    assert run(frame(40), *options, "--models", "prophet")[0] == 2
    assert "prophet" in capsys.readouterr().err


def test_saved_models_keep_mended_values_and_regressors(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    later = frame(64)
    later["price"] = np.cos(np.arange(len(later)) % 64)
    ended = (later["region"] == "z") & (later["ds"] >= "2022-01-01")
    gap = (later["region"] == "y") & (later["ds"] == "2020-05-01")
    later = later[~(ended | gap)]
    Path("future.csv").write_text("date,price\n2023-01-01,1\n2023-02-01,0\n2023-03-01,1\n")
    status, folder = run(later[later["ds"] < "2023-01-01"], *OPTIONS, "--future", "future.csv")
    assert status == 0
    Path("future.csv").write_text("date,price\n2023-05-01,1\n2023-06-01,0\n2023-07-01,1\n")
    new = later[later["ds"] >= "2023-01-01"]  # without rows of the ended series
    status, again = run(new, "--model", str(folder), "--future", "future.csv", name="new")
    assert status == 0
    notes = capsys.readouterr().err
    assert "1 series ended, 0 from then on and in the forecast: Total/B/z after 2021-12." in notes
    assert "Known ahead: price" in notes
    whole, other = run(later, "--model", str(folder), "--future", "future.csv", name="whole")
    assert whole == 0
    forecasts = pd.read_csv(again / "forecasts.csv")
    np.testing.assert_allclose(pd.read_csv(other / "forecasts.csv")["probhard"], forecasts["probhard"])
    assert (forecasts.loc[forecasts["unique_id"] == "Total/B/z", "probhard"] == 0).all()


def test_files_of_others_are_not_replaced(run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "shop-forecast" / "report.html"
    page.parent.mkdir()
    page.write_text("mine")
    assert run(frame(40), *OPTIONS)[0] == 2
    assert "report.html was not written by probhard" in capsys.readouterr().err
    assert page.read_text() == "mine"
    page.unlink()
    assert run(frame(40), *OPTIONS)[0] == 0
    (page.parent / "certificate.json").unlink()  # as after a run that was killed
    assert run(frame(40), *OPTIONS)[0] == 0


def test_columns_are_recognised(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    table = frame(40).rename(columns={"ds": "Monat", "y": "Umsatz"})
    table["price"] = 1.0 + np.arange(len(table)) % 3
    last = table.groupby(["state", "region"]).tail(3)
    last[["state", "region", "Monat", "price"]].to_csv("next.csv", index=False)
    status, folder = run(table.drop(last.index), *OPTIONS, "--future", "next.csv")
    assert status in (0, 4)
    assert json.loads((folder / "certificate.json").read_text())["regressors_used"] == ["price"]
    assert run(table, *OPTIONS)[0] == 2
    assert "--target-column" in capsys.readouterr().err
    assert (
        run(table.assign(price="", Umsatz=table["Umsatz"].astype(str).mask(table.index == 4, "1.2.3")), *OPTIONS)[0]
        == 2
    )
    assert "text '1.2.3' in row 5" in capsys.readouterr().err
    assert run(table.assign(Umsatz=None), *OPTIONS, "--target-column", "Umsatz")[0] == 2
    assert "'Umsatz' is empty" in capsys.readouterr().err


def test_series_that_are_zero_at_the_end_are_told(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    table = frame(40)
    table.loc[table.groupby(["state", "region"]).cumcount().ge(25) & (table["region"] == "z"), "y"] = 0.0
    status, folder = run(table, *OPTIONS)
    assert status in (0, 4)
    said = "1 series is 0 at the end and forecast as usual: Total/B/z"
    assert said in capsys.readouterr().err
    assert said in (folder / "report.html").read_text()
    assert list(json.loads((folder / "certificate.json").read_text())["history"]["zero_since"]) == ["Total/B/z"]
