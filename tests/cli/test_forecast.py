"""``probhard forecast``: files recomputed from the draws, baselines by hand, and what is left out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from cli.forecast_runs import KEYS, TINY, runner, table
from probhard.cli import main
from probhard.forecasting import HierarchicalForecaster
from probhard.forecasting.forecaster import HierarchicalForecaster as Forecaster
from probhard.forecasting.report import backtest as module
from probhard.laws.student_t import student_t

ETS = ["AutoETS bottom-up", "AutoETS + MinT-shrink", "AutoETS + OLS"]
S = np.vstack([[[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]], np.eye(4)])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return runner(tmp_path)


def cube(draws: pd.DataFrame, model: str = "probhard-or") -> np.ndarray:
    """Long draws as (S, H, n)."""
    order = draws["unique_id"].unique()
    wide = draws.pivot_table(index=["draw", "ds"], columns="unique_id", values=model)[list(order)]
    return wide.to_numpy().reshape(draws["draw"].nunique(), -1, len(order))


def test_files_against_the_draws(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, folder = run(table(), *KEYS, "--nonnegative", "--level", "80,95", "--draws", "40")
    assert status == 0
    printed = capsys.readouterr()
    assert {p.name for p in folder.iterdir()} == {
        "forecasts.csv",
        "draws.csv",
        "certificate.json",
        "report.html",
        "model",
    }
    draws = cube(pd.read_csv(folder / "draws.csv", float_precision="round_trip"))
    assert draws.shape == (40, 6, 7)
    assert draws.min() >= 0
    gap = np.abs(draws[..., :3] - draws[..., 3:] @ S[:3].T)
    certificate = json.loads((folder / "certificate.json").read_text())
    assert certificate["feasible"] is True
    assert (certificate["checked"], certificate["infeasible"]) == (41 * 6, 0)  # draws and mean
    assert certificate["incoherence"]["relative"] == pytest.approx((gap / draws[..., :3]).max(), abs=1e-15)
    assert certificate["incoherence"]["relative"] < 1e-9
    assert certificate["incoherence"]["smallest_draw"] == pytest.approx(draws.min(), rel=1e-12)
    assert certificate["after"]["largest"] == pytest.approx(draws.max(), rel=1e-12)
    assert certificate["input_sha256"] == hashlib.sha256(Path("shop.csv").read_bytes()).hexdigest()
    assert (certificate["seed"], certificate["rows"], certificate["nodes"]) == (0, 48, 7)
    assert certificate["levels"] == {"total": 1, "total/state": 2, "total/state/region": 4}
    assert "gluonts" in certificate["packages"]
    frame = pd.read_csv(folder / "forecasts.csv", float_precision="round_trip")
    assert frame["ds"].unique().tolist()[0] == "2022-01-01"
    for column, value in {
        "probhard-or": draws.mean(0),
        "probhard-or-lo-95": np.percentile(draws, 2.5, axis=0),
        "probhard-or-hi-80": np.percentile(draws, 90, axis=0),
    }.items():
        np.testing.assert_allclose(frame[column].to_numpy().reshape(7, 6).T, value, rtol=1e-9)
    assert "all feasible" in printed.out
    loaded = HierarchicalForecaster.load(folder / "model")
    np.testing.assert_allclose(loaded.sample(6, 40), draws, rtol=1e-12)


def test_baselines_by_hand(run: Any) -> None:
    frame = table()
    _, folder = run(frame, *KEYS)
    scores = json.loads((folder / "certificate.json").read_text())["backtest"]["scores"]
    assert list(scores) == ["probhard-or", "seasonal naive", *ETS]
    wide = frame.pivot_table(index="date", columns=["state", "region"], values="sales").to_numpy() @ S.T  # (48, 7)
    known, y = wide[:-6], wide[-6:]
    spread = np.sqrt(((known[12:] - known[:-12]) ** 2).mean(0))
    quantiles = wide[-18:-12] + spread * norm.ppf(np.arange(0.05, 0.96, 0.05))[:, None, None]
    levels = np.arange(0.05, 0.96, 0.05)[:, None, None]
    loss = 2 * np.abs((quantiles - y) * ((y <= quantiles) - levels))
    assert scores["seasonal naive"]["crps"] == pytest.approx(loss.mean(0).sum() / y.sum(), rel=5e-3)
    by_level = scores["seasonal naive"]["crps_levels"]
    assert by_level["total/state"] == pytest.approx(loss.mean(0)[:, 1:3].sum() / y[:, 1:3].sum(), rel=5e-3)
    assert all(0 < scores[name]["crps"] < scores["seasonal naive"]["crps"] for name in ETS)


def test_named_columns_and_parquet(run: Any, no_classical: None) -> None:
    frame = table().rename(columns={"date": "when", "sales": "amount"}).assign(other=1.0)
    names = ["--time-column", "when", "--target-column", "amount"]
    status, folder = run(frame, *KEYS, *names, "--format", "parquet", "--draws", "5", "--seed", "3")
    assert status == 0
    polars = pytest.importorskip("polars", reason="reads the Parquet files")
    assert polars.read_parquet(folder / "forecasts.parquet").height == 7 * 6
    assert polars.read_parquet(folder / "draws.parquet").height == 7 * 6 * 5
    assert json.loads((folder / "certificate.json").read_text())["seed"] == 3


def test_configuration_file_and_precedence(run: Any, no_classical: None) -> None:
    config = TINY[:-1] + ", horizon: 3, epochs: 1, keys: [state, region], level: [50], method: probhard-ob, lr: 0.003}"
    status, folder = run(table(), "--horizon", "2", config=config)
    assert status == 0
    certificate = json.loads((folder / "certificate.json").read_text())
    assert (certificate["horizon"], certificate["level"], certificate["method"]) == (2, [50.0], "probhard-ob")
    assert certificate["network"]["lr"] == 0.003
    assert "probhard-ob-lo-50" in pd.read_csv(folder / "forecasts.csv").columns


def test_without_statsforecast(run: Any, no_classical: None, capsys: pytest.CaptureFixture[str]) -> None:
    status, folder = run(table(), *KEYS)
    assert status == 0
    assert "AutoETS bottom-up was left out: A classical forecast needs statsforecast" in capsys.readouterr().err
    assert "AutoETS bottom-up was left out" in (folder / "report.html").read_text()


def test_gaps_are_filled_and_told(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, folder = run(table().drop(index=[10, 60]), *KEYS)
    assert status == 0
    assert "2 missing values of 2 series filled for sums, not scored" in capsys.readouterr().err
    certificate = json.loads((folder / "certificate.json").read_text())
    assert certificate["gaps"] == 2
    assert certificate["history"]["filled"] == {"Total/A/x": 1, "Total/A/y": 1}
    assert set(ETS) < set(certificate["backtest"]["scores"])
    assert "2 missing values" in (folder / "report.html").read_text()


def test_ended_series_do_not_pull_the_forecast_down(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    frame = table()
    gone = (frame["region"] == "y") & (frame["date"] >= "2020-06-01")
    status, folder = run(frame[~gone], *KEYS, "--draws", "40")
    assert status == 0
    assert "1 series ended, 0 from then on and in the forecast: Total/A/y after 2020-05" in capsys.readouterr().err
    certificate = json.loads((folder / "certificate.json").read_text())
    assert certificate["feasible"] is True
    assert certificate["history"]["ended"] == {"Total/A/y": "2020-05"}
    draws = cube(pd.read_csv(folder / "draws.csv", float_precision="round_trip"))
    assert (draws[..., 4] == 0).all()
    year = frame[~gone & (frame["date"] >= "2021-01-01")].groupby("date")["sales"].sum().to_numpy()
    assert 0.5 < draws[..., 0].mean(0).sum() / year[:6].sum() < 2
    assert "ended, forecast 0" in (folder / "report.html").read_text()


def test_a_forecast_that_the_history_does_not_support(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = Forecaster.sample
    monkeypatch.setattr(Forecaster, "sample", lambda self, *args: 0.2 * sample(self, *args))
    status, folder = run(table(), *KEYS)
    assert status == 4
    assert "times its last year" in capsys.readouterr().err
    certificate = json.loads((folder / "certificate.json").read_text())
    assert certificate["feasible"] is True
    (warning,) = certificate["warnings"]
    assert warning["node"] == "Total"
    assert warning["ratio"] == pytest.approx(warning["forecast"] / warning["last_year"])
    assert warning["ratio"] < 0.5
    assert "<strong>Warning.</strong> The forecast of &#39;Total&#39;" in (folder / "report.html").read_text()


def test_crossed_keys_and_levels(run: Any, no_classical: None) -> None:
    frame = table().assign(kind=lambda f: np.where(f["region"] == "x", "old", "new"))
    tiny = ["--horizon", "3", "--epochs", "1", "--no-backtest"]
    status, folder = run(frame, "--keys", "state * kind", *tiny)
    assert status == 0
    certificate = json.loads((folder / "certificate.json").read_text())
    assert certificate["levels"] == {"total": 1, "total/state": 2, "total/kind": 2, "total/state/kind": 4}
    assert certificate["backtest"] is None
    assert "No backtest was made" in (folder / "report.html").read_text()
    config = TINY[:-1] + ", keys: [[kind], [state], [state, kind, region]]}"
    assert run(frame, *tiny, config=config)[0] == 0
    levels = json.loads((folder / "certificate.json").read_text())["levels"]
    assert levels == {"total": 1, "total/kind": 2, "total/state": 2, "total/state/kind/region": 4}


def test_plans_and_caps(run: Any, no_classical: None) -> None:
    stamps = pd.date_range("2022-01-01", periods=6, freq="MS").strftime("%Y-%m-%d")
    pd.DataFrame({"unique_id": "Total", "ds": stamps[:4], "plan": 400.0}).to_csv("plan.csv", index=False)
    pd.DataFrame({"unique_id": ["Total/A/x"], "cap": [20.0]}).to_csv("cap.csv", index=False)
    options = [*KEYS, "--fixed", "plan.csv", "--upper", "cap.csv", "--nonnegative", "--draws", "40"]
    status, folder = run(table(), *options)
    assert status == 0
    draws = cube(pd.read_csv(folder / "draws.csv", float_precision="round_trip"))
    np.testing.assert_allclose(draws[:, :4, 0], 400.0, rtol=1e-9)
    assert draws[:, 4:, 0].std() > 0
    assert draws[..., 3].max() <= 20 + 1e-9
    np.testing.assert_allclose(draws[..., :3], draws[..., 3:] @ S[:3].T, rtol=1e-9)
    assert json.loads((folder / "certificate.json").read_text())["feasible"] is True


def test_a_plan_above_the_caps_is_not_feasible(
    run: Any, no_classical: None, capsys: pytest.CaptureFixture[str]
) -> None:
    pd.DataFrame({"unique_id": ["Total", "Total/A"], "plan": [10.0, 20.0]}).to_csv("plan.csv", index=False)
    status, folder = run(table(), *KEYS, "--fixed", "plan.csv", "--nonnegative", "--no-backtest")
    assert status == 3
    assert not json.loads((folder / "certificate.json").read_text())["feasible"]
    assert "Bounds, caps and plans contradict each other" in capsys.readouterr().out
    assert "<strong>Not feasible.</strong>" in (folder / "report.html").read_text()


def test_known_futures_by_file_and_holidays(run: Any, no_classical: None, capsys: pytest.CaptureFixture[str]) -> None:
    frame = table().assign(price=lambda f: f.groupby(["state", "region"]).cumcount() % 7, size=1.0)
    stamps = pd.date_range("2022-01-01", periods=6, freq="MS").strftime("%Y-%m-%d")
    pd.DataFrame({"date": stamps, "price": range(6)}).to_csv("future.csv", index=False)
    options = ["--future", "future.csv", "--country-holidays", "CH", "--target-column", "sales", "--no-backtest"]
    status, folder = run(frame, *KEYS, *options)
    assert status == 0
    assert "Columns that are not used: size" in capsys.readouterr().err
    assert json.loads((folder / "certificate.json").read_text())["regressors_used"] == ["price", "holidays"]
    assert "price, holidays" in (folder / "report.html").read_text()
    named = [*KEYS, "--regressors", "price,size", "--no-backtest"]
    assert run(frame, *named)[0] == 0
    assert "The column 'price' is not used: 6 of the next 6 values are not known" in capsys.readouterr().err


def test_several_windows(run: Any, no_classical: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(table(), *KEYS[:-1], "2")[0] == 0
    record = json.loads(Path("shop-forecast/certificate.json").read_text())["backtest"]
    assert [window["first"] for window in record["windows"]] == ["2021-01", "2021-07"]
    scores = record["scores"]["probhard-or"]
    assert scores["crps"] == pytest.approx(np.mean(scores["crps_windows"]))
    assert "mean of 2 windows" in capsys.readouterr().out


def test_infeasible_draws_are_told(run: Any, no_classical: None, capsys: pytest.CaptureFixture[str]) -> None:
    status, folder = run(table(), *KEYS, "--method", "base")
    assert status == 3
    certificate = json.loads((folder / "certificate.json").read_text())
    assert not certificate["feasible"]
    assert certificate["infeasible"] == certificate["checked"] == 41 * 6
    printed = capsys.readouterr().out
    assert "NOT feasible" in printed
    assert "contradict" not in printed
    assert 'class="bad"' in (folder / "report.html").read_text()


def test_heavy_tails_by_name(run: Any, no_classical: None) -> None:
    status, folder = run(table(), *KEYS, config=TINY[:-1] + ", family: student_t(5), lr: 1e-3}")
    assert status == 0
    assert json.loads((folder / "certificate.json").read_text())["network"]["family"] == "student-t, df 5"
    assert HierarchicalForecaster.load(folder / "model").network["family"] == student_t(5.0)


@pytest.mark.parametrize("spoilt", ["", "Total", "<aggregated>"])
def test_rows_of_aggregates_are_not_counted_twice(run: Any, capsys: pytest.CaptureFixture[str], spoilt: str) -> None:
    frame = table()
    sums = frame.groupby("date", as_index=False)["sales"].sum().assign(state=spoilt, region=spoilt)
    assert run(pd.concat([frame, sums]), *KEYS)[0] == 2
    assert "would count twice" in capsys.readouterr().err


def test_a_short_history_leaves_out_the_classical_row_only(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("statsforecast")
    config = TINY.replace("context_length: 6", "context_length: 2, lags_seq: [1]")
    status, _ = run(table(rows=7), *KEYS, "--horizon", "1", config=config)
    assert status in (0, 4)  # after one epoch on six rows, the total may be anything
    assert "AutoETS could not be fitted to 6 rows" in capsys.readouterr().err


def test_held_out_rows() -> None:
    from probhard.forecasting import load

    *_, (train, test) = module.held_out(load(), 12, 3)
    assert (str(train.index[-1]), str(test.index[0]), len(test.index)) == ("2014-12", "2015-01", 12)


@pytest.mark.slow
def test_embedded_data(tmp_path: Path) -> None:
    assert main(["forecast", "--nonnegative", "--output", str(tmp_path / "out")]) == 0
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    scores = certificate["backtest"]["scores"]
    assert certificate["incoherence"]["relative"] < 1e-9
    assert scores["probhard"]["crps"] < scores["seasonal naive"]["crps"]
