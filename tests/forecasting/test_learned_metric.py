"""The family of metrics against hierarchicalforecast's MinTrace and dense algebra, and what past windows choose."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import probhard as ph
from probhard.errors import ParameterError, ShapeError
from probhard.forecasting import (
    MetricWeights,
    PastForecast,
    PathLaw,
    learn_from_errors,
    learn_metric,
    learn_reconciliation,
    learn_scale,
    project_law,
    projected_moments,
)
from probhard.forecasting.reconciliation import family, learned
from probhard.forecasting.reconciliation.given import Forecasts
from probhard.forecasting.reconciliation.joint_law import error_correlation
from probhard.forecasting.reconciliation.reconcile import Reconciliation

methods = pytest.importorskip("hierarchicalforecast.methods")
DOUBLE = torch.float64
CROSSED = np.vstack([np.ones(6), np.kron(np.eye(2), np.ones(3)), np.kron(np.ones(2), np.eye(3)), np.eye(6)])
SUMS = ph.Hierarchy(CROSSED)
NODES, STEPS, ROWS = SUMS.variables, 3, 60
CORNERS = {
    "ols": MetricWeights(0.0, 0.0),
    "wls_struct": MetricWeights(0.0, 0.0, 1.0),
    "wls_var": MetricWeights(1.0, 0.0),
    "mint_shrink": MetricWeights(1.0, 1.0),
}


def history(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Observed and fitted values, (T, n)."""
    random = np.random.default_rng(seed)
    errors = random.standard_normal((ROWS, 6)) * np.arange(1, 7) + 2 * random.standard_normal((ROWS, 1))
    own = random.standard_normal((ROWS, NODES))
    return errors @ CROSSED.T + own, np.zeros((ROWS, NODES))


