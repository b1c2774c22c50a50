"""Newton's method in u for flagged points of balls and smooth programs, against the other solvers and cvxpy."""

from __future__ import annotations

from dataclasses import replace

import cvxpy as cp
import numpy as np
import pytest
import torch

import probhard as ph
from probhard.laws.covariance import Diagonal
from probhard.projection.base import Options
from probhard.projection.dispatch import projector_of
from probhard.projection.parts import parts_of
from probhard.projection.smooth_sets import BallFunctions, smoothly
from probhard.solvers.convex_newton import solve
from probhard.solvers.decimals import Sides

N = 5


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cubic(u: cp.Variable, bound: cp.Parameter) -> list[cp.Constraint]:
    return [cp.pnorm(u, 3) <= bound]


SETS = {
    "ball & rows & bounds": lambda: ph.Ball(1.0) & ph.LinearEquality(np.ones((1, N)), torch.tensor([0.3])) & BOX,
    "two balls & profile": lambda: ph.Ball(1.0) & ph.Ball(1.2, 0.3 * randn(N, seed=3)) & ph.Monotone(),
    "program & bounds": lambda: ph.ConvexProgram(cubic, N, (1.0,), ((),)) & BOX,
}
BOX = ph.Box(torch.full((N,), -0.2, dtype=torch.float64), torch.full((N,), torch.inf, dtype=torch.float64))


@pytest.mark.parametrize("name", SETS)
def test_points_gradients_and_tangents_are_those_of_the_other_solver(name):
    constraint = SETS[name]()
    z, w = (2 * randn(3, N, seed=1)).requires_grad_(), (0.5 + randn(3, N, seed=2).square()).requires_grad_()
    projector = projector_of(constraint, z, Diagonal(w), Options())
    known = projector.solve(z)
    assert bool(known.stats.converged.all())
    flagged = replace(known, stats=replace(known.stats, converged=torch.zeros(3, dtype=torch.bool)))
    found = smoothly(parts_of(constraint, N), Diagonal(w), z, flagged, lambda _: flagged)
    assert bool(found.stats.converged.all())
    torch.testing.assert_close(found.value, known.value, rtol=1e-8, atol=1e-9)
    x = randn(3, N, seed=4)
    torch.testing.assert_close(found.tangent.apply(x), known.tangent.apply(x), rtol=1e-4, atol=1e-5)
    for first, second in zip(torch.autograd.grad((found.value * x).sum(), (z, w)), _differences(projector, w, z, x)):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def _differences(projector, w, z, x, step=1e-6):
    """Gradients of ``sum(u x)`` in z and w by central differences of the other solver."""

    def value(z, w):
        again = type(projector)(projector.parts, Diagonal(w), projector.options)
        return (again.solve(z).value * x).sum(-1)

    z, w = z.detach(), w.detach()
    units = step * torch.eye(N, dtype=torch.float64)
    of_z = [(value(z + e, w) - value(z - e, w)) / (2 * step) for e in units]
    of_w = [(value(z, w + e) - value(z, w - e)) / (2 * step) for e in units]
    return torch.stack(of_z, -1), torch.stack(of_w, -1)


def test_gradients_in_radius_and_center():
    radius = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    center = (0.1 * randn(N, seed=5)).requires_grad_()
    z, cov = 2 * randn(N, seed=1), Diagonal(0.5 + randn(N, seed=2).square())
    constraint = ph.Ball(radius, center) & ph.LinearEquality(np.ones((1, N)), torch.tensor([0.3]))
    known = projector_of(constraint, z, cov, Options()).solve(z)
    flagged = replace(known, stats=replace(known.stats, converged=torch.tensor(False)))
    found = smoothly(parts_of(constraint, N), cov, z, flagged, lambda _: flagged)
    assert bool(found.stats.converged)
    x = randn(N, seed=6)
    first, second = (
        torch.autograd.grad((s.value * x).sum(), (radius, center), retain_graph=True) for s in (found, known)
    )
    for one, other in zip(first, second):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_dense_weights_and_far_points():
    root = torch.tril(randn(N, N, seed=7)) + 2 * torch.eye(N, dtype=torch.float64)
    for size in (1.0, 30.0):
        z = size * randn(N, seed=8).numpy()
        rows = np.eye(N)
        sides = Sides(rows, np.zeros((N, 0)), np.zeros(N), np.full(N, np.inf))
        found = solve(z, root.numpy(), sides, BallFunctions(np.ones(1), np.zeros((1, N))))
        assert found is not None
        u = cp.Variable(N)
        inverse = np.linalg.inv(root.numpy())
        problem = cp.Problem(cp.Minimize(cp.norm(inverse @ (u - z) / size)), [u >= 0, cp.norm(u) <= 1])
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
        ours = np.linalg.norm(inverse @ (found.answer.face - z))
        theirs = np.linalg.norm(inverse @ (u.value - z))
        assert ours <= theirs * (1 + 1e-9)
        assert np.linalg.norm(found.answer.face) <= 1 + 1e-12
        assert found.answer.face.min() >= -1e-200


def test_an_empty_set_is_not_found():
    sides = Sides(np.eye(2), np.zeros((2, 0)), np.full(2, 3.0), np.full(2, np.inf))
    assert solve(np.zeros(2), np.eye(2), sides, BallFunctions(np.ones(1), np.zeros((1, 2)))) is None


def test_zeros_at_the_tips_of_lifted_cones():
    """Where a cone solver has no digits: a cubic norm with half of the variables at 0, and weights over ten decades."""
    z = torch.tensor([[13.7, -7.0, 24.0, -8.7, -9.5], [-22.8, -17.2, -52.0, -13.3, 32.0]], dtype=torch.float64)
    w = torch.tensor([[1.4e2, 2.2e-3, 73.0, 2.9e-5, 2.2e-6], [1.8e-4, 1.2, 7.4e2, 1.1e-5, 5.1e2]], dtype=torch.float64)
    constraint = ph.ConvexProgram(cubic, 5, (1.0,), ((),)) & ph.NonNegative()
    solution = ph.DPPL(on_failure="flag").project(z, constraint, ph.LocationScale(z, Diagonal(w)))
    assert bool(solution.stats.converged.all())
    u, slope = solution.value, solution.value.square()
    force, free = (z - u) / w, u > 0
    share = (force * slope).sum(-1, keepdim=True) / slope.square().sum(-1, keepdim=True)
    assert bool((share > 0).all())
    assert float(((force - share * slope) * free).abs().max()) < 1e-7 * float(share.max())
    assert bool((force[~free] <= 0).all())
