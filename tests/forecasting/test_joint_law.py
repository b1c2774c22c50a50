"""Normal laws of paths: their covariance, the floors of deviations, and the dependence of steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import probhard as ph
from probhard.errors import ParameterError, ShapeError
from probhard.forecasting.reconciliation.joint_law import PathLaw, floored, implied_rho, step_root

DOUBLE = torch.float64
STEPS, NODES = 3, 5


def law(rho: float = 0.6, correlated: bool = True) -> PathLaw:
    random = np.random.default_rng(0)
    errors = torch.from_numpy(random.standard_normal((40, NODES)) + random.standard_normal((40, 1)))
    mean, stddev = (torch.from_numpy(x) for x in (random.normal(10, 1, (STEPS, NODES)), random.random((STEPS, NODES))))
    return PathLaw(mean, stddev + 0.5, ph.shrunk_correlation(errors) if correlated else None, rho)


@pytest.mark.parametrize("correlated", [True, False])
def test_draws_have_the_covariance_of_nodes_times_that_of_steps(correlated):
    made = law(correlated=correlated)
    draws = made.draws(200_000, seed=1)
    assert draws.shape == (200_000, STEPS, NODES)
    assert draws.dtype == DOUBLE
    torch.testing.assert_close(draws.mean(0), made.mean, rtol=0, atol=0.02)
    lag = torch.arange(STEPS, dtype=DOUBLE)[:, None] - torch.arange(STEPS, dtype=DOUBLE)
    nodes = made.correlation.dense().contiguous() if correlated else torch.eye(NODES, dtype=DOUBLE)
    expected = torch.kron(0.6 ** lag.abs(), nodes)
    scale = made.stddev.flatten()
    torch.testing.assert_close(torch.cov(draws.flatten(1).mT) / scale / scale[:, None], expected, rtol=0, atol=0.015)


def test_draws_follow_the_seed_only():
    assert torch.equal(law().draws(7, seed=3), law().draws(7, seed=3))
    assert not torch.equal(law().draws(7, seed=3), law().draws(7, seed=4))


def test_the_covariance_of_a_step():
    made = law()
    expected = made.correlation.dense() * made.stddev[1][:, None] * made.stddev[1]
    torch.testing.assert_close(made.covariance.dense()[1], expected)


def test_arrays_are_taken_and_constant_series_get_a_small_deviation():
    made = PathLaw(np.array([[100.0, 0.0, 5.0]]), np.array([[0.0, 0.0, 2.0]]))
    assert made.stddev.dtype == DOUBLE
    torch.testing.assert_close(made.stddev, torch.tensor([[2e-3, 2e-3, 2.0]], dtype=DOUBLE))
    assert bool((floored(torch.zeros(1, 2, dtype=DOUBLE), torch.zeros(1, 2, dtype=DOUBLE)) > 0).all())


def test_small_deviations_that_are_real_stay():
    stddev = torch.tensor([[1e-4, 1e6]], dtype=DOUBLE)
    torch.testing.assert_close(floored(torch.tensor([[1.0, 1e9]], dtype=DOUBLE), stddev), stddev)


@pytest.mark.parametrize("gain", [0.0, 0.4, 1.0])
def test_the_dependence_of_steps_of_a_local_level_follows_from_its_deviations(gain):
    steps = 6
    weights = torch.full((steps,), gain, dtype=DOUBLE)
    weights[0] = 1.0  # e_h = eps_h + gain (eps_1 + ... + eps_{h-1})
    root = torch.stack([torch.cat([weights[: h + 1].flip(0), torch.zeros(steps - h - 1)]) for h in range(steps)])
    covariance = root @ root.mT
    stddev = covariance.diagonal().sqrt()
    expected = (covariance.diagonal(1) / (stddev[1:] * stddev[:-1])).mean()
    assert implied_rho(stddev[:, None]) == pytest.approx(min(float(expected), 0.99), abs=1e-9)


def test_autocorrelated_errors_raise_the_dependence_of_steps():
    random, rows = np.random.default_rng(1), [np.zeros(4)]
    for _ in range(4000):
        rows.append(0.7 * rows[-1] + random.standard_normal(4))
    errors = torch.from_numpy(np.stack(rows))
    errors[::50] = torch.nan
    assert implied_rho(torch.ones(3, 4, dtype=DOUBLE), errors) == pytest.approx(0.7, abs=0.03)
    assert implied_rho(torch.ones(3, 4, dtype=DOUBLE), torch.zeros(9, 4, dtype=DOUBLE)) == 0.0


def test_law_of_errors():
    errors = torch.randn(60, NODES, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    errors[:, 0] = 1.0  # constant
    made = PathLaw.of_errors(law().mean, law().stddev, errors)
    torch.testing.assert_close(made.correlation.dense(), ph.shrunk_correlation(errors).dense())
    assert PathLaw.of_errors(law().mean, law().stddev, errors[:2]).correlation is None
    assert PathLaw.of_errors(law().mean, law().stddev, None).correlation is None


def test_many_series_stay_low_rank():
    nodes, rows = 50_000, 120
    generator = torch.Generator().manual_seed(0)
    errors = torch.randn(rows, nodes, generator=generator, dtype=DOUBLE) + torch.randn(rows, 1, generator=generator)
    made = PathLaw.of_errors(torch.ones(4, nodes), torch.ones(4, nodes), errors)
    assert made.correlation.factor.shape == (nodes, 80)
    total = made.draws(200, seed=0).sum(-1)  # shared noise: far wider than the root of the number of series
    assert float(total.std()) > 20 * nodes**0.5


@pytest.mark.parametrize("rho", [0.0, 0.6, 1.0])
def test_root_of_the_steps(rho):
    root = step_root(4, rho)
    step = torch.arange(4, dtype=DOUBLE)
    torch.testing.assert_close(root @ root.mT, torch.tensor(rho, dtype=DOUBLE) ** (step[:, None] - step).abs())
    assert bool((root.triu(1) == 0).all())


def test_errors_name_what_is_wrong():
    with pytest.raises(ShapeError, match=r"mean \(2, 3\), deviations \(2, 4\)"):
        PathLaw(torch.zeros(2, 3), torch.ones(2, 4))
    with pytest.raises(ShapeError, match="a correlation of 5 series"):
        PathLaw(torch.zeros(2, 3), torch.ones(2, 3), law().correlation)
    with pytest.raises(ParameterError, match="1 means or deviations"):
        PathLaw(torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]))
    with pytest.raises(ParameterError, match=r"rho is 1\.5"):
        PathLaw(torch.zeros(1, 2), torch.ones(1, 2), rho=1.5)
