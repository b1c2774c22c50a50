"""Projection on sets with inequalities against a cone solver, over the registry: value, feasibility and edges."""

from __future__ import annotations

import itertools

import cvxpy as cp
import pytest
import torch

import probhard as ph
from constraints.inequalities import built, distance, each_set, normal, spread
from probhard.errors import ParameterError
from sets import BATCH, DIAGONAL, INF, METRICS, SETS, TIGHT, TREE, nearest, tensor, weighing

# ------------------------------------------------------------------------------------------- against a cone solver


NEAREST = list(itertools.product(SETS, METRICS))


@pytest.mark.parametrize(("name", "metric"), NEAREST)
def test_projected_points_are_nearest_and_feasible(name, metric):
    entry, constraint = built(name)
    chosen, cov = weighing(metric, entry.n)
    layer = ph.DPPL(chosen)
    z = spread(entry)
    if entry.curved and metric not in DIAGONAL and not entry.coupled:
        with pytest.raises(ParameterError, match="couples"):
            layer.project(z, constraint, dist=ph.LocationScale(z[0], cov))
        return
    weight = layer.metric.weight(z, cov)
    weight = weight.diagonal().expand(BATCH, -1) if metric in DIAGONAL else weight.dense()
    expected = nearest(name, z, weight)
    inside = expected.mean(0, keepdim=True)
    z = torch.cat([z, inside])
    expected = torch.cat([expected, inside if entry.projection else nearest(name, inside, weight)])

    solution = layer.project(z, constraint, dist=ph.LocationScale(z[0], cov))
    error = (solution.value - expected).abs().amax(-1)
    near = error <= (1e-4 if entry.curved else 1e-5)
    if entry.projection:  # where Clarabel itself ends early, a feasible point nearer than its own will do
        near |= distance(solution.value, z, weight) <= distance(expected, z, weight)
    assert near.all(), float(error[~near].max())
    assert solution.stats.converged.all()
    assert solution.stats.converged.shape == (4, BATCH)
    assert entry.outside(solution.value) == 0
    assert entry.violation(solution.value, z) < 1e-9
    assert constraint.relative_violation(solution.value, z.abs().amax(-1, keepdim=True)).max() < 1e-9

    for k in (1, 3):  # a batch without samples
        alone = layer.project(z[k], constraint, dist=ph.LocationScale(z[k], cov)).value
        torch.testing.assert_close(alone, solution.value[k], rtol=1e-9, atol=1e-9)


ALONE = [name for name, entry in SETS.items() if entry.shared]


@pytest.mark.parametrize("name", ALONE)
def test_a_point_without_a_batch(name):
    entry, constraint = built(name)
    z = spread(entry)
    together = ph.DPPL("orthogonal").project(z, constraint).value
    for k in range(3):
        alone = ph.DPPL("orthogonal").project(z[k, 0], constraint)
        assert alone.stats.converged.shape == ()
        torch.testing.assert_close(alone.value, together[k, 0], rtol=1e-7, atol=1e-7)


