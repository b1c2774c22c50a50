"""What scores of functionals see: a spanning family is minimised by the true covariance, margins are blind to it."""

from __future__ import annotations

import math

import pytest
import scipy.integrate
import scoringrules
import torch

import probhard as ph
from functional_cases import GRID, N, randn


def expected_crps(forecast: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """``E CRPS(N(0, s^2), Y)`` for Y ~ N(0, t^2), elementwise."""
    return math.sqrt(2 / math.pi) * (forecast**2 + truth**2).sqrt() - forecast / math.sqrt(math.pi)


def test_the_expected_score_of_a_normal_law():
    value, _ = scipy.integrate.quad(
        lambda y: scoringrules.crps_normal(y, 0.0, 0.7) * math.exp(-0.5 * (y / 1.3) ** 2), -20, 20
    )
    oracle = value / (1.3 * math.sqrt(2 * math.pi))
    assert expected_crps(torch.tensor(0.7), torch.tensor(1.3)).item() == pytest.approx(oracle, rel=1e-9)


def spanning(n: int) -> torch.Tensor:
    """Unit vectors and sums of two of them: their outer products span all symmetric matrices."""
    eye = torch.eye(n)
    return torch.cat([eye, torch.stack([eye[i] + eye[j] for i in range(n) for j in range(i)])])


def test_a_spanning_family_is_minimised_by_the_true_covariance_alone():
    n, generator = 4, torch.Generator().manual_seed(2)
    truth = torch.linalg.cholesky(torch.eye(n) + 0.8 * torch.ones(n, n))
    rows = ph.Directions(spanning(n)).rows(n)

    def risk(root: torch.Tensor, family=rows) -> torch.Tensor:
        scales = [ph.LocationScale(torch.zeros(n), ph.Dense(L)).functional(family).scale for L in (root, truth)]
        return expected_crps(*scales).sum()

    root = truth.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(risk(root), root)
    torch.testing.assert_close(gradient, torch.zeros(n, n), rtol=0, atol=1e-12)
    least = risk(truth)
    for _ in range(50):
        step = torch.randn(n, n, generator=generator).tril() * 0.1
        assert risk(truth + step) > least + 1e-6
    # Optimisation from the identity finds it.
    root = torch.eye(n).requires_grad_()
    optimiser = torch.optim.LBFGS([root], max_iter=300, tolerance_grad=1e-12, tolerance_change=1e-16)

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = risk(root.tril())
        loss.backward()
        return loss

    optimiser.step(closure)
    found = root.detach().tril()
    torch.testing.assert_close(found @ found.T, truth @ truth.T, rtol=1e-4, atol=1e-4)
    # Margins alone do not see correlations.
    margins = ph.Directions(torch.eye(n)).rows(n)
    assert float(risk(torch.diag((truth @ truth.T).diagonal().sqrt()), margins)) == pytest.approx(
        float(risk(truth, margins)), rel=1e-12
    )


def test_the_score_in_expectation():
    """The mean of the score over draws of the truth is the formula of the expectation."""
    law = ph.LocationScale(torch.zeros(N), ph.LowRank(randn(N, 2), torch.ones(N)))
    wrong = ph.LocationScale(torch.zeros(N), ph.Diagonal(law.variance))
    y = law.sample((20_000,), torch.Generator().manual_seed(3))
    for forecast in (law, wrong):
        score = ph.crps(forecast.expand((20_000,)), y, functionals=GRID)
        expected = expected_crps(*(one.functional(GRID.rows(N)).scale for one in (forecast, law)))
        assert ((score.mean(0) - expected).abs() < 4 * score.std(0) / math.sqrt(20_000)).all()


def test_random_directions_hardly_see_a_correlation_and_block_means_do():
    n = 1000
    lag = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    truth = torch.linalg.cholesky(0.985**lag)
    laws = [ph.LocationScale(torch.zeros(n), cov) for cov in (ph.Diagonal(torch.ones(n)), ph.Dense(truth))]

    def loss(family: ph.Functionals) -> torch.Tensor:
        alone, joint = (law.functional(family.rows(n)).scale for law in laws)
        return family.means(expected_crps(alone, joint)) / family.means(expected_crps(joint, joint)) - 1

    assert float(loss(ph.Directions(randn(200, n)))) < 0.02
    assert (loss(ph.BlockMeans((n,), (8, 16, 32, 64))) > 0.14).all()
