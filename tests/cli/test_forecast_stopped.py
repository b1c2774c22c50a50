"""``probhard forecast`` that is refused or stopped: messages, exit status, and what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from cli.forecast_runs import KEYS, runner, table
from probhard.cli import main
from probhard.forecasting import HierarchicalForecaster
from probhard.forecasting.forecaster import HierarchicalForecaster as Forecaster


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return runner(tmp_path)


def stopping(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Ctrl-C in the first or second training."""
    calls, fit = [], Forecaster.fit

    def stopped(self: Forecaster, *args: Any, **options: Any) -> Forecaster:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return fit(self, *args, **options)

    monkeypatch.setattr(Forecaster, "fit", stopped)


def test_interruption_of_the_backtest(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopping(monkeypatch, 1)
    status, folder = run(table(), *KEYS)
    assert status == 130
    assert "nothing was written" in capsys.readouterr().err
    assert not folder.exists()


def test_interruption_of_the_refit(
    run: Any, no_classical: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopping(monkeypatch, 2)
    status, folder = run(table(), *KEYS)
    assert status == 130
    assert "Training on all rows was stopped: the forecasts start at 2021-12" in capsys.readouterr().err
    assert "learned from the rows to 2021-06 only" in (folder / "report.html").read_text()
    assert pd.read_csv(folder / "forecasts.csv")["ds"].min() == "2022-01-01"  # after the last row all the same
    assert HierarchicalForecaster.load(folder / "model").data.index[-1] == pd.Period("2021-12", "M")


@pytest.mark.parametrize(
    ("options", "frame", "message"),
    [
        (["--keys", "state,city"], table(), "no column 'city'. --keys"),
        ([], table(), "No --keys were given"),
        ([*KEYS, "--time-column", "when"], table(), "no column 'when'"),
        (KEYS, table().drop(columns="date"), "The column of the time was not found"),
        (KEYS, table().assign(more=1.0), "The column of the target was not found"),
        ([*KEYS, "--target-column", "none"], table(), "The column of the target was not found"),
        (["--keys", "state,region", "--horizon", "24"], table(), "48 rows and the horizon 24"),
        ([*KEYS, "--level", "80,many"], table(), "not a list of numbers"),
        ([*KEYS, "--level", "180"], table(), "level 180"),
        ([*KEYS, "--method", "magic"], table(), "method='magic'"),
        ([*KEYS, "--format", "xlsx"], table(), "format='xlsx'"),
        ([*KEYS, "--nonnegative"], table().assign(sales=-1.0), "outside its bounds"),
        ([*KEYS, "--output", "run.yaml"], table(), "is a file"),
        (KEYS, table().assign(sales=0.0), "nothing but zeros"),
        ([*KEYS, "--keys", "state,,region"], table(), "Got keys="),
        ([*KEYS, "--immutable", "Total/C"], table(), "no node 'Total/C'"),
        ([*KEYS, "--country-holidays", "XX"], table(), "No holidays are known"),
        ([*KEYS, "--fixed", "none.csv"], table(), "none.csv"),
    ],
)
def test_refusals(run: Any, capsys: pytest.CaptureFixture[str], options: list[str], frame: Any, message: str) -> None:
    status, folder = run(frame, *options)
    assert status == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{horizons: 3}", "an option 'horizons'"),
        ("[1, 2]", "holds no options"),
        ("{hierarchy: 3}", "an option"),
        ("{num_samples: many}", "num_samples is 'many'. It must be a whole number from 2"),
        ("{batch_size: 2.5}", "batch_size is 2.5"),
        ("{draws: 0.5}", "draws is 0.5"),
        ("{hidden_size: 0}", "hidden_size is 0"),
        ("{lr: fast}", "lr is 'fast'. It must be a positive number"),
        ("{calibrate: 3}", "true or false"),
        ("{upper: {Total: x}}", "numbers by the names of nodes"),
        ("{family: student_t(1)}", "df = 1"),
        ("{family: student_t}", "student_t(5) with its degrees of freedom"),
    ],
)
def test_configurations_that_are_refused(
    run: Any, capsys: pytest.CaptureFixture[str], config: str, message: str
) -> None:
    assert run(table(), *KEYS, config=config)[0] == 2
    assert message in capsys.readouterr().err


def test_names_and_files_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", "nowhere.csv", "--keys", "a"]) == 2
    assert "nowhere.csv cannot be read" in capsys.readouterr().err
    assert main(["forecast", "us-unemployment"]) == 2
    assert "us-employment" in capsys.readouterr().err
    assert main(["forecast", "us-employment", "--keys", "a"]) == 2
    assert "Leave out --keys" in capsys.readouterr().err
