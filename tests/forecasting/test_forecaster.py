"""HierarchicalForecaster: frames in and out, paths against plain recomputations, saved folders, rejected input."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import cvxpy as cp
import numpy as np
import pandas as pd
import polars as pl
import pytest

from forecasting.helpers import KEYS, NODES, TINY, TWO_GROUPS, fitted, frame, incoherence
from probhard.errors import ParameterError
from probhard.forecasting import HierarchicalForecaster, from_frame
from probhard.forecasting.models import defaults
from probhard.forecasting.models.training import DeepVARModule


@pytest.fixture
def plain() -> HierarchicalForecaster:
    return fitted(nonnegative=True)


def test_frames_hold_means_and_quantiles_of_the_paths(plain: HierarchicalForecaster) -> None:
    table = plain.predict(4, level=[80, 95])
    model = "probhard-or"
    ends = [f"{model}-{side}-{level}" for level in (80, 95) for side in ("lo", "hi")]
    assert sorted(table.columns) == sorted(["unique_id", "ds", model, *ends])
    assert table["unique_id"].unique().tolist() == NODES
    assert table["ds"].tolist()[:4] == list(pd.date_range("2021-05-01", periods=4, freq="MS"))
    draws = plain.sample(4)
    assert draws.shape == (60, 4, 7)
    assert draws.dtype == np.float64
    assert incoherence(draws) < 1e-14
    assert draws.min() >= 0
    wide = {c: table[c].to_numpy().reshape(7, 4).T for c in [model, *ends]}
    np.testing.assert_allclose(wide[model], draws.mean(0), rtol=1e-12)
    assert incoherence(wide[model]) < 1e-14
    for column, p in zip(ends, (0.1, 0.9, 0.025, 0.975)):
        np.testing.assert_allclose(wide[column], np.percentile(draws, 100 * p, axis=0), rtol=1e-12)
    assert plain.predict(2, level=None).columns.tolist() == ["unique_id", "ds", model]


def test_paths_of_any_length_begin_alike(plain: HierarchicalForecaster) -> None:
    np.testing.assert_array_equal(plain.sample(2), plain.sample(7)[:, :2])
    assert plain.sample().shape == (60, 4, 7)  # the horizon of training
    assert plain.sample(3, num_samples=5).shape == (5, 3, 7)


def test_polars_in_polars_out(plain: HierarchicalForecaster) -> None:
    table = pl.from_pandas(frame()).with_columns(pl.col("ds").cast(pl.Date))
    forecasts = fitted(table, nonnegative=True).predict(4)
    assert isinstance(forecasts, pl.DataFrame)
    assert forecasts["ds"].dtype == pl.Date
    np.testing.assert_array_equal(forecasts["probhard-or-hi-95"].to_numpy(), plain.predict(4)["probhard-or-hi-95"])


def test_summation_frame_gives_the_same_paths(plain: HierarchicalForecaster) -> None:
    bottoms = ["Ax", "Ay", "Bx", "Bz"]
    summation = pd.DataFrame(TWO_GROUPS, columns=bottoms)
    summation.insert(0, "unique_id", ["all", "A", "B", *bottoms])
    data = from_frame(frame(), KEYS)
    names = dict(zip(NODES, summation["unique_id"]))
    long = pd.concat(
        pd.DataFrame({"unique_id": names[node], "ds": data.index.to_timestamp(), "y": data.values[:, i]})
        for i, node in enumerate(data.names)
    )
    options = {"nonnegative": True, "num_samples": 60, "horizon": 4, **TINY}
    forecaster = HierarchicalForecaster(S=summation, **options).fit(long)
    np.testing.assert_allclose(forecaster.sample(), plain.sample(), rtol=1e-5)
    assert forecaster.predict()["unique_id"].unique().tolist() == ["all", "A", "B", *bottoms]


def test_seeds(plain: HierarchicalForecaster) -> None:
    np.testing.assert_array_equal(fitted(nonnegative=True).sample(), plain.sample())
    assert np.abs(fitted(nonnegative=True, seed=1).sample() - plain.sample()).max() > 1e-3


def test_changes_are_summed_from_the_last_value_on() -> None:
    forecaster = fitted(changes=True)
    data = forecaster.data
    steps = data.values[1:] - data.values[:-1]
    entry = {"start": data.index[1], "target": steps.T, "item_id": "changes"}
    (drawn,) = forecaster.predictor.predict([entry], num_samples=60)
    expected = data.values[-1] + np.cumsum(drawn.samples, axis=1)
    np.testing.assert_allclose(forecaster.sample(), expected, rtol=1e-6)
    assert incoherence(forecaster.sample()) < 1e-14


@pytest.mark.parametrize("method", ["probhard-or", "probhard-ob"])
def test_bounds_of_changes_are_met_by_projecting(method: str) -> None:
    forecaster = fitted(frame(low=0.0), changes=True, method=method, nonnegative=True, upper={"Total": 900.0})
    draws = forecaster.sample(8)
    forecaster.nonnegative, forecaster.upper = False, None
    free = forecaster.sample(8)
    assert free.min() < -1  # the bound matters
    assert draws.min() >= 0
    assert draws[..., 0].max() <= 900 * (1 + 1e-12)
    assert incoherence(draws) < 1e-14
    weight = np.ones_like(free[0]) if method == "probhard-or" else 1 / free.var(0, ddof=1)
    low = np.argsort(free.min((1, 2)))[:3]
    for i in low:
        bottom = cp.Variable((8, 4), nonneg=True)
        distance = cp.sum_squares(cp.multiply(np.sqrt(weight), bottom @ TWO_GROUPS.T - free[i]))
        cp.Problem(cp.Minimize(distance), [cp.sum(bottom, axis=1) <= 900]).solve(solver=cp.CLARABEL)
        np.testing.assert_allclose(draws[i], bottom.value @ TWO_GROUPS.T, atol=2e-3)


def test_smooth_series_are_told_from_seasonal_ones() -> None:
    seasonal = from_frame(frame(), KEYS)
    drifting = frame().assign(y=1000 + 0.01 * frame()["y"])
    assert not defaults.smooth(seasonal)
    assert defaults.smooth(from_frame(drifting, KEYS))
    forecaster = fitted(drifting)
    assert forecaster.learns_changes is True
    assert forecaster.fit(frame()).learns_changes is False  # chosen again


def test_bases_without_projection_are_left_as_they_are() -> None:
    assert incoherence(fitted(method="base").sample()) > 1e-6


def test_upper_bounds_by_node() -> None:
    top = frame().groupby("ds")["y"].sum().max()
    draws = fitted(upper={"Total": float(top)}).sample(8)
    assert draws[..., 0].max() <= top * (1 + 1e-12)
    assert incoherence(draws) < 1e-14


def test_gaps_do_not_stop_it() -> None:
    table = frame()
    table = table.drop(index=[5, 50, 51])
    table.loc[100, "y"] = np.nan
    for changes in (False, True):
        draws = fitted(table, changes=changes).sample()
        assert np.isfinite(draws).all()
        assert incoherence(draws) < 1e-14


def test_update_starts_later_with_the_same_network(plain: HierarchicalForecaster) -> None:
    forecaster = fitted(frame(36))
    before = forecaster.predictor
    forecasts = forecaster.update(frame(40)).predict(1)
    assert forecaster.predictor is before
    assert forecasts["ds"].unique().tolist() == plain.predict(1)["ds"].unique().tolist()


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("kind", ["pandas", "polars", "ends", "summation"])
def test_saved_and_loaded(tmp_path: Path, kind: str, changes: bool) -> None:
    options: dict[str, Any] = {"nonnegative": True, "upper": {NODES[0]: 1e4}, "changes": changes}
    if kind == "summation":
        data = from_frame(frame(), KEYS)
        tags = {"total": NODES[:1], "state": NODES[1:3], "region": NODES[3:]}
        long = pd.concat(
            pd.DataFrame({"unique_id": node, "ds": data.index.to_timestamp(), "y": data.values[:, i]})
            for i, node in enumerate(NODES)
        )
        sizes = {"num_samples": 60, "horizon": 4, **TINY}
        forecaster = HierarchicalForecaster(S=TWO_GROUPS, tags=tags, **sizes, **options).fit(long)
    else:
        table: Any = frame(ends=kind == "ends").rename(columns={"ds": "month"})
        table = pl.from_pandas(table).with_columns(pl.col("month").cast(pl.Date)) if kind == "polars" else table
        sizes = {"num_samples": 60, "horizon": 4, **TINY}
        forecaster = HierarchicalForecaster(KEYS, **sizes, **options).fit(table, time_col="month")
    forecaster.save(tmp_path / "kept")
    assert {path.suffix for path in (tmp_path / "kept").rglob("*") if path.is_file()} <= {".json", ".npz", ".pt"}
    again = HierarchicalForecaster.load(tmp_path / "kept")
    assert again.changes is changes
    first, second = forecaster.predict(5), again.predict(5)
    assert type(first) is type(second)
    assert first.equals(second)
    if kind == "ends":
        assert first["month"][0] == pd.Timestamp("2021-05-31")
    if kind == "summation":
        assert again.update(long).predict(5).equals(first)
        assert again.data.levels.keys() == forecaster.data.levels.keys()


def test_loading_refuses_other_folders(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="cannot be read"):
        HierarchicalForecaster.load(tmp_path)


def test_refusals() -> None:
    forecaster = HierarchicalForecaster(KEYS, **TINY)
    with pytest.raises(ParameterError, match="has not been fitted"):
        forecaster.predict(3)
    with pytest.raises(ParameterError, match="outside its bounds"):
        fitted(frame().assign(y=-1.0), nonnegative=True)
    with pytest.raises(ParameterError, match="outside its bounds"):
        fitted(upper=10.0)
    with pytest.raises(ParameterError, match="no node 'nobody'"):
        fitted(upper={"nobody": 10.0})
    with pytest.raises(ParameterError, match="level 120"):
        fitted().predict(3, level=[120])
    with pytest.raises(ParameterError, match="h=0"):
        fitted().predict(0)


def test_settings_follow_size_and_frequency() -> None:
    data = from_frame(frame(), KEYS)
    settings = defaults.defaults(data, 4, changes=False)
    assert settings["lags_seq"] == [1, 12]
    assert settings["context_length"] == 24  # two seasons
    short = defaults.defaults(from_frame(frame(16), KEYS), 2, changes=False)
    assert short["lags_seq"] == [1]  # the history is too short for a seasonal lag
    assert defaults.default_horizon(data) == 10


def test_interruption_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DeepVARModule, "training_step", stop)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fitted()
    assert signal.getsignal(signal.SIGINT) is before  # Lightning leaves it ignored


def test_draws_are_as_wide_as_past_errors_and_stay_feasible(tmp_path: Path) -> None:
    forecaster = fitted(nonnegative=True, calibrate=True, changes=False)
    assert forecaster.spread_factor != 1
    draws = forecaster.sample()
    assert incoherence(draws) < 1e-12
    assert draws.min() >= 0
    plain = fitted(nonnegative=True, changes=False).sample()
    inside = plain.min((0, 1)) > 0  # where no bound is active, only the spread differs
    ratio = draws.std(0)[:, inside] / plain.std(0)[:, inside]
    assert np.median(ratio) == pytest.approx(forecaster.spread_factor, rel=0.2)
    forecaster.save(tmp_path)
    again = HierarchicalForecaster.load(tmp_path)
    assert again.spread_factor == forecaster.spread_factor
    np.testing.assert_array_equal(again.sample(), draws)
