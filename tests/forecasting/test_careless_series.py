"""Careless input: rejected with an error in three parts or handled, never misread."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest

import probhard as ph
from forecasting.helpers import KEYS, TINY, assert_three_parts, fitted, frame
from probhard.cli import main
from probhard.errors import ProbhardError
from probhard.forecasting import (
    DeepVAREstimator,
    HierarchicalForecaster,
    ProjectionReconciler,
    cross_temporal,
    from_frame,
)
from probhard.forecasting.models import baselines, classical
from probhard.forecasting.models.predictor import DeepVARPredictor
from probhard.forecasting.models.windows import Windows
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.reconcile import Reconciliation

S = np.vstack([np.ones((1, 2)), np.eye(2)])
MEAN, SPREAD = np.array([[10.0] * 3, [4.0] * 3, [5.0] * 3]), np.ones((3, 3))  # (n, H)


def estimator(**options):
    return DeepVAREstimator("M", 2, S, **options)


def entries(**changed):
    entry = {"start": pd.Period("2020-01", "M"), "target": np.ones((3, 30)), **changed}
    return Windows([{name: value for name, value in entry.items() if value is not None}], estimator().layout)


REFUSED = {
    **{
        f"{name}={value}": (lambda name=name, value=value: estimator(**{name: value}), f"Got {name}=")
        for name, value in [
            ("batch_size", 0),
            ("num_batches_per_epoch", 0),
            ("num_parallel_samples", 0),
            ("num_layers", 0),
            ("hidden_size", 2.5),
            ("rank", -1),
            ("lr", -1.0),
            ("lr", float("nan")),
            ("dropout_rate", 2.0),
            ("weight_decay", -1.0),
            ("family", "student_t"),
        ]
    },
    "no start": (lambda: entries(start=None), "has no 'start'"),
    "no target": (lambda: entries(target=None), "has no 'target'"),
    "mask": (lambda: entries(observed_values=np.ones((2, 30))), "observed_values have shape"),
    "no keys": (lambda: from_frame(frame(), []), r"Got keys=\[\]"),
    "keys twice": (lambda: from_frame(frame(), ["state", "state"]), "Got keys="),
    "lazy frame": (lambda: from_frame(pl.from_pandas(frame()).lazy(), KEYS), "Got a LazyFrame"),
    "no frame": (lambda: from_frame([1, 2], KEYS), "Got a list"),
    "no horizon": (lambda: baselines.seasonal_naive(from_frame(frame(), KEYS), 0), "horizon of 0"),
    "places as an array": (lambda: cross_temporal(S, 12), "The places are a ndarray"),
    "broken horizon": (lambda: cross_temporal(ph.Hierarchy(S), 12.0), "A horizon of 12.0"),
    "one period": (lambda: cross_temporal(ph.Hierarchy(S), 12, 3), "in blocks of"),
    "broken period": (lambda: cross_temporal(ph.Hierarchy(S), 12, [1, 2.5]), "2.5"),
    "fixed by a text": (lambda: ProjectionReconciler(fixed={0: "8"}), "fixed of the node 0 is '8'"),
    "fixed by nothing": (lambda: ProjectionReconciler(fixed={0: None}), "fixed of the node 0 is None"),
    "bound by a text": (lambda: ProjectionReconciler(upper={0: "a"}), "upper of the node 0"),
    "no such node": (lambda: ProjectionReconciler(fixed={99: 5.0})(S, MEAN, SPREAD), "no node or level 99"),
    "too few values": (lambda: ProjectionReconciler(fixed={0: [5.0, 6.0]})(S, MEAN, SPREAD), "2 values for 3 steps"),
    "a large seed": (
        lambda: Reconciliation(ph.Hierarchy(S))(Forecasts(MEAN.T, SPREAD.T), seed=2**70),
        "It seeds a torch generator",
    ),
    "all constant": (
        lambda: classical.reconcile(classical.base_forecast(from_frame(frame().assign(y=5.0), KEYS), 3), "mint"),
        "MinT could not be fitted",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_three_parts(case):
    call, message = REFUSED[case]
    with pytest.raises(ProbhardError, match=message) as raised:
        call()
    assert_three_parts(raised.value)


@pytest.fixture(scope="module")
def model():
    return fitted()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"h": 2.5}, "h=2.5"),
        ({"h": 0}, "h=0"),
        ({"h": 3, "level": 80}, "level=80"),
        ({"h": 3, "level": ["a"]}, "level a"),
        ({"h": 3, "level": [180]}, "level 180"),
    ],
)
def test_forecasts_that_cannot_be_asked_for(model, options, message):
    with pytest.raises(ProbhardError, match=message):
        model.predict(**options)


def test_an_update_is_of_the_same_nodes_and_steps(model):
    renamed = frame().assign(region=lambda table: table["region"].replace({"x": "zz"}))
    with pytest.raises(ProbhardError, match="other nodes"):
        model.update(renamed)
    quarterly = frame().assign(ds=lambda table: pd.DatetimeIndex(table["ds"]).map(_quarter))
    with pytest.raises(ProbhardError, match="the frequency Q-DEC"):
        model.update(quarterly)
    moved = from_frame(frame().assign(state=["A"] * 40 + ["B"] * 120), KEYS)
    with pytest.raises(ProbhardError, match=r"other nodes|other sums"):
        model.update(moved)


def _quarter(stamp):
    return pd.Timestamp(2000, 1, 1) + pd.DateOffset(months=3 * (12 * (stamp.year - 2018) + stamp.month))


@pytest.mark.parametrize("file", ["deepvar.json", "constraint.npz", "weights.pt"])
@pytest.mark.parametrize("content", [None, b"[", b"[]"])
def test_damaged_folders(model, tmp_path: Path, file, content):
    model.save(tmp_path)
    folder = tmp_path / "predictor"
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    for load in (lambda: DeepVARPredictor.deserialize(folder), lambda: HierarchicalForecaster.load(tmp_path)):
        with pytest.raises(ProbhardError, match=file.replace(".", r"\.")):
            load()


def test_damaged_forecasters(model, tmp_path: Path):
    model.save(tmp_path)
    (tmp_path / "history.npz").write_bytes(b"")
    with pytest.raises(ProbhardError, match="cannot be read"):
        HierarchicalForecaster.load(tmp_path)
    (tmp_path / "forecaster.json").write_text(json.dumps([1]))
    with pytest.raises(ProbhardError, match="does not hold probhard-forecaster"):
        HierarchicalForecaster.load(tmp_path)


def test_reconcilers_that_differ_have_columns_of_their_own():
    reconcilers = [
        ProjectionReconciler(),
        ProjectionReconciler(seed=1),
        *(ProjectionReconciler(fixed={0: value}) for value in (8.0, 20.0)),
        *(ProjectionReconciler(upper={0: np.full(3, value)}) for value in (8.0, 20.0)),
        *(ProjectionReconciler(fixed=dict.fromkeys(range(4), value)) for value in (1.0, 2.0)),
    ]
    assert len({str(method._init_params) for method in reconcilers}) == len(reconcilers)


@pytest.mark.parametrize("name", ["weekly", "month ends"])
def test_the_command_goes_on_with_the_stamps_of_the_file(tmp_path: Path, name):
    stamps = pd.date_range("2019-01-31", periods=43, freq={"weekly": "W-SUN", "month ends": "ME"}[name])
    table = frame(rows=40)
    table["ds"] = np.tile(stamps[:40].to_numpy(), 4)
    table.to_csv(tmp_path / "h.csv", index=False)
    config = tmp_path / "c.yaml"
    config.write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in TINY.items()))
    folder = tmp_path / "out"
    (folder / "fits").mkdir(parents=True)  # of an earlier run, as the draws
    (folder / "draws.parquet").write_bytes(b"draws")
    asked = ["--keys", "state,region", "--horizon", "3", "--output", str(folder), "--config", str(config)]
    assert main(["forecast", str(tmp_path / "h.csv"), "--no-backtest", *asked]) in (0, 4)  # hardly trained
    forecasts = pd.read_csv(folder / "forecasts.csv", parse_dates=["ds"])
    assert forecasts["ds"].tolist()[:3] == list(stamps[40:])
    assert not (folder / "draws.parquet").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("lr: -1", "a positive number"),
        ("lr: .nan", "a positive number"),
        ("dropout_rate: 2", "from 0 to below 1"),
        ("weight_decay: -1", "not negative"),
        ("seed: 99999999999999999999", "from 0 to"),
        ("a: [", "The configuration"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, capsys, lines, message):
    config = tmp_path / "c.yaml"
    config.write_text(lines)
    assert main(["forecast", "us-employment", "--config", str(config)]) == 2
    assert message in capsys.readouterr().err


def test_one_text_among_the_targets_is_named(tmp_path: Path, capsys):
    table = frame().rename(columns={"y": "sales"}).astype({"sales": object})
    table.loc[6, "sales"] = "n/a?"
    table.to_csv(tmp_path / "h.csv", index=False)
    assert main(["forecast", str(tmp_path / "h.csv"), "--keys", "state,region"]) == 2
    assert "The column 'sales' has the text 'n/a?' in row 7" in capsys.readouterr().err
