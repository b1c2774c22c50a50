"""Degenerate input: certain variables, sets without rows, numbers beyond float32, averages that cancel."""

from __future__ import annotations

import cvxpy as cp
import pytest
import torch

import probhard as ph
from probhard.errors import ProbhardError
from probhard.projection.means import moments_of

DOUBLE = torch.float64


@pytest.mark.parametrize("variance", [0.0, 1.0])
def test_a_ball_has_gradients_at_its_center(variance):
    loc = torch.zeros(3, dtype=DOUBLE, requires_grad=True)
    law = ph.LocationScale(loc, ph.Diagonal(torch.full((3,), variance, dtype=DOUBLE)))
    projected = ph.DPPL()(law, ph.Ball(1.0))
    (gradient,) = torch.autograd.grad(projected.mean.sum() + projected.variance.sum(), loc)
    assert bool(torch.isfinite(gradient).all())
    if variance == 0:
        torch.testing.assert_close(gradient, torch.ones_like(gradient))  # inside, the projection is the identity


def test_certain_points_outside_a_ball_move_by_equal_weights():
    law = ph.LocationScale(torch.full((3,), 2.0, dtype=DOUBLE), ph.Diagonal(torch.zeros(3, dtype=DOUBLE)))
    solution = ph.DPPL().project(law.loc, ph.Ball(1.0), law)
    torch.testing.assert_close(solution.value, torch.full((3,), 3**-0.5, dtype=DOUBLE))


@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize(("weight", "variance", "size"), [(1.0, 1e28, 1.0), (1e-14, 1.0, 1.0), (1e-14, 1e-28, 1e-14)])
def test_rows_beyond_the_range_of_float32_have_gradients(metric, weight, variance, size):
    source = torch.Generator().manual_seed(0)
    loc = (size * torch.randn(5, generator=source, dtype=torch.float32)).requires_grad_()
    spread = (variance * (0.1 + torch.rand(5, generator=source, dtype=torch.float32))).requires_grad_()
    row = weight * (0.1 + torch.rand(5, generator=source, dtype=torch.float32))
    law = ph.LocationScale(loc, ph.Diagonal(spread))
    projected = ph.DPPL(metric)(law, ph.Conservation(row, torch.tensor(weight * size, dtype=torch.float32)))
    gradients = torch.autograd.grad(projected.mean.sum() + projected.stddev.sum(), (loc, spread))
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    terms = row.double() * projected.mean.detach().double()
    assert abs(float(terms.sum()) - weight * size) <= 1e-5 * float(terms.abs().sum())


def test_a_program_with_a_number_and_one_point():
    program = ph.ConvexProgram(_norm, 3, args=(torch.tensor(1.0, dtype=DOUBLE),), parameters=((),))
    solution = ph.DPPL("orthogonal").project(torch.full((3,), 2.0, dtype=DOUBLE), program)
    torch.testing.assert_close(solution.value, torch.full((3,), 3**-0.5, dtype=DOUBLE))
    assert solution.stats.converged.shape == ()


def _norm(u: cp.Variable, radius: cp.Parameter) -> list[cp.Constraint]:
    return [cp.norm(u) <= radius]


@pytest.mark.parametrize("covariance", ["dense", "low rank", "diagonal"])
@pytest.mark.parametrize(("constraint", "n"), [(ph.Monotone(), 1), (ph.Convex(), 2), (ph.Box(), 3)], ids=repr)
def test_sets_without_rows_change_nothing(constraint, n, covariance):
    ones = torch.ones(n, dtype=DOUBLE)
    cov = {
        "dense": ph.Dense(torch.eye(n, dtype=DOUBLE)),
        "low rank": ph.LowRank(ones.unsqueeze(-1), ones),
        "diagonal": ph.Diagonal(ones),
    }[covariance]
    loc = torch.arange(n, dtype=DOUBLE)
    projected = ph.DPPL()(ph.LocationScale(loc, cov), constraint)
    torch.testing.assert_close(projected.mean, loc, atol=0.5, rtol=0)  # of fixed draws, or exactly
    solution = ph.DPPL().project(loc, constraint, ph.LocationScale(loc, cov))
    torch.testing.assert_close(solution.value, loc)


def test_wide_variances_of_a_crossed_hierarchy_never_end_in_a_bare_error():
    sums = [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
    summing = torch.cat([torch.tensor(sums, dtype=DOUBLE), torch.eye(4, dtype=DOUBLE)])
    source = torch.Generator().manual_seed(0)
    constraint = ph.Hierarchy(summing) & ph.NonNegative()
    for _ in range(8):
        own = 10 ** (24 * torch.rand(9, generator=source, dtype=DOUBLE) - 12)
        shared = torch.randn(9, 2, generator=source, dtype=DOUBLE) * own.sqrt().unsqueeze(-1) * 1e3
        law = ph.LocationScale(10 * torch.randn(9, generator=source, dtype=DOUBLE), ph.LowRank(shared, own))
        try:
            drawn = ph.DPPL(on_failure="flag").project(law.loc, constraint, law)
        except ProbhardError:
            continue
        good = drawn.stats.converged
        assert bool((constraint.relative_violation(drawn.value) <= 1e-8)[good].all())


def test_averages_of_float32_draws_are_those_of_float64():
    source = torch.Generator().manual_seed(1)
    draws = 1e6 + torch.randn(100, 4, generator=source, dtype=torch.float32)
    mean, scale = moments_of(draws, 1.0)
    exact = draws.double()
    torch.testing.assert_close(mean, exact.mean(0).float(), rtol=0, atol=0)
    torch.testing.assert_close(scale, exact.std(0, correction=0).float())


def test_a_mean_of_draws_stays_within_bounds_and_rows():
    weights = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float32)
    law = ph.LocationScale(torch.tensor([1e4, -1e4, 0.1]).float(), ph.Diagonal(torch.full((3,), 1e8).float()))
    constraint = ph.Conservation(weights, torch.tensor(0.1)) & ph.NonNegative() & ph.Ball(10.0)
    mean = ph.DPPL("orthogonal")(law, constraint).mean
    assert bool((mean >= 0).all())
    total = float((weights.double() * mean.double()).sum())
    assert total == pytest.approx(0.1, rel=1e-4)
