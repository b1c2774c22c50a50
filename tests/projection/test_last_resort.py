"""Points over many decades of weights, found in decimal arithmetic: against Clarabel, exact answers and differences."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
import torch
from experiments.reliability.recipes import numbered
from experiments.reliability.trial import broken, failed, trial

import probhard as ph
from probhard.projection.polyhedral import FaceProjector
from probhard.solvers.decimals import Sides, nearest

MENDED = (17, 21, 37, 129)  # numbers of random cases: zeros, L1 balls, simplices over up to 24 decades


def sides(seed: int, slack: float = 1.0) -> tuple[np.ndarray, np.ndarray, Sides]:
    """A point, a root and rows with an auxiliary variable around a known point."""
    random = np.random.default_rng(seed)
    point, on_u = random.normal(size=5), random.normal(size=(6, 5))
    own = np.array([[0.0], [0.0], [1.0], [-1.0], [0.0], [0.0]])
    at = on_u @ point + own @ np.ones(1)
    lower = at - slack * random.uniform(size=6)
    upper = np.where(np.arange(6) < 2, lower, at + slack)
    lower[:2] = upper[:2] = at[:2]
    return point + 3 * random.normal(size=5), random.normal(size=(5, 5)), Sides(on_u, own, lower, upper)


@pytest.mark.parametrize("seed", range(6))
def test_nearest_points_are_those_of_clarabel(seed):
    z, root, rows = sides(seed)
    found = nearest(z, root, rows)
    u, s = cp.Variable(5), cp.Variable(1)
    value = rows.on_u @ u + rows.own @ s
    cost = cp.sum_squares(np.linalg.inv(root) @ (u - z))
    cp.Problem(cp.Minimize(cost), [value >= rows.lower, value <= rows.upper]).solve(
        solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12
    )
    np.testing.assert_allclose(found.value, u.value, atol=1e-6)
    np.testing.assert_allclose(root @ root.T @ found.pull, found.value - z, atol=1e-9)


def test_flat_sets_have_their_point_and_empty_ones_none():
    z, root, rows = sides(0, slack=0.0)
    weights = np.diag(10.0 ** np.array([-12, 12, 0, 5, -7]))
    found = nearest(z, weights @ root, rows)
    np.testing.assert_allclose((rows.on_u @ found.value)[[0, 1, 4, 5]], rows.lower[[0, 1, 4, 5]], atol=1e-12)
    empty = Sides(np.eye(5)[[0, 0]], np.zeros((2, 0)), np.array([1.0, -np.inf]), np.array([np.inf, 0.0]))
    assert nearest(z, root, empty) is None


def test_gradients_are_those_of_differences(monkeypatch):
    constraint = ph.Simplex(1.0) & ph.LinearInequality([[1.0, -1.0, 2.0, 0.5]], [0.1])
    solved = FaceProjector._solved

    def failing(self, z):
        solution = solved(self, z)
        stats = solution.stats
        flagged = type(stats)(stats.steps, stats.residual, torch.zeros_like(stats.converged))
        return type(solution)(solution.value, solution.tangent, flagged)

    z = torch.tensor([0.9, 0.3, 0.4, -0.2], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)

    def value(z, w):
        law = ph.LocationScale(z, ph.Diagonal(w))
        return ph.DPPL("oblique", on_failure="flag").project(z, constraint, law)

    expected = value(z, w)
    monkeypatch.setattr(FaceProjector, "_solved", failing)
    found = value(z, w)
    assert bool(found.stats.converged.all())
    torch.testing.assert_close(found.value, expected.value, atol=1e-10, rtol=0)
    towards = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    for own, other in zip(*(torch.autograd.grad((x.value * towards).sum(), (z, w)) for x in (found, expected))):
        assert bool(own.abs().max() > 0)
        torch.testing.assert_close(own, other, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("number", MENDED)
def test_random_cases_that_failed(number):
    record = trial(numbered(number))
    assert not failed(record), record
    assert not broken(record), record
