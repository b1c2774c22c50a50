"""Projection on sets with inequalities against a cone solver, over the registry: value, feasibility, edges, errors."""

from __future__ import annotations

import itertools
import re

import cvxpy as cp
import pytest
import torch
from torch import Tensor, nn

import probhard as ph
from probhard.errors import InfeasibleError, ParameterError, ProbhardError, ShapeError
from probhard.projection.lifting import lift
from probhard.projection.parts import parts_of
from probhard.rows.disjoint import DisjointRows
from sets import BATCH, DIAGONAL, INF, METRICS, SETS, TIGHT, TREE, Set, nearest, tensor, weighing

each_set = pytest.mark.parametrize("name", SETS)


def built(name: str) -> tuple[Set, ph.Constraint]:
    """The entry and its constraint."""
    return SETS[name], SETS[name].build()


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spread(entry: Set, seed: int = 5) -> Tensor:
    """Points (3, BATCH, n) near the set, beside it, and far outside."""
    sizes = 0.3, 2.0, entry.far
    return torch.stack([entry.loc + size * normal(seed + i, BATCH, entry.n) for i, size in enumerate(sizes)])


def distance(u: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """``|u - z|^2`` in the metric, (..., BATCH)."""
    if weight.dim() == 2:
        return ((u - z).square() / weight).sum(-1)
    return torch.einsum("...bi,bij,...bj->...b", u - z, torch.linalg.inv(weight), u - z)


# ------------------------------------------------------------------------------------------- against a cone solver


NEAREST = list(itertools.product(SETS, METRICS))


@pytest.mark.parametrize(("name", "metric"), NEAREST)
def test_projected_points_are_nearest_and_feasible(name, metric):
    entry, constraint = built(name)
    chosen, cov = weighing(metric, entry.n)
    layer = ph.DPPL(chosen)
    z = spread(entry)
    if entry.curved and metric not in DIAGONAL and name != "convex program":
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


# -------------------------------------------------------------------------------------------- empty sets, bad input


def projected(constraint: ph.Constraint, n: int, batch: tuple[int, ...] = ()) -> Tensor:
    return ph.DPPL().project(normal(1, *batch, n), constraint, dist=(torch.zeros(n), torch.ones(n))).value


EMPTY = {  # what is done, and what its message names
    "bounds crossed": (lambda: ph.Box(1.0, 0.0), ["1", "0", "bound"]),
    "bounds crossed once": (lambda: ph.Box(torch.zeros(3, 4), torch.tensor([[1.0], [1.0], [-1.0]])), ["(2, 0)"]),
    "boxes apart": (lambda: ph.Box(0.0, 1.0) & ph.Box(2.0, 3.0), ["2", "1"]),
    "mass above capacity": (
        lambda: projected(ph.Conservation(torch.ones(4), 5.0) & ph.Box(0.0, 1.0), 4),
        ["Conservation", "5", "0 to 4"],
    ),
    "mass above capacity in one element": (
        lambda: projected(ph.Conservation(torch.ones(4), torch.tensor([1.0, 5.0, 2.0])) & ph.Box(0.0, 1.0), 4, (3,)),
        ["Conservation", "5", "(1,)"],
    ),
    "mass above capacity in one element of the moments": (
        lambda: (
            ph.DPPL()(
                (torch.zeros(3, 4), torch.ones(3, 4)),
                ph.Conservation(torch.ones(4), torch.tensor([1.0, 5.0, 2.0])) & ph.Box(0.0, 1.0),
            ).mean
        ),
        ["Conservation", "5", "(1,)"],
    ),
    "mass above capacity in one slice": (
        lambda: projected(
            ph.per_slice(ph.Conservation(torch.ones(4), torch.tensor([1.0, 5.0])) & ph.Box(0, 1), (2, 4)), 8
        ),
        ["5", "Row 1"],
    ),
    "increasing with mass above capacity": (
        lambda: projected(
            ph.Monotone() & ph.Conservation(torch.ones(4), torch.tensor([1.0, 5.0])) & ph.Box(0, 1), 4, (2,)
        ),
        ["Conservation", "(1,)"],
    ),
    "rows that contradict": (
        lambda: projected(ph.LinearInequality(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([1.0, -2.0])), 2),
        ["LinearInequality"],
    ),
    "rows that contradict in one element": (
        lambda: projected(
            ph.LinearInequality(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([[1.0, 2.0], [1.0, -2.0]])),
            2,
            (2,),
        ),
        ["LinearInequality", "(1,)"],
    ),
    "rows of one element's own that contradict": (
        lambda: projected(
            ph.LinearInequality(torch.tensor([[[1.0, 1.0], [-1.0, 1.0]], [[1.0, 1.0], [-1.0, -1.0]]]), [1.0, -2.0]),
            2,
            (2,),
        ),
        ["LinearInequality", "(1,)"],
    ),
    "single rows that contradict": (
        lambda: projected(ph.LinearInequality(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.tensor([1.0, -2.0])), 2),
        ["2", "1"],
    ),
    "tree over its cap": (
        lambda: projected(
            ph.Hierarchy(TREE) & ph.Box(torch.tensor([9.0, *[0.0] * 6]), torch.tensor([INF, *[2.0] * 6])), 7
        ),
        ["Hierarchy"],
    ),
    "negative total": (lambda: ph.Simplex(-1.0), ["-1", "simplex"]),
    "negative total in one element": (lambda: ph.Simplex(torch.tensor([1.0, -2.0])), ["-2", "(1,)"]),
    "negative radius": (lambda: ph.Ball(-1.0), ["-1"]),
}


def explained(error: ProbhardError, fragments: list[str]) -> None:
    for part in (error.what, error.why, error.fix):
        assert part.strip()
        assert part.rstrip().endswith(".")
    for fragment in fragments:
        assert fragment in str(error)


@pytest.mark.parametrize("name", EMPTY)
def test_empty_sets_are_named(name):
    action, fragments = EMPTY[name]
    with pytest.raises(InfeasibleError) as caught:
        action()
    explained(caught.value, fragments)


NAN = torch.nan
BAD = {
    "NaN bound": (lambda: ph.Box(torch.tensor([0.0, NAN])), ParameterError, ["1 NaN", "lower"]),
    "NaN number": (lambda: ph.Box(None, NAN), ParameterError, ["NaN", "upper"]),
    "bounds of other shapes": (lambda: ph.Box(torch.zeros(3), torch.ones(4)), ShapeError, ["(3,)", "(4,)"]),
    "box of another size": (lambda: projected(ph.Box(torch.zeros(3)), 4), ShapeError, ["3", "4"]),
    "box of another batch": (lambda: projected(ph.Box(torch.zeros(3, 4), 1.0), 4, (2,)), ShapeError, ["(2,)", "(3,)"]),
    "mass of another batch": (
        lambda: projected(ph.Conservation(torch.ones(4), torch.ones(3)) & ph.NonNegative(), 4, (2,)),
        ShapeError,
        ["3", "2"],
    ),
    "'&' of sizes that differ": (
        lambda: ph.Box(torch.zeros(3)) & ph.Conservation(torch.ones(4), 1.0),
        ShapeError,
        ["3", "4"],
    ),
    "direction": (lambda: ph.Monotone("upwards"), ParameterError, ["upwards", "increasing", "decreasing"]),
    "G is a vector": (lambda: ph.LinearInequality(torch.ones(4)), ShapeError, ["(4,)"]),
    "NaN in G": (lambda: ph.LinearInequality(torch.full((2, 4), NAN)), ParameterError, ["G"]),
    "NaN in batched G": (lambda: ph.LinearInequality(torch.full((3, 2, 4), NAN)), ParameterError, ["G"]),
    "NaN in d": (lambda: ph.LinearInequality(torch.ones(1, 4), NAN), ParameterError, ["d", "NaN"]),
    "d is too long": (lambda: ph.LinearInequality(torch.ones(1, 4), torch.ones(2)), ShapeError, ["(2,)", "1 rows"]),
    "G and d in batches that differ": (
        lambda: ph.LinearInequality(torch.ones(3, 1, 4), torch.ones(2, 1)),
        ShapeError,
        ["3", "2"],
    ),
    "G of another size": (lambda: projected(ph.LinearInequality(torch.ones(1, 4)), 3), ShapeError, ["4", "3"]),
    "negative variation": (lambda: ph.TotalVariation(-1.0), ParameterError, ["-1"]),
    "NaN variation": (lambda: ph.TotalVariation(NAN), ParameterError, ["nan"]),
    "negative weight": (lambda: ph.TotalVariationPenalty(-1.0), ParameterError, ["-1", "weight"]),
    "NaN total": (lambda: ph.Simplex(NAN), ParameterError, ["NaN"]),
    "slices that do not divide": (lambda: projected(ph.Monotone(slices=3), 8), ShapeError, ["8", "3"]),
    "slices of another width": (lambda: ph.per_slice(ph.Box(torch.zeros(3)), (2, 4)), ShapeError, ["3", "4"]),
    "slices in time": (lambda: ph.per_slice(ph.Simplex(torch.ones(3)), (2, 4)), ShapeError, ["3", "2"]),
    "field of nothing": (lambda: ph.TotalVariationDiminishing((0, 3)), ShapeError, ["(0, 3)"]),
    "censored shapes": (
        lambda: ph.DPPL(covariance="censored")((torch.zeros(4), torch.ones(4)), ph.Monotone()),
        ParameterError,
        ["Monotone"],
    ),
    "probconserv without rows": (lambda: ph.NonNegative().linear_part(), ParameterError, ["linear"]),
    "frozen": (lambda: ph.DPPL("orthogonal").freeze(ph.NonNegative()), ParameterError, ["NonNegative"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_explained(name):
    action, kind, fragments = BAD[name]
    with pytest.raises(kind) as caught:
        action()
    explained(caught.value, fragments)


# ------------------------------------------------------------------------------------- structure, joins, small parts


def test_rows_of_one_variable_are_bounds():
    rows = torch.tensor([[2.0, 0, 0], [0, -1, 0], [0, 0, 1], [1, 0, 0]])
    resolved = ph.LinearInequality(rows, torch.tensor([4.0, 1.0, 3.0, 1.0])).resolve(3)
    assert isinstance(resolved, ph.Box)
    torch.testing.assert_close(resolved.lower, torch.tensor([-INF, -1.0, -INF]))
    torch.testing.assert_close(resolved.upper, torch.tensor([1.0, INF, 3.0]))


def test_bounds_and_rows_are_told_apart():
    rows = torch.tensor([[2.0, 0, 0], [1, 1, 1]])
    resolved = ph.LinearInequality(rows, torch.tensor([[4.0, 1.0], [2.0, 1.0]])).resolve(3)
    parts = {type(part) for part in resolved.parts()}
    assert parts == {ph.Box, ph.LinearInequality}
    torch.testing.assert_close(resolved.parts()[0].upper, torch.tensor([[2.0, INF, INF], [1.0, INF, INF]]))


@pytest.mark.parametrize("order", ["in order", "shuffled", "scaled"])
@pytest.mark.parametrize("direction", ["increasing", "decreasing"])
def test_difference_rows_are_monotone(direction, order):
    rows = torch.eye(6)[:-1] - torch.eye(6)[1:]
    rows = rows if direction == "increasing" else -rows
    if order == "shuffled":
        rows = rows[[3, 0, 4, 2, 1]]
    elif order == "scaled":
        rows = rows * torch.arange(1.0, 6)[:, None]
    resolved = ph.LinearInequality(rows, 0.0).resolve(6)
    assert isinstance(resolved, ph.Monotone)
    assert resolved.direction == direction
    z = normal(2, 10, 6)
    expected = ph.DPPL("orthogonal").project(z, ph.Monotone(direction)).value
    torch.testing.assert_close(ph.DPPL("orthogonal").project(z, ph.LinearInequality(rows)).value, expected)


@pytest.mark.parametrize("change", ["right side", "mixed", "gap", "more"])
def test_other_rows_stay_rows(change):
    rows, d = torch.eye(6)[:-1] - torch.eye(6)[1:], torch.zeros(5)
    if change == "right side":
        d[2] = 0.1
    elif change == "mixed":
        rows[2] = -rows[2]
    elif change == "gap":
        rows, d = rows[:-1], d[:-1]
    else:
        rows, d = torch.cat([rows, torch.ones(1, 6)]), torch.zeros(6)
    assert isinstance(ph.LinearInequality(rows, d).resolve(6), ph.LinearInequality)


def test_one_row_is_searched_along():
    for constraint in (ph.LinearEquality(torch.ones(1, 6), 1.0) & ph.NonNegative(), ph.Simplex()):
        assert isinstance(lift(parts_of(constraint, 6)).system.core, DisjointRows)
    resolved = ph.Simplex(2.0).resolve(4)
    assert [type(part) for part in resolved.parts()] == [ph.Conservation, ph.NonNegative]


def test_boxes_tighten():
    tightened = ph.Box(0.0, torch.tensor([1.0, 2.0, 3.0])) & ph.Box(torch.tensor([-1.0, 0.5, 0.5]), 2.0)
    assert isinstance(tightened, ph.Box)
    torch.testing.assert_close(tightened.lower, torch.tensor([0.0, 0.5, 0.5]))
    torch.testing.assert_close(tightened.upper, torch.tensor([1.0, 2.0, 2.0]))
    with pytest.raises(TypeError):
        ph.NonNegative() & 3


@each_set
def test_representation_and_dtype(name):
    entry, constraint = built(name)
    words = repr(constraint)
    assert re.match(r"[A-Z]\w+\(", words)
    assert constraint.algorithm
    single = constraint.to(torch.float32)
    assert type(single) is type(constraint)
    u = spread(entry)
    torch.testing.assert_close(single.violation(u), constraint.violation(u), rtol=1e-5, atol=1e-5)


@each_set
def test_violation_and_penalty_agree_with_rows_and_bounds(name):
    entry, constraint = built(name)
    u = spread(entry).requires_grad_()
    excesses = torch.stack([entry.excesses(u[:, k], k) for k in range(BATCH)], 1)  # (3, BATCH, q)
    violation, penalty = constraint.violation(u), constraint.penalty(u)
    assert violation.shape == penalty.shape == (3, BATCH)
    torch.testing.assert_close(violation > 0, excesses.abs().amax(-1) > 0)
    if not isinstance(getattr(constraint, "linear", None), ph.Hierarchy) and name not in ("fixed nodes", "smooth"):
        torch.testing.assert_close(violation, excesses.abs().amax(-1))
    (slope,) = torch.autograd.grad(penalty.sum(), u, allow_unused=not entry.projection)
    assert slope is None or slope.isfinite().all()
    feasible = ph.DPPL("orthogonal").project(u.detach(), constraint).value
    assert constraint.penalty(feasible).max() < 1e-12
    assert (penalty[violation > 0] > 0).all()


@each_set
def test_quantiles_of_draws_stay_within_bounds(name):
    entry, constraint = built(name)
    law = (entry.loc + normal(4, BATCH, entry.n), torch.ones(BATCH, entry.n))
    draws = ph.DPPL(covariance="delta")(law, constraint).sample((60,), torch.Generator().manual_seed(1))
    quantiles = ph.sample_quantiles(draws, (0.05, 0.5, 0.95))
    assert entry.outside(quantiles) == 0
    if entry.G is not None and "creasing" in name:  # order survives in marginal quantiles
        rows = torch.from_numpy(entry.data("G", 0)[entry.data("d", 0) == 0])
        assert (quantiles @ rows.T).max() <= 1e-12


def test_constraint_error_counts_inequalities():
    constraint = ph.Conservation(torch.ones(2), 1.0) & ph.NonNegative()
    u = torch.tensor([[1.5, -0.5], [0.5, 0.5]])
    error = ph.constraint_error(constraint, u)
    assert float(error.largest) == 0.5
    assert float(error.mean) == 0.25
    assert float(error.mean_square) == 0.125
    assert float(ph.constraint_error(ph.NonNegative(), u).mean) == 0.25


METHODS = ["softc", "hardc", "probhard-ob", "probhard-or", "probhard-inf", "probconserv", "hier-e2e"]


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 14)

    def forward(self, x):
        mean, raw = self.linear(x).chunk(2, -1)
        return mean, nn.functional.softplus(raw) + 0.1


@pytest.mark.parametrize("method", METHODS)
def test_methods_run_on_a_hierarchy_of_non_negative_series(method):
    constraint = ph.Hierarchy(TREE) & ph.NonNegative()
    model = ph.ConstrainedModel(Backbone(), constraint, method)
    x = normal(1, 4, 3)
    bottom = torch.rand(4, 4)
    y = bottom @ torch.from_numpy(TREE).T
    loss = model.loss((x, y))
    loss.backward()
    assert loss.isfinite()
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().sum() > 0
    forecast, draws = model.forecast((x, y)), model.sample((x, y), 50)
    assert draws.shape == (50, 4, 7)
    assert ph.crps(forecast, y).isfinite().all()
    if method in ("probhard-ob", "probhard-or", "probhard-inf", "hier-e2e"):
        assert forecast.feasible
        assert (draws >= 0).all()
        assert constraint.violation(draws).max() < 1e-9
        assert (forecast.mean >= 0).all()
        assert ph.constraint_error(constraint, forecast).largest < 1e-9
    elif method == "hardc":
        assert ph.constraint_error(constraint, forecast).largest < 1e-9
        assert not forecast.feasible
    elif method == "probconserv":
        assert ph.constraint_error(constraint.linear_part(), draws).largest < 1e-9
        assert (draws < 0).any()
    else:
        assert constraint.violation(draws).max() > 0.1
