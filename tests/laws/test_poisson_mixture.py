"""Mixtures of Poisson products against sums over all counts, scipy's law, and draws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy import stats

import probhard as ph
from probhard.rows.maps import SparseMap

WEIGHTS = np.array([0.2, 0.5, 0.3])
RATES = np.array([[0.4, 1.5, 2.2], [0.7, 0.2, 1.9], [1.1, 0.6, 0.3]])  # three series, three components
COUNTS = range(16)  # of each series; the rest has a probability below 1e-8


def law(unit: float = 1.0) -> ph.PoissonMixture:
    return ph.PoissonMixture(torch.from_numpy(np.log(WEIGHTS)) + 3.0, torch.from_numpy(RATES), unit)


def enumerated() -> dict[tuple[int, ...], float]:
    """The probability of every vector of counts, component by component."""
    table = [[[stats.poisson.pmf(c, rate) for c in COUNTS] for rate in row] for row in RATES]
    return {
        y: sum(w * np.prod([table[i][k][c] for i, c in enumerate(y)]) for k, w in enumerate(WEIGHTS))
        for y in itertools.product(COUNTS, repeat=3)
    }


def test_the_likelihood_is_that_of_the_enumeration():
    every = enumerated()
    points = torch.tensor(list(every), dtype=torch.float64)
    np.testing.assert_allclose(law().log_prob(points).exp(), list(every.values()), rtol=1e-9)
    assert sum(every.values()) == pytest.approx(1, abs=1e-6)


def test_the_law_of_sums_is_that_of_the_enumeration():
    every = enumerated()
    rows = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 1]])
    sums = law().functional(SparseMap(sp.csr_array(rows)))
    for row, members in enumerate(rows):
        for total in range(8):  # every vector with this sum is among those enumerated
            chance = sum(p for y, p in every.items() if np.dot(members, y) == total)
            value = torch.full((3,), float(total), dtype=torch.float64)
            assert float(sums.marginal_log_prob(value).exp()[row]) == pytest.approx(chance, abs=1e-8)


def test_masked_values_are_summed_out():
    value = torch.tensor([2.0, torch.nan, 1.0], dtype=torch.float64)
    chance = sum(p for y, p in enumerated().items() if (y[0], y[2]) == (2, 1))
    found = law().log_prob(value, torch.tensor([True, False, True])).exp()
    assert float(found) == pytest.approx(chance, rel=1e-7)


def test_masked_values_have_no_gradient():
    rates = torch.from_numpy(RATES).requires_grad_()
    mixture = ph.PoissonMixture(torch.zeros(3, dtype=torch.float64), rates)
    mixture.log_prob(torch.tensor([2.0, torch.nan, 1.0]).double(), torch.tensor([True, False, True])).backward()
    assert bool((rates.grad[1] == 0).all())
    assert bool((rates.grad[[0, 2]] != 0).all())


@pytest.mark.parametrize("unit", [1.0, 0.1])
def test_moments_of_law_draws_and_normal(unit):
    every, mixture = enumerated(), law(unit)
    points, chances = np.array(list(every)) * unit, np.array(list(every.values()))
    mean = chances @ points
    covariance = (points - mean).T @ ((points - mean) * chances[:, None])
    np.testing.assert_allclose(mixture.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(mixture.variance, np.diag(covariance), rtol=1e-4)
    np.testing.assert_allclose(ph.as_location_scale(mixture).cov.dense(), covariance, rtol=1e-3, atol=1e-6 * unit**2)
    draws = mixture.sample((40_000,), torch.Generator().manual_seed(0)).numpy()
    assert (np.abs(draws / unit - np.round(draws / unit)) < 1e-9).all()
    np.testing.assert_allclose(np.cov(draws.T), covariance, rtol=0.1, atol=0.03 * unit**2)


def test_one_component_is_a_poisson_law():
    mixture = ph.PoissonMixture(torch.zeros(2, 1), torch.tensor([[[3.0]], [[5.0]]]))
    value = torch.tensor([[2.0], [7.0]])
    expected = torch.distributions.Poisson(torch.tensor([3.0, 5.0])).log_prob(value[:, 0])
    torch.testing.assert_close(mixture.log_prob(value), expected)
    assert mixture.expand((4, 2)).sample((3,)).shape == (3, 4, 2, 1)


@pytest.mark.parametrize(
    ("logits", "rates", "unit"),
    [
        (torch.zeros(2), torch.ones(4, 3), 1.0),
        (torch.zeros(3), torch.ones(3), 1.0),
        (torch.zeros(3), torch.ones(4, 3), 0),
    ],
)
def test_bad_arguments(logits, rates, unit):
    with pytest.raises(ph.ProbhardError):
        ph.PoissonMixture(logits, rates, unit)
