"""Nonlinear equalities joined with bounds: points satisfy both and are nearest ones, of sets that are not convex."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import probhard as ph
from probhard.pde import PorousMedium, porous_medium_law
from probhard.pde.laws import known_values
from registry import rand, randn


def sphere(u):
    return u.square().sum(-1, keepdim=True) - 1


def nearest_by_slsqp(z: np.ndarray, variance: np.ndarray, mass: float | None) -> float:
    """The smallest objective over several starts."""
    rows = [{"type": "eq", "fun": lambda u: u @ u - 1, "jac": lambda u: 2 * u}]
    if mass is not None:
        rows.append({"type": "eq", "fun": lambda u: u.sum() - mass, "jac": np.ones_like})
    rng, best = np.random.default_rng(0), np.inf
    for _ in range(6):
        trial = minimize(
            lambda u: float(((u - z) ** 2 / variance).sum()),
            rng.random(len(z)),
            jac=lambda u: 2 * (u - z) / variance,
            bounds=[(0, None)] * len(z),
            constraints=rows,
            method="SLSQP",
            options={"ftol": 1e-13, "maxiter": 300},
        )
        best = min(best, trial.fun) if trial.success else best
    return best


@pytest.mark.parametrize("mass", [None, 1.6])
@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
def test_a_positive_part_of_the_sphere(metric, mass):
    constraint = ph.NonlinearEquality(sphere) & ph.NonNegative()
    if mass is not None:
        constraint = constraint & ph.Conservation(torch.ones(5), mass)
    z, variance = 0.6 * randn(12, 5) + 0.4, rand(12, 5)
    solution = ph.DPPL(metric).project(z, constraint, (z, variance.sqrt()))
    assert solution.stats.converged.all()
    assert (solution.value >= 0).all()
    assert constraint.relative_violation(solution.value).max() <= 1e-10
    weight = variance if metric == "oblique" else torch.ones_like(variance)
    objective = ((solution.value - z).square() / weight).sum(-1)
    best = torch.tensor([nearest_by_slsqp(z[k].numpy(), weight[k].numpy(), mass) for k in range(12)])
    assert (objective >= best - 1e-6).all()
    assert (objective <= 1.001 * best + 1e-9).sum() >= 11  # one may end at a nearest point of its neighbourhood only
    assert solution.stats.local


def test_gradients_agree_with_finite_differences():
    constraint = ph.NonlinearEquality(sphere) & ph.NonNegative()
    layer = ph.DPPL("orthogonal", curvature="exact")
    z = torch.tensor([[0.8, 0.5, -0.4, 0.3]], requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer.project(x, constraint).value, (z,), atol=1e-6)
    solution = layer.project(z, constraint)
    assert solution.value[0, 2] == 0
    assert solution.tangent.variance(ph.Diagonal(torch.ones(4)))[0, 2] == 0


def test_draws_are_all_feasible_and_moments_are_censored():
    constraint = ph.NonlinearEquality(sphere) & ph.NonNegative()
    projected = ph.DPPL()((torch.full((2, 4), 0.3), torch.full((2, 4), 0.3)), constraint)
    draws = projected.sample((200,), torch.Generator().manual_seed(0))
    assert (draws >= 0).all()
    assert constraint.relative_violation(draws).max() <= 1e-10
    assert isinstance(projected.marginals, ph.CensoredMarginals)
    assert constraint.relative_violation(projected.mean).max() <= 1e-10


def test_the_porous_medium_law_with_known_values_and_positivity():
    problem = PorousMedium(dtype=torch.float64)
    m = torch.tensor([2.2, 2.9])
    exact = problem.solution(m).flatten(1)
    z = exact + 0.02 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
    constraint = porous_medium_law(problem, m) & ph.NonNegative()
    solution = ph.DPPL().project(z, constraint, (z, torch.full_like(z, 0.02)))
    assert solution.stats.converged.all()
    assert (solution.value >= 0).all()
    assert constraint.violation(solution.value).max() <= 1e-10
    assert known_values(problem, m).violation(solution.value).max() == 0  # substituted, not iterated on
    assert (solution.value - exact).square().mean() < (z - exact).square().mean()
