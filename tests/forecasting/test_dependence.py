"""The joint law of forecasts: fitted along the hierarchy, from errors, and what it does to intervals of the total."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import probhard as ph
from probhard.forecasting import Forecasts, MetricWeights, Reconciliation
from probhard.forecasting.reconciliation.dependence import along_hierarchy

S = np.vstack([np.ones(6), np.kron(np.eye(2), np.ones(3)), np.eye(6)])
SUMS = ph.Hierarchy(S)
SIZES = np.arange(1.0, 7.0)


def covariance(total: float, region: float) -> np.ndarray:
    """Bottoms with a common factor, factors of two regions and noise of their own, (6, 6)."""
    own = 1 - total - region
    blocks = np.kron(np.eye(2), np.ones((3, 3)))
    return (own * np.eye(6) + region * blocks + total) * np.outer(SIZES, SIZES)


@pytest.mark.parametrize(("total", "region"), [(0, 0), (0.4, 0), (0.2, 0.5), (1, 0)])
def test_the_spreads_of_coherent_forecasts_identify_factors_along_the_hierarchy(total, region):
    truth = covariance(total, region)
    spread = np.sqrt(np.diag(S @ truth @ S.T))
    found = along_hierarchy(np.stack([spread, 2 * spread]), SUMS)
    np.testing.assert_allclose(found.diagonal(), 1.0, rtol=1e-8)
    np.testing.assert_allclose(found.dense()[3:, 3:] * np.outer(SIZES, SIZES), truth, atol=1e-3)


def test_spreads_that_no_joint_law_has_are_matched_as_well_as_possible():
    """A total that is wider than all bottoms together, and one narrower than independent bottoms."""
    for size, largest in ((100.0, 1.0), (1.0, 1e-3)):
        found = along_hierarchy(np.concatenate([[size], [6.0, 15.0], SIZES])[None], SUMS).dense()
        np.testing.assert_allclose(found.diagonal(), 1.0, rtol=1e-8)
        assert float(torch.linalg.eigvalsh(found).min()) > -1e-10
        assert float(found[3, 8]) <= largest + 1e-9


def test_many_nodes():
    bottoms, groups = 20_000, 100
    rows = [
        np.ones((1, bottoms)),
        sp.kron(sp.eye_array(groups), np.ones((1, bottoms // groups))),
        sp.eye_array(bottoms),
    ]
    hierarchy = ph.Hierarchy(sp.csr_array(sp.vstack([sp.csr_array(part) for part in rows])))
    spread = np.concatenate([[bottoms / 2], np.full(groups, bottoms / groups), np.ones(bottoms)])[None]
    found = along_hierarchy(spread, hierarchy)
    np.testing.assert_allclose(found.diagonal(), 1.0, rtol=1e-6)
    total = found.scaled(torch.from_numpy(spread[0])).factor_diagonal()[0]
    assert float(total) == pytest.approx((bottoms / 2) ** 2, rel=0.05)


def test_intervals_of_the_total_hold_what_they_promise():
    """With deviations that are right for every node, the default interval of the total holds about 80 %.

    Independent nodes gave intervals of a fraction of the width.
    """
    random, count, truth = np.random.default_rng(0), 400, covariance(0.6, 0.1)
    bottoms = random.multivariate_normal(np.zeros(6), truth, count)
    spread = np.sqrt(np.diag(S @ truth @ S.T))
    mean = 100 * S.sum(1) + np.zeros((count, 9))
    target = mean + bottoms @ S.T
    base = Forecasts(mean, np.broadcast_to(spread, mean.shape))
    held = {}
    for law in (None, "independent"):
        low, high = Reconciliation(SUMS, covariance=law)(base, samples=2).quantiles([0.1, 0.9])
        held[law] = ((low <= target) & (target <= high)).mean(0)
    np.testing.assert_allclose(held[None], 0.8, atol=0.08)
    assert held["independent"][0] < 0.65


@pytest.mark.parametrize("trust", ["aggregates", "bottoms"])
def test_the_default_metric_is_nearer_to_the_better_of_orthogonal_and_oblique(trust):
    """Oblique alone lost 28 % to orthogonal on a public set: its default is between both."""
    random, count = np.random.default_rng(1), 300
    mean = (np.full(6, 50.0) @ S.T) + np.zeros((count, 9))
    size = np.sqrt(np.square(SIZES) @ S.T)
    error = np.where(np.arange(9) < 3, *((0.3, 1.5) if trust == "aggregates" else (1.5, 0.3)))
    forecast = mean + random.standard_normal((count, 9)) * size * error
    base = Forecasts(forecast, np.broadcast_to(size, mean.shape))
    missed = {
        metric: np.abs(Reconciliation(SUMS, metric)(base, samples=1).mean - mean).sum()
        for metric in (None, "oblique", "orthogonal")
    }
    best, worst = sorted((missed["oblique"], missed["orthogonal"]))
    assert missed[None] < (best + worst) / 2


def test_errors_give_the_correlation_and_skewed_laws_use_it_too():
    random = np.random.default_rng(0)
    errors = random.multivariate_normal(np.zeros(6), covariance(0.6, 0.1), 500) @ S.T
    spread = np.sqrt(np.diag(S @ covariance(0.6, 0.1) @ S.T))
    mean = np.full((1, 9), 50.0) * S.sum(1)
    values = np.stack([mean - spread, mean, mean + 3 * spread])
    base = Forecasts.of_quantiles([0.1, 0.5, 0.9], values)
    base = Forecasts(base.mean, quantiles=base.quantiles, errors=errors)
    result = Reconciliation(SUMS)(base, samples=4000, seed=1)
    ranks = np.corrcoef(result.draws[:, 0, 3:].T)
    assert ranks[np.triu_indices(6, 1)].min() > 0.3
    alone = Reconciliation(SUMS, covariance="independent")(base, samples=4000, seed=1)
    assert result.draws[:, 0, 0].std() > 1.1 * alone.draws[:, 0, 0].std()


def test_steps_of_paths_depend_on_each_other():
    spread = np.sqrt(np.arange(1.0, 5.0))[:, None] * np.sqrt(np.diag(S @ covariance(0.5, 0) @ S.T))  # random walks
    draws = Reconciliation(SUMS)(Forecasts(np.zeros((4, 9)), spread), samples=4000).draws
    assert np.corrcoef(draws[:, 2, 0], draws[:, 3, 0])[0, 1] > 0.7
    alone = Reconciliation(SUMS, covariance="independent")(Forecasts(np.zeros((4, 9)), spread), samples=4000).draws
    assert abs(np.corrcoef(alone[:, 2, 0], alone[:, 3, 0])[0, 1]) < 0.1


def test_exact_spreads_are_those_of_draws():
    random = np.random.default_rng(3)
    errors = random.multivariate_normal(np.zeros(6), covariance(0.4, 0.2), 60) @ S.T + random.standard_normal((60, 9))
    base = Forecasts(random.normal(50, 5, (2, 9)), random.uniform(1, 9, (2, 9)), errors=errors)
    for law in ("errors", "hierarchy", "independent"):
        result = Reconciliation(SUMS, MetricWeights(0.75, 0.5, 0.25), covariance=law)(base, samples=40_000)
        np.testing.assert_allclose(result.spread, result.draws.std(0), rtol=0.03)
        np.testing.assert_allclose(result.draws, result.draws[..., 3:] @ S.T, atol=1e-9)


def test_bottoms_alone_warn_unless_the_law_is_named():
    base = Forecasts(np.ones((1, 6)), np.ones((1, 6)))
    with pytest.warns(UserWarning, match="too narrow if they move together"):
        base.summed(SUMS)
    assert base.summed(SUMS, covariance="independent").covariance == "independent"
    errors = np.random.default_rng(0).multivariate_normal(np.zeros(6), covariance(0.8, 0), 50)
    joint = Forecasts(base.mean, base.stddev, errors=errors).summed(SUMS)
    assert joint.covariance == "errors"
    assert joint.stddev[0, 0] == pytest.approx(joint.draws[:, 0, 0].std(), rel=0.1)
    assert joint.stddev[0, 0] > 1.5 * np.sqrt(6)


def test_refusals():
    base = Forecasts(np.ones((1, 9)), np.ones((1, 9)))
    with pytest.raises(ph.ParameterError, match="no past errors"):
        Reconciliation(SUMS, covariance="errors")(base)
    with pytest.raises(ph.ParameterError, match="covariance='full'"):
        Reconciliation(SUMS, covariance="full")
    with pytest.raises(ph.ShapeError, match=r"errors have shape \(5, 8\)"):
        Forecasts(base.mean, base.stddev, errors=np.zeros((5, 8)))
