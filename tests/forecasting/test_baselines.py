"""Naive and classical forecasts: by hand, against statsforecast and MinT, and against published figures."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hierarchicalforecast.core import HierarchicalReconciliation
from hierarchicalforecast.methods import MinTrace
from scipy.stats import spearmanr
from statsforecast.models import AutoETS

from forecasting.helpers import FIVE_NODES
from probhard import Hierarchy, ParameterError
from probhard.forecasting import (
    BaseForecast,
    HierarchicalData,
    base_forecast,
    evaluate,
    incoherence,
    last_value,
    load,
    reconcile,
    seasonal_bootstrap,
    seasonal_naive,
    to_long,
)
from probhard.forecasting.models.classical import ROWS, reordered


def quarterly(bottom: np.ndarray, season: int = 4) -> HierarchicalData:
    index = pd.period_range("2000Q1", periods=len(bottom), freq="Q")
    return HierarchicalData.from_matrix(bottom, FIVE_NODES, index, season=season)


@pytest.fixture
def history() -> np.ndarray:
    random = np.random.default_rng(0)
    return 50 + 10 * np.sin(np.arange(30)[:, None] * np.pi / 2 + np.arange(3)) + random.normal(size=(30, 3))


# --- without a model ---


def test_last_value_and_seasonal_naive_by_hand(history):
    data = quarterly(history)
    np.testing.assert_allclose(last_value(data, 6)[0], np.tile(FIVE_NODES @ history[-1], (6, 1)))
    for k, row in enumerate(seasonal_naive(data, 6)[0]):
        np.testing.assert_allclose(row, FIVE_NODES @ history[26 + k % 4])
    np.testing.assert_array_equal(seasonal_naive(quarterly(history, season=1), 6), last_value(data, 6))


def test_missing_values_are_carried_forward(history):
    history[-1, 0] = history[-3:, 1] = np.nan
    history[[1, 5, 9, 13, 17, 21, 25, 29], 2] = np.nan  # a season without values
    data = quarterly(history)
    np.testing.assert_allclose(last_value(data, 1)[0, 0, 2:], [history[-2, 0], history[-4, 1], history[-2, 2]])
    naive = seasonal_naive(data, 4)[0]
    np.testing.assert_allclose(naive[3, 2:], [history[25, 0], history[25, 1], history[-2, 2]])
    np.testing.assert_allclose(naive[0, 2:], [history[26, 0], history[26, 1], history[26, 2]])
    assert incoherence(naive, data.hierarchy).relative < 1e-15


def test_bootstrap_adds_past_changes_of_all_series_at_once(history):
    data = quarterly(history)
    draws = seasonal_bootstrap(data, 6, samples=500, seed=3)
    assert draws.shape == (500, 6, 5)
    changes = (draws - seasonal_naive(data, 6))[..., 2:].reshape(-1, 3)
    past = history[4:] - history[:-4]
    distance = np.abs(changes[:, None] - past).max(-1)
    assert distance.min(1).max() < 1e-12
    assert set(distance.argmin(1)) == set(range(26))
    assert abs(spearmanr(changes[0::6, 0], changes[1::6, 0])[0]) < 0.2  # steps are drawn independently
    np.testing.assert_array_equal(draws, seasonal_bootstrap(data, 6, samples=500, seed=3))
    assert (draws != seasonal_bootstrap(data, 6, samples=500, seed=4)).any()
    assert incoherence(draws, data.hierarchy).relative < 1e-14
    history[0::2, 0] = history[1::2, 1] = np.nan
    with pytest.raises(ParameterError, match="no two complete rows 4 apart"):
        seasonal_bootstrap(quarterly(history), 6)


@pytest.mark.parametrize(
    ("name", "last", "naive", "bootstrap"),
    [
        ("labour", 39.1, 33.3, 39.0),
        ("tourism", 186, 119, 97.1),
        ("tourism_large", 298, 196, 153.2),
        ("traffic", 318, 130, 99.6),
        ("wiki", 208.9, 263, 216),
    ],
)
@pytest.mark.usefixtures("hierarchical_data")
def test_published_figures(name, last, naive, bootstrap):
    train, test = load(name).train_test()
    steps = len(test.index)
    assert abs(1e3 * evaluate(last_value(train, steps), test).crps - last) < 0.6
    assert abs(1e3 * evaluate(seasonal_naive(train, steps), test).crps - naive) < 0.6
    scores = [1e3 * evaluate(seasonal_bootstrap(train, steps, seed=seed), test).crps for seed in range(5)]
    assert abs(np.mean(scores) - bootstrap) < 0.035 * bootstrap  # one run's Monte Carlo error on Traffic: 2 %


# --- classical forecasts ---


@pytest.fixture(scope="module")
def base() -> BaseForecast:
    random = np.random.default_rng(0)
    bottom = 50 + 10 * np.sin(np.arange(30)[:, None] * np.pi / 2 + np.arange(3)) + random.normal(size=(30, 3))
    bottom[:3, 2] = np.nan  # starts later
    return base_forecast(quarterly(bottom), 5)


def test_base_forecasts_are_those_of_each_series_alone(base):
    for series in (0, 3, 4):
        y = base.data.values[:, series]
        y = y[~np.isnan(y)]
        alone = AutoETS(season_length=4).forecast(y, h=5, level=[80], fitted=True)
        np.testing.assert_allclose(base.mean[:, series], alone["mean"], rtol=1e-6)
        deviation = (alone["hi-80"] - alone["mean"]) / 1.2815515655446004
        np.testing.assert_allclose(base.stddev[:, series], deviation, rtol=1e-5)
        np.testing.assert_allclose(base.fitted[30 - len(y) :, series], alone["fitted"], rtol=1e-6)
    assert np.isnan(base.fitted[:3, [0, 4]]).all()


def test_every_row_is_coherent_with_the_right_means_and_spread(base):
    bottom = base.mean[:, 2:]
    drawn = {row: reconcile(base, row, samples=4000, seed=1) for row in ROWS}
    for draws in drawn.values():
        assert incoherence(draws, base.data.hierarchy).relative < 1e-14
    np.testing.assert_allclose(drawn["naivebu"][0], bottom @ FIVE_NODES.T)
    error = np.sqrt(1 / 4000) * base.stddev
    for row, point in (("bu-normal", "naivebu"), ("mint-normal", "mint"), ("permbu-mint", "mint")):
        assert (np.abs(drawn[row].mean(0) - drawn[point][0]) < 5 * error).all()
    for row in ("bu-normal", "permbu-mint"):
        np.testing.assert_allclose(drawn[row].std(0)[:, 2:], base.stddev[:, 2:], rtol=0.06)
    np.testing.assert_allclose(
        drawn["bu-normal"].std(0)[:, :2] ** 2, base.stddev[:, 2:] ** 2 @ FIVE_NODES[:2].T, rtol=0.1
    )
    np.testing.assert_array_equal(drawn["permbu-mint"], reconcile(base, "permbu-mint", samples=4000, seed=1))


def test_minimum_trace_against_nixtlas_frames():
    random = np.random.default_rng(4)
    known = quarterly(random.normal(50, 5, (30, 3)))
    mixed = random.normal(size=(5, 5))
    forecast = BaseForecast(
        known, random.normal(60, 5, (2, 5)), np.ones((2, 5)), known.values + random.normal(size=(30, 5)) @ mixed
    )
    inside = to_long({"y": known.values, "model": forecast.fitted}, known.names, known.index)
    outside = to_long(forecast.mean, known.names, known.future(2), target_col="model")
    summation = pd.DataFrame(FIVE_NODES, columns=known.names[2:])
    summation.insert(0, "unique_id", known.names)
    tags = {level: np.array([known.names[i] for i in at]) for level, at in known.levels.items()}
    theirs = HierarchicalReconciliation([MinTrace("mint_shrink")]).reconcile(outside, tags, summation, inside)
    expected = theirs["model/MinTrace_method-mint_shrink"].to_numpy().reshape(5, 2).T
    np.testing.assert_allclose(reconcile(forecast, "mint")[0], expected, rtol=1e-9)
    assert np.abs(expected - forecast.mean[:, 2:] @ FIVE_NODES.T).max() > 0.1


def test_reordering_keeps_margins_and_restores_ranks():
    random = np.random.default_rng(0)
    hierarchy = Hierarchy(FIVE_NODES)
    draws, half = random.normal(size=(400, 3, 3)), random.normal(size=(400, 2))
    errors = np.zeros((400, 5))
    errors[:, 2], errors[:, 3] = half[:, 0], np.exp(half[:, 0])  # a and b move together
    errors[:, 4], errors[:, 1] = half[:, 1], -half[:, 1]  # c against their sum
    result = reordered(draws, errors, hierarchy, random)
    np.testing.assert_array_equal(np.sort(result, 0), np.sort(draws, 0))
    for step in range(3):
        a, b, c = result[:, step].T
        assert spearmanr(a, b)[0] > 1 - 1e-12
        assert spearmanr(a + b, c)[0] < -1 + 1e-12
    errors[::2] = np.nan  # fewer errors than draws: ranks repeat
    result = reordered(draws, errors, hierarchy, random)
    assert spearmanr(result[:, 0, 0], result[:, 0, 1])[0] > 0.99
    crossed = Hierarchy(np.vstack([[1, 1, 0], [0, 1, 1], np.eye(3)]))
    with pytest.raises(ParameterError, match="not a tree"):
        reordered(draws, errors, crossed, random)
    with pytest.raises(ParameterError, match="Only 0 rows"):
        reordered(draws, np.nan * errors, hierarchy, random)


def test_histories_with_holes_are_refused_and_flat_ones_are_not(history):
    flat = history[:16].copy()
    flat[:, 0], flat[:, 1] = 0.0, 7.0
    forecast = base_forecast(quarterly(flat), 3)
    np.testing.assert_allclose(forecast.mean[:, 2:4], [[0.0, 7.0]] * 3, atol=1e-6)
    for row in ROWS:
        assert np.isfinite(reconcile(forecast, row, samples=50)).all()
    history[10, 1] = np.nan
    with pytest.raises(ParameterError, match=r"'0' has no value at 2002Q3"):
        base_forecast(quarterly(history), 3)
    with pytest.raises(ParameterError, match="theta"):
        base_forecast(quarterly(flat), 3, "theta")
    with pytest.raises(ParameterError, match="erm"):
        reconcile(forecast, "erm")


PUBLISHED = [  # CRPS e-3 of earlier runs of the same rows
    ("tourism", "ets", 100.9, 77.0),
    pytest.param("labour", "ets", 42.1, 40.4, marks=pytest.mark.slow),
    pytest.param("traffic", "ets", 67.2, 76.5, marks=pytest.mark.slow),
    pytest.param("wiki", "ets", 367, 240, marks=pytest.mark.slow),
    pytest.param("tourism", "arima", 111.3, 83.7, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "model", "bottom_up", "permuted"), PUBLISHED)
@pytest.mark.usefixtures("hierarchical_data")
def test_published_classical_figures(name, model, bottom_up, permuted):
    train, test = load(name).train_test()
    forecast = base_forecast(train, len(test.index), model)
    assert abs(1e3 * evaluate(reconcile(forecast, "naivebu"), test).crps / bottom_up - 1) < 0.01
    scores = [evaluate(reconcile(forecast, "permbu-mint", seed=seed), test) for seed in range(5)]
    assert abs(1e3 * np.mean([score.crps for score in scores]) / permuted - 1) < 0.05
    assert max(score.incoherence_relative for score in scores) < 1e-12