def drawn(name: str, rounds: int, size: int) -> None:
    entry, constraint = built(name)
    for seed in range(rounds):
        generator = torch.Generator().manual_seed(seed)
        exponent = 4 * torch.rand(BATCH, entry.n, generator=generator) - 2
        law = ph.LocationScale(entry.loc + 2 * normal(seed, BATCH, entry.n), ph.Diagonal(10**exponent))
        layer = ph.DPPL(("oblique", "orthogonal")[seed % 2], covariance="delta")
        draws = layer(law, constraint).draw((size // 20 if entry.curved else size,), generator)
        assert draws.stats.converged.all()
        assert entry.outside(draws.value) == 0
        size_of = torch.maximum(law.loc.abs(), draws.value.abs()) + law.cov.diagonal().sqrt()
        assert entry.violation(draws.value, size_of) < 1e-9


@pytest.mark.parametrize("name", SETS)
def test_no_draw_is_infeasible(name):
    drawn(name, 2, 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_none_of_a_million_draws_is_infeasible(name):
    drawn(name, 20, 500)


def test_diminishing_variation_is_projected_slice_after_slice():
    slices, width = 4, 6
    z, variance = 2 * normal(6, BATCH, slices * width), torch.rand(BATCH, slices * width) + 0.1
    constraint = ph.TotalVariationDiminishing((slices, width))
    solution = ph.DPPL().project(z, constraint, dist=ph.LocationScale(z, ph.Diagonal(variance)))
    assert solution.stats.converged.all()
    values, points, weights = (x.unflatten(-1, (slices, width)) for x in (solution.value, z, variance))
    torch.testing.assert_close(values[:, 0], points[:, 0])
    for k, t in itertools.product(range(BATCH), range(1, slices)):
        u, root = cp.Variable(width), weights[k, t].sqrt().numpy()
        amount = float(values[k, t - 1].diff().abs().sum())
        away = cp.sum_squares((u - points[k, t].numpy()) / root)
        cp.Problem(cp.Minimize(away), [cp.tv(u) <= amount]).solve(solver=cp.CLARABEL, **TIGHT)
        torch.testing.assert_close(values[k, t], torch.from_numpy(u.value), rtol=0, atol=1e-5)
        assert values[k, t].diff().abs().sum() <= amount * (1 + 1e-12)


# ------------------------------------------------------------------------------------ fixed points, kinks, float32


FIXED = list(itertools.product(SETS, ("oblique", "orthogonal")))


@pytest.mark.parametrize(("name", "metric"), FIXED)
def test_points_of_the_set_stay_and_projecting_twice_changes_nothing(name, metric):
    entry, constraint = built(name)
    layer, law = ph.DPPL(metric), (torch.zeros(BATCH, entry.n), torch.rand(BATCH, entry.n) + 0.1)
    once = layer.project(spread(entry), constraint, dist=law).value
    if not entry.projection:
        return
    for inside in (once, once.mean(0), 0.3 * once[:1] + 0.7 * once[1:]):
        again = layer.project(inside, constraint, dist=law)
        torch.testing.assert_close(again.value, inside, rtol=1e-9, atol=1e-9)
        assert again.stats.converged.all()
        assert entry.outside(again.value) == 0


def test_points_on_a_curved_edge_stay_whatever_their_multipliers_round_to():
    """Of 2,000, of which a plain test of signs leaves some undecided."""
    generator = torch.Generator().manual_seed(0)
    row, center = 0.1 + torch.rand(6, generator=generator), torch.rand(6, generator=generator)
    edge = ph.Ball(1.0, center) & ph.Conservation(row, row @ center + 0.2)
    layer = ph.DPPL("orthogonal")
    once = layer.project(center + 3 * torch.randn(2000, 6, generator=generator), edge).value
    again = layer.project(once, edge)
    assert again.stats.converged.all()
    torch.testing.assert_close(again.value, once, rtol=1e-12, atol=1e-12)


@each_set
def test_kinks_are_deterministic(name):
    entry, constraint = built(name)
    layer = ph.DPPL("orthogonal", on_failure="flag")
    edge = layer.project(spread(entry), constraint).value.detach().requires_grad_()
    results = []
    for _ in range(2):
        solution = layer.project(edge, constraint)
        (slope,) = torch.autograd.grad((solution.value * torch.arange(1.0, entry.n + 1)).sum(), edge)
        assert slope.isfinite().all()
        results.append((solution.value, slope))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_a_variable_that_touches_its_bound_is_free():
    z = torch.tensor([0.0, 1.0, 0.5], requires_grad=True)
    (slope,) = torch.autograd.grad(ph.DPPL("orthogonal").project(z, ph.Box(0.0, 1.0)).value.sum(), z)
    torch.testing.assert_close(slope, torch.ones(3))


@pytest.mark.parametrize(("name", "metric"), FIXED)
def test_float32_stays_within_bounds(name, metric):
    entry, constraint = built(name)
    z = spread(entry).float().requires_grad_()
    stddev = (torch.rand(BATCH, entry.n) + 0.3).float().requires_grad_()
    law = ph.LocationScale(torch.zeros(BATCH, entry.n, dtype=torch.float32), ph.Diagonal.from_stddev(stddev))
    solution = ph.DPPL(metric).project(z, constraint.to(torch.float32), dist=law)
    assert solution.value.dtype == torch.float32
    assert solution.stats.converged.all()
    assert entry.outside(solution.value.detach()) == 0
    assert entry.violation(solution.value.detach(), z.detach()) < 1e-5
    (solution.value.square().sum() + solution.tangent.variance(law.cov).sum()).backward()
    assert z.grad.dtype == torch.float32
    assert z.grad.isfinite().all()
    assert metric == "orthogonal" or stddev.grad.isfinite().all()


# ------------------------------------------------------------------------------------------- sets of a single point

LINE = [0.0, 0.2, 0.5, 0.9, 1.0]
POINTS = {  # the set, and its only point
    "mass 1 below 1": (lambda: ph.Conservation(torch.ones(1), 1.0) & ph.Box(0.0, 1.0), [1.0]),
    "full": (lambda: ph.Conservation(torch.ones(5), 5.0) & ph.Box(0.0, 1.0), [1.0] * 5),
    "empty": (lambda: ph.Conservation(torch.ones(5), 0.0) & ph.NonNegative(), [0.0] * 5),
    "simplex of 0": (lambda: ph.Simplex(0.0), [0.0] * 5),
    "more than full by rounding": (
        lambda: ph.Conservation(torch.ones(5), 5 * (1 + 1e-13)) & ph.Box(0.0, 1.0),
        [1.0] * 5,
    ),
    "row of any sign": (
        lambda: ph.Conservation(tensor([1.0, -2.0, 3.0]), 4.0) & ph.Box(0.0, 1.0),
        [1.0, 0.0, 1.0],
    ),
    "equal bounds": (lambda: ph.Box(tensor(LINE), tensor(LINE)), LINE),
    "tree of 0": (
        lambda: ph.Hierarchy(TREE) & ph.Box(0.0, tensor([0.0, *[INF] * 6])),
        [0.0] * 7,
    ),
    "tree at its caps": (
        lambda: ph.Hierarchy(TREE) & ph.Box(tensor([4.0, *[0.0] * 6]), tensor([INF, INF, INF, *[1.0] * 4])),
        [4.0, 2, 2, 1, 1, 1, 1],
    ),
    "variation 0 with a mass": (lambda: ph.TotalVariation(0.0) & ph.Conservation(torch.ones(5), 2.0), [0.4] * 5),
    "increasing at full mass": (
        lambda: ph.Monotone() & ph.Conservation(torch.ones(5), 5.0) & ph.Box(0.0, 1.0),
        [1.0] * 5,
    ),
    "rows from both sides": (
        lambda: ph.LinearInequality(torch.cat([torch.eye(3), -torch.eye(3)]), tensor([1.0, 2, 3, -1, -2, -3])),
        [1.0, 2.0, 3.0],
    ),
    "rows that meet in a point": (
        lambda: ph.LinearInequality(tensor([[1.0, 1.0], [-1.0, 1.0], [0.0, -1.0]]), torch.zeros(3)),
        [0.0, 0.0],
    ),
}


@pytest.mark.parametrize("name", POINTS)
def test_a_set_of_one_point_returns_it(name):
    build, point = POINTS[name][0], tensor(POINTS[name][1])
    n = len(point)
    for metric in ("oblique", "orthogonal"):
        law = (torch.zeros(n), torch.rand(n) + 0.1)
        solution = ph.DPPL(metric).project(point + normal(3, 20, n), build(), dist=law)
        torch.testing.assert_close(solution.value, point.expand(20, n), rtol=0, atol=1e-9)
        assert solution.stats.converged.all()
        moments = ph.DPPL(metric, covariance="delta")((point + normal(4, n), law[1]), build())
        assert moments.variance.abs().max() < 1e-9


TIES = {
    "full": (lambda: ph.Conservation(torch.ones(5), 5.0) & ph.Box(0.0, 1.0), [0.0] * 5),
    "equal bounds, met": (lambda: ph.Box(tensor(LINE), tensor(LINE)), LINE),
}


@pytest.mark.parametrize("name", TIES)
def test_a_set_of_one_point_has_no_variance_where_means_are_tied(name):
    build, loc = TIES[name]
    moments = ph.DPPL("orthogonal", covariance="delta")((tensor(loc), torch.ones(5)), build())
    assert moments.variance.abs().max() < 1e-9


def test_a_mass_that_float32_rounds_above_the_capacity():
    constraint = ph.Conservation(torch.ones(5), 5 * (1 + 1e-7)) & ph.Box(0.0, 1.0)
    z = normal(3, 20, 5).float()
    solution = ph.DPPL("orthogonal").project(z, constraint.to(torch.float32))
    assert torch.equal(solution.value, torch.ones(20, 5, dtype=torch.float32))
