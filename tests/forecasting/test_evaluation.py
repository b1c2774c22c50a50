"""Evaluation of draws against the definition, GluonTS's evaluator, and draws with known faults."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from gluonts.evaluation import MultivariateEvaluator
from gluonts.model.forecast import SampleForecast

from forecasting.helpers import FIVE_NODES
from probhard import Hierarchy, ParameterError, ShapeError
from probhard.forecasting import (
    HierarchicalData,
    calibration,
    crps_levels,
    evaluate,
    incoherence,
    pit_counts,
    pooled_crps,
)
from probhard.forecasting.report import evaluation

LEVELS = {"total": np.array([0]), "pair": np.array([1]), "leaf": np.array([2, 3, 4])}
HORIZON = 6


@pytest.fixture
def draws() -> np.ndarray:
    return np.random.default_rng(1).gamma(2.0, 20.0, (101, HORIZON, 3)) @ FIVE_NODES.T


@pytest.fixture
def test_window() -> HierarchicalData:
    values = np.random.default_rng(2).gamma(2.0, 20.0, (HORIZON, 3))
    index = pd.period_range("2020-01", periods=HORIZON, freq="M")
    tags = {"total": ["t"], "pair": ["p"], "leaf": ["a", "b", "c"]}
    return HierarchicalData.from_matrix(values, FIVE_NODES, index, ["t", "p", "a", "b", "c"], tags)


def by_definition(samples: np.ndarray, y: np.ndarray, keep: np.ndarray) -> float:
    total = 0.0
    for k in range(1, 20):
        q = k / 20
        x = np.sort(samples, 0)[round((len(samples) - 1) * q)]
        total += (2 * np.abs((x - y) * ((y <= x) - q)))[keep].sum()
    return total / 19 / np.abs(y[keep]).sum()


@pytest.mark.parametrize("size", [100, 101, 200])
def test_pooled_crps_by_its_definition(test_window, size):
    samples = np.random.default_rng(size).normal(40, 30, (size, HORIZON, 5))
    y, everywhere = test_window.values, np.ones((HORIZON, 5), dtype=bool)
    np.testing.assert_allclose(pooled_crps(samples, y), by_definition(samples, y, everywhere), rtol=1e-13)
    hidden = y.copy()
    hidden[2, 1:3] = np.nan
    np.testing.assert_allclose(pooled_crps(samples, hidden), by_definition(samples, y, ~np.isnan(hidden)), rtol=1e-13)
    mask = np.random.default_rng(0).random(y.shape) < 0.5
    np.testing.assert_allclose(pooled_crps(samples, y, mask), by_definition(samples, y, mask), rtol=1e-13)
    np.testing.assert_allclose(
        pooled_crps(torch.tensor(samples), torch.tensor(hidden), mask),
        by_definition(samples, y, mask & ~np.isnan(hidden)),
        rtol=1e-13,
    )


def test_a_point_forecast_scores_its_absolute_error(test_window):
    point = test_window.values * np.linspace(0.5, 1.7, HORIZON)[:, None]
    expected = np.abs(point - test_window.values).sum() / np.abs(test_window.values).sum()
    np.testing.assert_allclose(pooled_crps(point[None], test_window.values), expected, rtol=1e-13)
    np.testing.assert_allclose(
        crps_levels(point[None], test_window.values, LEVELS)["total"],
        np.abs(point - test_window.values)[:, 0].sum() / test_window.values[:, 0].sum(),
        rtol=1e-13,
    )


def test_agrees_with_gluonts(test_window, draws):
    history = np.random.default_rng(3).gamma(2.0, 20.0, (30, 3)) @ FIVE_NODES.T
    index = pd.period_range("2017-07", periods=30 + HORIZON, freq="M")
    target = pd.DataFrame(np.concatenate([history, test_window.values]), index=index)
    forecast = SampleForecast(draws, start_date=index[30])
    evaluator = MultivariateEvaluator(quantiles=[k / 20 for k in range(1, 20)])
    pooled, by_series = evaluator([target], [forecast])
    assert abs(pooled["mean_wQuantileLoss"] - pooled_crps(draws, test_window.values)) < 1e-9
    for level, score in crps_levels(draws, test_window.values, LEVELS).items():
        theirs, _ = evaluator.get_aggregate_metrics(by_series.iloc[LEVELS[level]])
        assert abs(theirs["mean_wQuantileLoss"] - score) < 1e-9


def test_incoherence_of_known_size(draws, monkeypatch):
    hierarchy = Hierarchy(FIVE_NODES)
    measured = incoherence(draws, hierarchy)
    assert measured.relative < 1e-14
    assert measured.smallest_draw == draws.min()
    draws[7, 2, :2] += [3.0, -4.0]
    draws[9, 1, 4] = -5.0
    draws[9, 1, 0] = draws[9, 1, 2:].sum()
    measured = incoherence(draws, hierarchy)
    np.testing.assert_allclose(measured.largest, 5.0, rtol=1e-12)
    np.testing.assert_allclose(measured.relative, np.max([3.0, 4.0] / draws[7, 2, :2]), rtol=1e-12)
    assert measured.smallest_draw == -5.0
    monkeypatch.setattr(evaluation, "CHUNK", 40)
    assert incoherence(torch.tensor(draws), hierarchy) == measured
    rounded = np.array([[1e-17 + 5e3, 1e-17, 0.0, 0.0, 5e3]])  # an aggregate that is rounding only
    assert incoherence(rounded, hierarchy).relative < 1e-14
    with pytest.raises(ShapeError, match="5 variables"):
        incoherence(draws[..., :4], hierarchy)


def test_record_is_json(test_window, draws):
    scores = evaluate(draws, test_window)
    record = json.loads(json.dumps(scores.record()))
    assert list(record) == ["crps", "crps_levels", "incoherence", "incoherence_relative", "smallest_draw"]
    assert record["crps"] == pooled_crps(draws, test_window.values)
    weights = {level: np.abs(test_window.values[:, at]).sum() for level, at in LEVELS.items()}
    pooled = sum(weights[level] * score for level, score in record["crps_levels"].items()) / sum(weights.values())
    np.testing.assert_allclose(record["crps"], pooled, rtol=1e-12)


def test_calibration_and_transforms():
    random = np.random.default_rng(5)
    samples, target = random.normal(size=(999, 400, 5)), random.normal(size=(400, 5))
    target[:7, 3] = np.nan
    shares = calibration(samples, target, LEVELS, probabilities=(0.5, 0.9))
    for level in LEVELS:
        for probability, share in shares[level].items():
            assert abs(share - probability) < 4 * np.sqrt(0.25 / 400)
    inside = np.abs(target[:, 0]) < 0.6744898
    assert abs(shares["total"][0.5] - inside.mean()) < 0.05
    counts = pit_counts(samples, target, bins=5)
    assert counts.sum() == 1993
    assert np.abs(counts - 1993 / 5).max() < 4 * np.sqrt(1993 / 5)
    assert calibration(samples + 50, target, LEVELS)["leaf"][0.95] == 0.0
    assert pit_counts(samples + 50, target).tolist()[0] == 1993


def test_bad_forecasts_are_refused(test_window, draws):
    y = test_window.values
    with pytest.raises(ShapeError, match=r"\(101, 5, 6\)"):
        pooled_crps(draws.transpose(0, 2, 1), y)
    with pytest.raises(ShapeError, match=r"\(6, 5\)"):
        pooled_crps(draws[0], y)
    broken = draws.copy()
    broken[3, 2, 1] = np.nan
    with pytest.raises(ParameterError, match="1 of 3030 forecast values"):
        evaluate(broken, test_window)
    with pytest.raises(ParameterError, match="all zero"):
        pooled_crps(draws, 0 * y)
    with pytest.raises(ParameterError, match="No target is observed"):
        pooled_crps(draws, np.nan * y)
    hidden = y.copy()
    hidden[0] = np.nan
    assert np.isfinite(evaluate(draws, replace(test_window, values=hidden)).crps)
