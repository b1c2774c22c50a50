"""The correlation of steps, learned on sums over the horizon of past windows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from probhard.constraints import Hierarchy
from probhard.forecasting.members.coherent import RHOS, fit_rho
from probhard.forecasting.reconciliation.joint_law import PathLaw
from probhard.forecasting.reconciliation.learned import MetricWeights, project_law, projected_moments

SUMS = Hierarchy(np.vstack([np.ones((1, 3)), np.eye(3)]))
STEPS, WEIGHTS = 6, MetricWeights(0.5, 0.0, 0.0)


def law(rho: float, seed: int = 0) -> PathLaw:
    random = np.random.default_rng(seed)
    bottom = random.normal(50, 5, (STEPS, 3))
    stddev = torch.from_numpy(random.uniform(0.5, 2, (STEPS, 4)))
    return PathLaw(torch.from_numpy(np.hstack([bottom.sum(1, keepdims=True), bottom])), stddev, None, rho)


@pytest.mark.parametrize("rho", [0.0, 0.6, 0.95])
def test_many_windows_find_the_correlation(rho):
    laws = [replace(law(rho, k), rho=0.3) for k in range(60)]  # what the laws imply is wrong
    targets = [project_law(law(rho, k), WEIGHTS, SUMS, 1, 1000 + k)[0].numpy() for k in range(60)]
    found = fit_rho(laws, targets, WEIGHTS, SUMS)
    assert found is not None
    near = [x for x in RHOS if abs(x - rho) <= 0.25]
    assert min(near) - 0.02 <= found <= max(near) + 0.02


def test_few_windows_stay_near_what_the_laws_imply():
    targets = [project_law(law(0.97, 1), WEIGHTS, SUMS, 1, 5)[0].numpy()]
    found = fit_rho([replace(law(0.97, 1), rho=0.5)], targets, WEIGHTS, SUMS)
    assert found is not None
    assert 1 - 0.5**0.75 - 1e-9 <= found <= 1 - 0.005**0.25 * 0.5**0.75 + 1e-9  # a quarter of the way, in logarithms


def test_the_deviation_of_sums_is_that_of_draws():
    one = law(0.8)
    stddev = projected_moments(one, WEIGHTS, SUMS)[1]
    lag = (torch.arange(STEPS)[:, None] - torch.arange(STEPS)).abs()
    variance = torch.einsum("hn,hk,kn->n", stddev, 0.8 ** lag.double(), stddev)
    drawn = project_law(one, WEIGHTS, SUMS, 20_000, 0).sum(1)
    # every step has its own projection, so the formula is close but not exact
    np.testing.assert_allclose(drawn.std(0).numpy(), variance.sqrt().numpy(), rtol=0.06)


def test_sums_with_gaps_are_left_out():
    target = np.full((STEPS, 4), np.nan)
    assert fit_rho([law(0.5)], [target], WEIGHTS, SUMS) is None