@pytest.mark.parametrize("name", CORNERS)
def test_corners_are_the_methods_of_mintrace(name):
    observed, fitted = history()
    mean = np.random.default_rng(1).normal(20, 5, (STEPS, NODES))
    size = observed.std(0) if name == "mint_shrink" else np.sqrt(np.square(observed).mean(0))
    stddev = np.broadcast_to(size, (STEPS, NODES)).copy()
    law = PathLaw.of_errors(mean, stddev, observed - fitted)
    theirs = methods.MinTrace(name)(S=CROSSED, y_hat=mean.T, y_insample=observed.T, y_hat_insample=fitted.T, tags=None)[
        "mean"
    ].T
    ours = projected_moments(law, CORNERS[name], SUMS)[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("weights", [*CORNERS.values(), MetricWeights(), MetricWeights(0.25, 0.75, 0.5)])
@pytest.mark.parametrize("correlated", [True, False])
def test_moments_and_draws_are_those_of_dense_algebra(weights, correlated):
    observed, fitted = history()
    random = np.random.default_rng(2)
    mean, stddev = random.normal(20, 5, (STEPS, NODES)), random.uniform(1, 9, (STEPS, NODES))
    law = PathLaw.of_errors(mean, stddev, observed - fitted if correlated else None)
    found, spread = projected_moments(law, weights, SUMS)
    draws = project_law(law, weights, SUMS, 5, seed=3)
    rows = np.hstack([np.eye(SUMS.aggregates), -CROSSED[: SUMS.aggregates]])
    correlation = law.correlation.dense().numpy() if correlated else np.eye(NODES)
    base = law.draws(5, seed=3).numpy()
    for step in range(STEPS):
        mixed = (1 - weights.correlation) * np.eye(NODES) + weights.correlation * correlation
        scale = stddev[step] ** weights.exponent * CROSSED.sum(1) ** (weights.structural / 2)
        weight = mixed * np.outer(scale, scale)
        tangent = np.eye(NODES) - weight @ rows.T @ np.linalg.inv(rows @ weight @ rows.T) @ rows
        covariance = correlation * np.outer(stddev[step], stddev[step])
        np.testing.assert_allclose(found[step], tangent @ mean[step], rtol=1e-9)
        np.testing.assert_allclose(spread[step], np.sqrt(np.diag(tangent @ covariance @ tangent.T)), rtol=1e-8)
        np.testing.assert_allclose(draws[:, step], base[:, step] @ tangent.T, rtol=1e-9)


def window(seed: int, better: str, missing: bool = False) -> PastForecast:
    """A window whose aggregates, or whose bottoms, were forecast well, with deviations that do not show it."""
    random = np.random.default_rng(seed)
    truth = random.normal(50, 5, (STEPS, 6)) @ CROSSED.T
    noise = np.where(np.arange(NODES) < SUMS.aggregates, *((0.1, 8.0) if better == "aggregates" else (8.0, 0.1)))
    stddev = np.full((STEPS, NODES), 4.0) * (1 + CROSSED.sum(1))
    target = truth.copy()
    if missing:
        target[1:, 2:] = np.nan
    return PastForecast(PathLaw(truth + noise * random.standard_normal(truth.shape), stddev), target)


@pytest.mark.parametrize("better", ["aggregates", "bottoms"])
def test_windows_choose_the_metric_that_trusts_the_better_nodes(better):
    """Large deviations of aggregates: a large exponent trusts bottoms, exponent 0 trusts the aggregates more."""
    chosen = learn_metric([window(seed, better) for seed in range(8)], SUMS, strength=0.0)
    trust = chosen.exponent + chosen.structural
    assert trust <= 0.25 if better == "aggregates" else trust >= 1.25


def test_few_windows_stay_near_the_prior():
    def distance(count: int) -> float:
        chosen = learn_metric([window(seed, "bottoms") for seed in range(count)], SUMS, strength=3.0)
        return abs(chosen.exponent - 0.5) + abs(chosen.structural)

    assert distance(1) < distance(40)
    assert learn_metric([], SUMS) == MetricWeights()
    prior = MetricWeights(0.2, 0.3, 0.1)
    assert learn_metric([window(0, "bottoms")], SUMS, prior, strength=1e9) == prior


@pytest.mark.parametrize("wide", [0.5, 2.0])
def test_deviations_that_were_wrong_get_a_factor(wide):
    random = np.random.default_rng(0)
    stddev = np.sqrt(CROSSED.sum(1)) + np.zeros((STEPS, NODES))
    windows = []
    for _ in range(30):
        bottoms = 20 + random.standard_normal((STEPS, 6))
        law = PathLaw(np.full((STEPS, 6), 20.0) @ CROSSED.T, wide * stddev, rho=0.0)
        windows.append(PastForecast(law, bottoms @ CROSSED.T))
    _, scale = learn_reconciliation(windows, SUMS)
    exact = projected_moments(windows[0].law, MetricWeights(), SUMS)[1].numpy() / np.sqrt(CROSSED.sum(1))
    assert scale == pytest.approx(1 / np.median(exact), rel=0.2)
    few = learn_scale(windows[:1], MetricWeights(), SUMS)
    assert abs(np.log(few)) < abs(np.log(learn_scale(windows, MetricWeights(), SUMS)))
    assert learn_scale([], MetricWeights(), SUMS) == 1.0


def test_missing_targets_are_left_out():
    windows = [window(seed, "bottoms", missing=True) for seed in range(8)]
    assert learn_metric(windows, SUMS, strength=0.0).exponent >= 0.75
    empty = PastForecast(windows[0].law, torch.full((STEPS, NODES), torch.nan))
    assert learn_metric([empty], SUMS) == MetricWeights()


def test_the_chosen_metric_is_best_among_many():
    windows = [window(seed, "bottoms") for seed in range(3)]
    observed, fitted = history()
    errors = torch.from_numpy(observed - fitted)
    windows = [PastForecast(PathLaw.of_errors(w.law.mean, w.law.stddev, errors), w.target) for w in windows]
    starts = [learned._loss(w, MetricWeights(), SUMS) for w in windows]

    def loss(weights):
        return sum(learned._loss(w, weights, SUMS) / start for w, start in zip(windows, starts))

    chosen = loss(learn_metric(windows, SUMS, strength=0.0))
    grid = [MetricWeights(g, r, s) for g in (0, 0.5, 1) for r in (0, 0.5, 1) for s in (0, 0.5, 1)]
    assert chosen <= 1.02 * min(loss(weights) for weights in grid)


def test_one_window_of_large_errors_does_not_decide():
    quiet, other = [window(seed, "bottoms") for seed in range(6)], window(99, "totals")
    loud = PastForecast(PathLaw(1e3 * other.law.mean, 1e3 * other.law.stddev), 1e3 * other.target)
    assert learn_metric([loud], SUMS, strength=0.0) != learn_metric(quiet, SUMS, strength=0.0)
    assert learn_metric([*quiet, loud], SUMS, strength=0.0).exponent >= 0.75


def test_the_fixed_metric_moves_with_the_length_of_the_history():
    assert family.middle(0) == MetricWeights(0.5, 0.0)
    assert family.middle(50) == MetricWeights(0.75, 0.375)
    assert family.middle(100) == family.middle(10_000) == MetricWeights(1.0, 0.75)


def errors_of(factor: float, rows: int = 80) -> torch.Tensor:
    """One-step errors, (T, n); those of the total times a factor."""
    errors = np.random.default_rng(4).standard_normal((rows, NODES))
    errors[:, 0] *= factor
    return torch.from_numpy(errors)


def test_errors_choose_the_metric_by_the_crps_of_projected_errors():
    errors, prior = errors_of(40.0), family.middle(80)
    chosen, rows = learn_from_errors(errors, None, SUMS), errors[-60:]
    law = PathLaw(rows, rows.square().mean(0).sqrt().expand_as(rows))
    target = PastForecast(law, torch.zeros_like(rows))  # the general path, one law for each row

    def pulled(weights):
        far = sum((a - b) ** 2 for a, b in zip(vars(weights).values(), vars(prior).values()))
        return learned._loss(target, weights, SUMS) / learned._loss(target, prior, SUMS) + 2 * far

    near = [MetricWeights(g, prior.correlation, s) for g in (0.5, 0.75, 1.0) for s in (0.0, 0.25, 0.5)]
    assert pulled(chosen) <= min(map(pulled, near)) + 1e-3
    assert learn_from_errors(errors[:59], None, SUMS) == family.middle(59)
    gaps = errors.clone()
    gaps[::2, 3] = torch.nan
    assert learn_from_errors(gaps, None, SUMS) == prior  # too few complete rows
    assert learn_from_errors(torch.zeros(80, NODES, dtype=DOUBLE), None, SUMS) == prior


@pytest.mark.parametrize("factor", [0.05, 40.0])
def test_reconciliation_takes_its_metric_from_past_errors(factor):
    errors = errors_of(factor)
    base = Forecasts(np.full((STEPS, NODES), 10.0), np.ones((STEPS, NODES)), errors=errors.numpy())
    rules = Reconciliation(SUMS)
    assert rules.chosen(base) == "middle"
    assert rules.weights(base) == learn_from_errors(errors, error_correlation(errors), SUMS)
    mean = rules(base, samples=3).mean
    np.testing.assert_allclose(mean[:, 0], mean[:, -6:].sum(-1))


def test_constant_series_and_immutable_nodes():
    stddev = np.ones((1, NODES))
    stddev[:, [0, 1, 6, 7, 8]] = 0.0  # an aggregate with all its bottoms
    held = ph.Hierarchy(CROSSED, immutable=[0])
    mean = np.random.default_rng(0).normal(20, 5, (1, NODES))
    for weights in (*CORNERS.values(), MetricWeights()):
        projected, _ = projected_moments(PathLaw(mean, stddev), weights, SUMS)
        np.testing.assert_allclose(projected, projected.numpy()[:, -6:] @ CROSSED.T, rtol=1e-8)
        assert float(projected_moments(PathLaw(mean, stddev), weights, held)[0][0, 0]) == pytest.approx(mean[0, 0])


def test_a_long_law_is_projected_in_groups_of_steps(monkeypatch):
    observed, fitted = history()
    random = np.random.default_rng(2)
    mean, stddev = random.normal(20, 5, (STEPS, NODES)), random.uniform(1, 9, (STEPS, NODES))
    law = PathLaw.of_errors(mean, stddev, observed - fitted)
    whole = projected_moments(law, MetricWeights(), SUMS), project_law(law, MetricWeights(), SUMS, 4, 0)
    monkeypatch.setattr(family, "CHUNK", 2 * family.law_numbers(law))
    monkeypatch.setattr(learned, "LEARNED_NUMBERS", 2 * family.law_numbers(law))
    parts = projected_moments(law, MetricWeights(), SUMS), project_law(law, MetricWeights(), SUMS, 4, 0)
    for a, b in zip((*whole[0], whole[1]), (*parts[0], parts[1])):
        torch.testing.assert_close(a, b)
    assert learned._thinned(PastForecast(law, law.mean)).target.shape == (2, NODES)
    assert isinstance(learn_metric([PastForecast(law, law.mean + 1)], SUMS), MetricWeights)


def test_errors_name_what_is_wrong():
    with pytest.raises(ParameterError, match=r"exponent 1\.5"):
        MetricWeights(1.5)
    with pytest.raises(ShapeError, match=r"what was observed \(2, 12\)"):
        PastForecast(window(0, "bottoms").law, torch.zeros(2, 12))
