"""Derivatives and moments of projections on sets with inequalities: tangents, gradients, variances, censored laws."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import probhard as ph
from constraints.inequalities import built, normal
from registry import OVERLAPPING
from sets import BATCH, GENERAL, GRID, INF, MANY, SETS, SIDED, TREE, Set, tensor

STEP = 1e-5


def jacobian(solve, z: Tensor) -> tuple[Tensor, Tensor]:
    """``du/dz`` (..., n, n) by central differences, and the points (...,) without a kink nearby.

    The maps are linear between kinks, so forward and backward differences agree exactly where there is none.
    """
    n = z.shape[-1]
    shift = STEP * torch.eye(n).reshape(n, *[1] * (z.dim() - 1), n)
    middle, ahead, behind = solve(z), solve(z + shift), solve(z - shift)
    bend = (ahead + behind - 2 * middle).abs().amax((0, -1)) / STEP
    return ((ahead - behind) / (2 * STEP)).movedim(0, -1), bend < 1e-6


def around(entry: Set, seed: int = 8) -> Tensor:
    return entry.loc + 0.8 * normal(seed, 2, BATCH, entry.n)


STRAIGHT = list(
    itertools.product([name for name, entry in SETS.items() if not entry.curved], ("oblique", "orthogonal"))
)


@pytest.mark.parametrize(("name", "metric"), STRAIGHT)
def test_tangent_agrees_with_differences_of_the_projection(name, metric):
    entry, constraint = built(name)
    layer, z = ph.DPPL(metric), around(entry)
    cov = ph.Diagonal(0.1 + torch.rand(BATCH, entry.n))
    law = ph.LocationScale(z[0], cov)
    expected, smooth = jacobian(lambda x: layer.project(x, constraint, dist=law).value, z)
    assert smooth.sum() >= 3
    tangent = layer.project(z, constraint, dist=law).tangent
    eye = torch.eye(entry.n).reshape(entry.n, 1, 1, entry.n).expand(entry.n, 2, BATCH, entry.n)
    matrix = tangent.apply(eye).movedim(0, -1)
    turned = tangent.transpose(eye).movedim(0, -1)
    torch.testing.assert_close(matrix[smooth], expected[smooth], rtol=0, atol=1e-6)
    torch.testing.assert_close(turned, matrix.mT, rtol=1e-9, atol=1e-9)

    projected = ph.DPPL(metric, covariance="delta")(law, constraint)
    variance = (expected[0].square() * cov.variance.unsqueeze(-2)).sum(-1)
    torch.testing.assert_close(projected.variance[smooth[0]], variance[smooth[0]], rtol=0, atol=1e-6)
    assert (projected.variance >= 0).all()
    dense = ph.Dense(torch.diag_embed(cov.variance.sqrt()))
    near = 1e-7 if name == "crossed" else 1e-9  # variances by the sparse factor are differences
    torch.testing.assert_close(tangent.variance(dense)[0], projected.variance, rtol=near, atol=near)


BOUNDS = (-0.5 * torch.ones(BATCH, 7, dtype=torch.float64), torch.ones(BATCH, 7, dtype=torch.float64))
PARAMETERS = {  # the constraint from this batch's data, its size, and the data
    "box": (lambda low, high: ph.Box(low, high), 7, BOUNDS),
    "simplex": (lambda total: ph.Simplex(total), 7, (tensor([1.0, 2.0, 0.5]),)),
    "mass and box": (
        lambda m, low, high: ph.Conservation(GRID, m) & ph.Box(low, high),
        7,
        (tensor([0.5, 1, 0.2]), *BOUNDS),
    ),
    "rows and box": (
        lambda b, low, high: ph.LinearEquality(GENERAL[:3, :7], b) & ph.Box(low, high),
        7,
        (0.1 * GENERAL[:3, 7:10], *BOUNDS),
    ),
    "many rows and box": (
        lambda b, low, high: ph.LinearEquality(MANY[:4, :7], b) & ph.Box(low, high),
        7,
        (0.1 * MANY[:3, 3:7], *BOUNDS),
    ),
    "inequalities": (lambda d: ph.LinearInequality(GENERAL[:6, :7], d), 7, (GENERAL[6:9, :6].abs(),)),
    "rows of their own": (
        lambda G, d: ph.LinearInequality(G, d),
        7,
        (GENERAL.flatten()[:105].reshape(3, 5, 7).clone(), GENERAL[6:9, :5].abs()),
    ),
    "capped tree": (
        lambda high: ph.Hierarchy(TREE) & ph.Box(0.0, high),
        7,
        (torch.cat([3 * BOUNDS[1][:, :3], BOUNDS[1][:, 3:]], -1),),
    ),
    "overlapping": (
        lambda low: ph.Hierarchy(OVERLAPPING) & ph.Box(low, None),
        10,
        (torch.zeros(BATCH, 10, dtype=torch.float64),),
    ),
    "increasing": (lambda: ph.Monotone(), 7, ()),
    "increasing in a box": (
        lambda low, high: ph.Monotone() & ph.Box(low, high),
        7,
        (BOUNDS[0][:, :1], BOUNDS[1][:, :1]),
    ),
    "increasing with mass": (
        lambda m, low, high: ph.Monotone() & ph.Conservation(GRID, m) & ph.Box(low, high),
        7,
        (tensor([0.5, 1, 0.2]), BOUNDS[0][:, :1], BOUNDS[1][:, :1]),
    ),
    "variation": (lambda amount: ph.TotalVariation(amount), 7, (tensor([1.0, 0.5, 2.0]),)),
    "variation with mass in a box": (
        lambda amount, m, low, high: ph.TotalVariation(amount) & ph.Conservation(GRID, m) & ph.Box(low, high),
        7,
        (tensor([1.0, 0.5, 2.0]), tensor([0.5, 1, 0.2]), BOUNDS[0][:, :1], BOUNDS[1][:, :1]),
    ),
    "penalty": (lambda weight: ph.TotalVariationPenalty(weight), 7, (tensor([0.3, 0.1, 0.5]),)),
    "penalty in a box": (
        lambda weight, low, high: ph.TotalVariationPenalty(weight) & ph.Box(low, high),
        7,
        (tensor([0.3, 0.1, 0.5]), BOUNDS[0][:, :1], BOUNDS[1][:, :1]),
    ),
}


@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_gradients_in_points_scales_and_data(name, metric):
    """One call solves all perturbations: they are further elements of the batch."""
    build, n, data = PARAMETERS[name]
    layer = ph.DPPL(metric)
    factors = normal(4, n)
    inputs = [0.3 + normal(12, BATCH, n), 0.3 + torch.rand(BATCH, n), *data]

    def score(z: Tensor, stddev: Tensor, *rest: Tensor) -> Tensor:
        law = ph.LocationScale(z, ph.Diagonal.from_stddev(stddev))
        return (layer.project(z, build(*rest), dist=law).value * factors).sum(-1)  # (..., BATCH)

    leaves = [x.clone().requires_grad_() for x in inputs]
    slopes = torch.autograd.grad(score(*leaves).sum(), leaves, allow_unused=True)
    middle = score(*inputs)
    compared = 0
    for i, (x, slope) in enumerate(zip(inputs, slopes)):
        size = x[0].numel()
        shift = STEP * torch.eye(size).reshape(size, 1, *x.shape[1:])  # one entry of every element of the batch
        ends = []
        for sign in (1, -1):
            moved = [part.expand(size, *part.shape) for part in inputs]
            moved[i] = x + sign * shift
            ends.append(score(*moved))  # (size, BATCH)
        expected, bend = (ends[0] - ends[1]) / (2 * STEP), (ends[0] + ends[1] - 2 * middle).abs().amax(0) / STEP
        smooth = bend < 1e-3
        compared += int(smooth.sum())
        gradient = torch.zeros_like(x) if slope is None else slope
        gradient = gradient.reshape(BATCH, size).T
        torch.testing.assert_close(gradient[:, smooth], expected[:, smooth], rtol=1e-5, atol=1e-5)
    assert compared >= 2 * len(inputs)


def test_gradients_of_a_learned_metric():
    layer = ph.DPPL(ph.DiagonalMetric(0.5 + torch.rand(7), learn=True))
    constraint = ph.Hierarchy(TREE) & ph.NonNegative()
    value = layer.project(normal(3, 5, 7), constraint).value
    (value * normal(1, 7)).sum().backward()
    assert layer.metric.values.grad.abs().sum() > 1e-3


# ------------------------------------------------------------------------------------------------- censored moments

MEANS = tensor([-9.0, -1.0, 0.0, 0.3, 1.0, 4.0])
BOXES = {
    "box": lambda: ph.Box(0.0, 1.0),
    "non-negative": lambda: ph.NonNegative(),
    "one-sided": lambda: ph.Box(*SIDED),
    "equal": lambda: ph.Box(0.2, tensor([0.2, 1.0, 0.2, 1.0, 0.2, 1.0])),
}
FAMILIES = {"normal": ph.NORMAL, "laplace": ph.LAPLACE.independent(), "student": ph.student_t(6.0).independent()}


def moments(projected: ph.Projected, count: int, chunk: int = 50_000) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and variance of draws, and the standard errors of both."""
    generator = torch.Generator().manual_seed(7)
    draws = torch.cat([projected.sample((chunk,), generator) for _ in range(count // chunk)])
    mean, square = draws.mean(0), (draws - draws.mean(0)).square()
    variance = square.mean(0)
    spread = (square.square().mean(0) - variance.square()).clamp(min=0)
    return mean, variance, (variance / count).sqrt(), (spread / count).sqrt()


@pytest.mark.parametrize(
    ("name", "family"), [*itertools.product(BOXES, ["normal"]), *itertools.product(["box"], ["laplace", "student"])]
)
def test_moments_in_boxes_are_those_of_a_million_draws(name, family):
    build = BOXES[name]
    law = ph.LocationScale(MEANS, ph.Diagonal(tensor([1.0, 0.5, 2.0, 0.2, 1.0, 3.0])), FAMILIES[family])
    projected = ph.DPPL()(law, build())
    assert projected.exact
    mean, variance, mean_error, variance_error = moments(projected, 1_000_000)
    assert ((projected.mean - mean).abs() <= 5 * mean_error + 1e-6).all()
    assert ((projected.variance - variance).abs() <= 5 * variance_error + 1e-6).all()


COUPLED = {  # constraint, means (3, n): inside, at the bounds, beyond
    "mass and box": (lambda: ph.Conservation(torch.ones(6), 3.0) & ph.Box(0.0, 1.0), 6),
    "simplex": (lambda: ph.Simplex(1.0), 6),
    "tree": (lambda: ph.Hierarchy(TREE) & ph.NonNegative(), 7),
}


@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("name", COUPLED)
def test_censored_moments_with_equalities_are_near_those_of_draws(name, metric):
    """An approximation: bounds are met coordinate by coordinate after the equalities."""
    build, n = COUPLED[name]
    constraint = build()
    centre = ph.DPPL("orthogonal").project(0.5 + 0.1 * normal(1, 1, n), constraint).value
    loc = torch.cat([centre, centre - 0.3, centre + 0.4 * normal(2, 1, n)])
    stddev = 0.3 * torch.ones(3, n)
    projected = ph.DPPL(metric)((loc, stddev), constraint)
    mean, variance, mean_error, _ = moments(projected, 100_000)
    rows = constraint.resolve(n).linear_part()
    unit = ph.DPPL(metric)((loc, stddev), rows).variance.sqrt()  # without bounds
    gap = ((projected.mean - mean).abs() - 5 * mean_error) / unit
    spread = (projected.variance.sqrt() - variance.sqrt()).abs() / unit
    assert gap.max() < 0.25  # measured: up to 0.18 for the simplex
    assert spread.max() < 0.25  # measured: up to 0.19 for the tree
    assert constraint.relative_violation(projected.mean).max() < 1e-9
    assert not projected.exact


@pytest.mark.parametrize("name", ["increasing", "increasing with mass in a box", "variation", "inequalities"])
def test_fixed_draws_estimate_the_moments_of_other_sets(name):
    entry, constraint = built(name)
    law = (entry.loc + 0.3 * normal(5, BATCH, entry.n), 0.5 * torch.ones(BATCH, entry.n))
    projected = ph.DPPL(draws=400)(law, constraint)
    mean, variance, _, _ = moments(projected, 1_000, 1_000)
    spread = variance.sqrt()
    assert ((projected.mean - mean).abs() <= 0.3 * spread + 1e-3).all()  # five standard errors and more
    torch.testing.assert_close(projected.variance, variance, rtol=0.5, atol=2e-3)
    again = ph.DPPL(draws=400)(law, constraint)
    assert torch.equal(projected.mean, again.mean)
    assert entry.violation(projected.mean, projected.mean) < 1e-9  # an average of points of a convex set
    assert entry.outside(projected.mean) == 0


# --------------------------------------------------------------------------------------- gradients beyond the bounds

BEYOND = {  # constraint, mean, target
    "non-negative": (lambda: ph.NonNegative(), [-0.3, -1.0, -0.1], [1.0, 0.5, 2.0]),
    "mass": (lambda: ph.Conservation(torch.ones(3), 3.0) & ph.NonNegative(), [-2.0, 2.5, 2.5], [1.0, 1.0, 1.0]),
    "tree": (
        lambda: ph.Hierarchy(TREE) & ph.NonNegative(),
        [-0.5, -0.5, -0.2, -0.4, -0.4, -0.3, -0.3],
        [4.0, 2, 2, 1, 1, 1, 1],
    ),
    "increasing": (lambda: ph.Monotone(), [1.0, 0.5, 0.0], [0.0, 1.0, 2.0]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", BEYOND)
def test_scores_pull_means_from_beyond_their_bounds(name, dtype):
    build, loc, target = BEYOND[name]
    loc = torch.tensor(loc, dtype=dtype, requires_grad=True)
    stddev = torch.ones_like(loc).requires_grad_()
    score = ph.crps(ph.DPPL()((loc, stddev), build()), torch.tensor(target, dtype=dtype)).sum()
    to_loc, to_stddev = torch.autograd.grad(score, (loc, stddev))
    assert to_loc.isfinite().all()
    assert to_stddev.isfinite().all()
    assert (to_loc.abs() > 1e-4).any()
    assert (to_stddev.abs() > 1e-4).any()
    if name == "non-negative":
        assert (to_loc < -1e-4).all()
        assert (to_stddev.abs() > 1e-4).all()


def test_a_mean_below_its_bound_is_trained_above_it():
    """The projected mean alone would never move: its gradient is 0 below the bound."""
    loc, raw = tensor([-0.3, -2.0]).requires_grad_(), tensor([0.0, 0.0]).requires_grad_()
    optimiser = torch.optim.Adam([loc, raw], lr=0.05)
    for _ in range(300):
        optimiser.zero_grad()
        ph.crps(ph.DPPL()((loc, raw.exp()), ph.NonNegative()), tensor([1.0, 1.5])).sum().backward()
        optimiser.step()
    torch.testing.assert_close(loc.detach(), tensor([1.0, 1.5]), rtol=0, atol=0.1)


def test_bounds_that_never_bind_change_nothing():
    law = (0.5 + 0.1 * normal(1, 3, 7), 0.1 * torch.ones(3, 7))
    free = ph.DPPL()(law, ph.Hierarchy(TREE))
    bounded = ph.DPPL()(law, ph.Hierarchy(TREE) & ph.Box(-1e3, 1e3))
    open_ = ph.DPPL()(law, ph.Hierarchy(TREE) & ph.Box(-INF, INF))
    for other in (bounded, open_):
        torch.testing.assert_close(other.mean, free.mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(other.variance, free.variance, rtol=1e-10, atol=1e-10)
        y = torch.rand(3, 7)
        torch.testing.assert_close(ph.crps(other, y), ph.crps(free, y), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        ph.DPPL(covariance="delta")(law, ph.Hierarchy(TREE) & ph.NonNegative()).variance, free.variance
    )
    assert SETS["tree"].outside(ph.DPPL()(law, ph.Hierarchy(TREE) & ph.NonNegative()).mean) == 0
