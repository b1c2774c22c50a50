"""The correlation of steps, learned on sums over the horizon of past windows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from probhard.constraints import Hierarchy
from probhard.errors import ParameterError
from probhard.forecasting.members.steps import RHOS, SHARED, fit_steps, projected_parts
from probhard.forecasting.reconciliation.family import MetricWeights, project_law, projected_moments
from probhard.forecasting.reconciliation.joint_law import PathLaw
from probhard.laws import LowRank

SUMS = Hierarchy(np.vstack([np.ones((1, 3)), np.eye(3)]))
LABELS = np.array([0, 2, 2, 2])
STEPS, WEIGHTS = 6, MetricWeights(0.5, 0.0, 0.0)


def law(rho: float, seed: int = 0) -> PathLaw:
    random = np.random.default_rng(seed)
    bottom = random.normal(50, 5, (STEPS, 3))
    stddev = torch.from_numpy(random.uniform(0.5, 2, (STEPS, 4)))
    return PathLaw(torch.from_numpy(np.hstack([bottom.sum(1, keepdims=True), bottom])), stddev, None, rho)


def joint(rho: float, own: float | None, seed: int = 0) -> PathLaw:
    """Series that share one movement."""
    factor = torch.full((4, 1), 0.8, dtype=torch.float64)
    correlation = LowRank(factor, torch.full((4,), 0.36, dtype=torch.float64))
    return replace(law(rho, seed), correlation=correlation, own_rho=own)


def fitted(laws, targets):
    return fit_steps(laws, targets, WEIGHTS, SUMS, LABELS)


@pytest.mark.parametrize(("rho", "own"), [(0.6, 0.0), (0.95, 0.4), (0.95, 0.95)])
def test_many_windows_find_both_correlations(rho, own):
    laws = [replace(joint(rho, own, k), rho=0.3, own_rho=None) for k in range(150)]  # what the laws imply is wrong
    targets = [project_law(joint(rho, own, k), WEIGHTS, SUMS, 1, 1000 + k)[0].numpy() for k in range(150)]
    found = fitted(laws, targets)
    assert found is not None
    for x, true in zip(found, (rho, own)):
        near = [r for r in RHOS if abs(r - true) <= 0.3]
        assert min(near) - 0.02 <= x <= max(near) + 0.02
    assert found[0] >= found[1]


def test_few_windows_stay_near_the_priors():
    targets = [project_law(joint(0.97, 0.97, 1), WEIGHTS, SUMS, 1, 5)[0].numpy()]
    found = fitted([replace(joint(0.97, None, 1), rho=0.5)], targets)
    assert found is not None
    for x, prior in zip(found, (SHARED, 0.5)):  # a quarter of the way, in logarithms
        assert 1 - (1 - prior) ** 0.75 - 1e-9 <= x <= 1 - 0.005**0.25 * (1 - prior) ** 0.75 + 1e-9


def test_the_deviation_of_sums_is_that_of_draws():
    one = joint(0.9, 0.3)
    _, shared, own = projected_parts(one, WEIGHTS, SUMS)
    np.testing.assert_allclose((shared**2 + own**2).sqrt(), projected_moments(one, WEIGHTS, SUMS)[1])
    lag = (torch.arange(STEPS)[:, None] - torch.arange(STEPS)).abs().double()
    variance = sum(torch.einsum("hn,hk,kn->n", part, r**lag, part) for part, r in ((shared, 0.9), (own, 0.3)))
    drawn = project_law(one, WEIGHTS, SUMS, 20_000, 0).sum(1)
    # every step has its own projection, so the formula is close but not exact
    np.testing.assert_allclose(drawn.std(0).numpy(), variance.sqrt().numpy(), rtol=0.06)


def test_noise_has_two_correlations_and_unchanged_margins():
    one, plain = joint(0.95, 0.2), joint(0.95, None)
    drawn = one.deviations(40_000, 0) / one.stddev
    flat = drawn.reshape(len(drawn), -1)
    lag = (torch.arange(STEPS)[:, None] - torch.arange(STEPS)).abs().double()
    expected = torch.kron(0.95**lag, torch.full((4, 4), 0.64)) + torch.kron(0.2**lag, 0.36 * torch.eye(4))
    np.testing.assert_allclose(flat.T @ flat / len(flat), expected, atol=0.03)
    for a, b in zip(projected_moments(one, WEIGHTS, SUMS), projected_moments(plain, WEIGHTS, SUMS)):
        torch.testing.assert_close(a, b)
    with pytest.raises(ParameterError):
        joint(0.5, 1.5)


def test_sums_with_gaps_are_left_out():
    target = np.full((STEPS, 4), np.nan)
    assert fitted([law(0.5)], [target]) is None
    known = law(0.5).mean.numpy().copy()
    known[0, 1] = np.nan  # one node's sum
    assert fitted([law(0.5)], [known]) is not None
