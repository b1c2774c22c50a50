"""Feasible points that are stationary to rounding have converged: no false alarms of nonlinear equalities."""

from __future__ import annotations

import pytest
import torch
from experiments.alarm_cases import cases, power_flow, rotation_nine, rotation_six, sphere
from torch import Tensor

import probhard as ph
from registry import covariance, rand, randn

CASES = {case.name: case for case in cases()}
LAYER = ph.DPPL("orthogonal", on_failure="flag")


def polar(z: Tensor) -> Tensor:
    """The nearest orthogonal matrices, by singular values."""
    left, _, right = torch.linalg.svd(z.unflatten(-1, (3, 3)))
    return (left @ right).flatten(-2)


@pytest.mark.parametrize("metric", ["orthogonal", "oblique"])
@pytest.mark.parametrize("spread", ["near", "far"])
def test_power_flow_converges(spread, metric):
    case = CASES["power flow"]
    z = case.points(60, getattr(case, spread), seed=5)
    stddev = torch.cat([torch.full((18,), 0.2), torch.full((9,), 0.02), torch.full((9,), 0.1)])
    solution = ph.DPPL(metric, on_failure="flag").project(z, case.constraint, (case.center, stddev))
    assert solution.stats.converged.all()
    assert case.constraint.violation(solution.value).max() <= 1e-10
    if spread == "near" and metric == "orthogonal":
        assert solution.stats.steps.max() <= 20


def test_a_value_that_is_zero_is_feasible_to_rounding():
    """``theta_1 = 0`` has no term of its own size: rounding of the others counts."""
    bent = ph.NonlinearEquality(lambda u: torch.cat([u[..., :1], u[..., 1:2] * u[..., 2:] - 1], -1))
    z = torch.tensor([[0.3, 2.0, 2.0], [1e-9, 3.0, 1.0], [0.0, 30.0, 1.0]])
    solution = LAYER.project(z, bent)
    assert solution.stats.converged.all()
    assert solution.value[:, 0].abs().max() <= 1e-13


@pytest.mark.parametrize("spread", ["near", "far"])
def test_rotations_by_six_and_by_nine_equations(spread):
    case = CASES["SO(3) by nine"]
    z = case.points(200, getattr(case, spread), seed=2)
    nine, six = (LAYER.project(z, CASES[name].constraint) for name in ("SO(3) by nine", "SO(3) by six"))
    for solution in (nine, six):
        assert solution.stats.converged.all()
        assert CASES["SO(3) by six"].constraint.violation(solution.value).max() <= 1e-10
        distance = (solution.value - z).norm(dim=-1)
        nearest = (polar(z) - z).norm(dim=-1)
        assert (distance >= nearest - 1e-9).all()
        assert (distance <= nearest + 1e-7).double().mean() >= (1.0 if spread == "near" else 0.9)


def derivatives(fn, metric: str, cov: ph.Covariance, curvature: str) -> tuple[Tensor, ...]:
    """Moments of a law projected on ``fn(u) = 0``, and the gradients of a function of them."""
    layer = ph.DPPL(metric, curvature=curvature)
    mean = (torch.eye(3).flatten() + 0.2 * torch.linspace(-1, 1, 18).reshape(2, 9).sin()).requires_grad_()
    law = layer(ph.LocationScale(mean, cov), ph.NonlinearEquality(fn))
    loss = (law.mean * torch.arange(9.0)).sum() + (law.variance * torch.arange(9.0)).sum()
    return law.mean.detach(), law.variance.detach(), torch.autograd.grad(loss, mean)[0]


@pytest.mark.usefixtures("same_data_in_any_order")
@pytest.mark.parametrize("curvature", ["gauss-newton", "exact"])
@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("kind", ["diagonal", "low rank", "dense"])
def test_redundant_rows_have_the_moments_and_gradients_of_independent_ones(kind, metric, curvature):
    cov = covariance(kind, 9).scaled(torch.full((9,), 0.3))
    six, nine = (derivatives(fn, metric, cov, curvature) for fn in (rotation_six, rotation_nine))
    for one, two in zip(six, nine):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


def test_rows_that_are_dependent_only_at_the_solution():
    """``R^T R = I`` and ``R R^T = I``: 18 rows of rank 6 there, of rank 9 elsewhere."""

    def both(u: Tensor) -> Tensor:
        matrix = u.unflatten(-1, (3, 3))
        return torch.cat([rotation_nine(u), rotation_nine(matrix.mT.flatten(-2))], -1)

    z = CASES["SO(3) by nine"].points(50, 0.3, seed=4)
    solution = LAYER.project(z, ph.NonlinearEquality(both))
    assert solution.stats.converged.all()
    torch.testing.assert_close(solution.value, polar(z), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("radius", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("metric", ["orthogonal", "oblique"])
def test_the_centre_of_a_sphere(metric, radius):
    constraint = ph.NonlinearEquality(lambda u: u.square().sum(-1, keepdim=True) - radius**2)
    z = torch.zeros(3, 4)
    solution = ph.DPPL(metric).project(z, constraint, (z, rand(3, 4)))
    assert solution.stats.converged.all()
    torch.testing.assert_close(solution.value.norm(dim=-1), torch.full((3,), radius), rtol=1e-9, atol=0)
    cone = ph.NonlinearEquality(lambda u: u[..., :2].square().sum(-1, keepdim=True) - 1)  # z on the axis of a cylinder
    on_axis = torch.tensor([[0.0, 0.0, 2.0]])
    assert (LAYER.project(on_axis, cone).value - on_axis).norm() == pytest.approx(1, rel=1e-6)


def test_points_of_a_batch_do_not_change_each_other():
    z = torch.cat([torch.zeros(1, 3), randn(4, 3), torch.zeros(1, 3)])
    constraint = ph.NonlinearEquality(sphere)
    together = LAYER.project(z, constraint)
    for k in range(len(z)):
        torch.testing.assert_close(LAYER.project(z[k : k + 1], constraint).value[0], together.value[k])


def test_loads_may_differ_between_points():
    case = CASES["power flow"]
    load = case.center[:18] + 0.05 * randn(7, 18)
    solution = LAYER.project(case.points(7, 0.1), power_flow(load))
    assert solution.stats.converged.all()
    assert power_flow(load).violation(solution.value).max() <= 1e-10
