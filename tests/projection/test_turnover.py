"""An L1 ball with one row and bounds: two roots against cvxpy, also at exactly degenerate points."""

import itertools

import cvxpy as cp
import numpy as np
import pytest
import torch

import probhard as ph

HELD = torch.tensor([0.3, 0.2, 0.2, 0.1, 0.1, 0.1], dtype=torch.float64)
TURNOVER = ph.Simplex() & ph.L1Ball(0.4, center=HELD)


def degenerate_points():
    points = [
        HELD + t * (torch.eye(6)[i] - torch.eye(6)[j])
        for i, j in itertools.permutations(range(6), 2)
        for t in (0.1, 0.2, 0.4, 2.0)
    ]
    points += [scale * torch.eye(6)[i] for i in range(6) for scale in (1.0, 100.0)]
    for start in itertools.product((0.0, 0.1, 0.2, 0.5), repeat=3):
        points.append(torch.cat([torch.tensor(start), HELD[3:]]))
    return torch.stack(points).double()


def nearest(z, weight):
    u, point, root = cp.Variable(6), cp.Parameter(6), cp.Parameter(6, nonneg=True)
    cost = cp.sum_squares(cp.multiply(root, u) - point)
    problem = cp.Problem(cp.Minimize(cost), [u >= 0, cp.sum(u) == 1, cp.norm1(u - HELD.numpy()) <= 0.4])
    found = []
    for each, own in zip(z.numpy(), weight.numpy()):
        root.value = own**-0.5
        point.value = own**-0.5 * each
        problem.solve(solver="CLARABEL", tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
        found.append(u.value)
    return torch.from_numpy(np.stack(found))


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.2, 1.0, 5.0])
def test_random_points_converge(spread):
    z = HELD + spread * torch.randn(2000, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    solution = ph.DPPL("orthogonal", on_failure="flag").project(z, TURNOVER)
    assert solution.stats.converged.all()
    assert TURNOVER.violation(solution.value).max() < 1e-12


def test_points_are_nearest():
    z = torch.cat([degenerate_points()[::7], HELD + torch.randn(20, 6, dtype=torch.float64)])
    weight = 0.1 + torch.rand(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for own in (torch.ones_like(weight), weight):
        law = ph.LocationScale(z, ph.Diagonal(own))
        solution = ph.DPPL("oblique").project(z, TURNOVER, dist=law)
        torch.testing.assert_close(solution.value, nearest(z, own), atol=2e-5, rtol=0)


def test_degenerate_points_have_finite_tangents():
    z = degenerate_points()
    solution = ph.DPPL("orthogonal").project(z, TURNOVER)
    assert solution.stats.converged.all()
    step = 1e-7 * torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert solution.tangent.apply(step).isfinite().all()
    moved = ph.DPPL("orthogonal").project(z + step, TURNOVER).value - solution.value
    assert (moved.norm(dim=-1) <= step.norm(dim=-1) * (1 + 1e-6) + 1e-12).all()


def test_gradients_are_those_of_finite_differences():
    z = HELD + 0.3 * torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    layer = ph.DPPL("orthogonal")
    assert torch.autograd.gradcheck(lambda x: layer.project(x, TURNOVER).value, z.requires_grad_(), atol=1e-6)


def test_contradictions_are_still_named():
    far = ph.Simplex() & ph.L1Ball(0.1, center=torch.full((6,), 2.0, dtype=torch.float64))
    with pytest.raises(ph.InfeasibleError):
        ph.DPPL("orthogonal").project(HELD, far)
