"""One registry of sets with inequalities, each beside an independent description: dense rows, bounds and cvxpy terms.

A new set is tested everywhere by adding an entry. Batches have ``BATCH`` elements; data of one element or of all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import cvxpy as cp
import numpy as np
import torch
from torch import Tensor

import probhard as ph
from described import (
    BATCH,
    INF,
    Set,
    ball,
    by_slice,
    coherence,
    differences,
    exponential,
    l1_ball,
    second_differences,
    second_order,
    semidefinite,
    tensor,
    tv_bound,
    tv_penalty,
)
from probhard.constraints.convex_program import ConvexProgram
from registry import OVERLAPPING, binary_tree, crossed

TIGHT = {"tol_gap_abs": 1e-11, "tol_gap_rel": 1e-11, "tol_feas": 1e-11}
generator = torch.Generator().manual_seed(31)


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.1


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@cache
def _problem(name: str, element: int, coupled: bool) -> tuple[cp.Problem, cp.Variable, cp.Parameter, cp.Parameter]:
    entry = SETS[name]
    n = entry.n
    u, goal = cp.Variable(n), cp.Parameter(n)
    root = cp.Parameter((n, n)) if coupled else cp.Parameter(n)
    turned = root @ u if coupled else cp.multiply(root, u)
    constraints, extra = entry.describe(u, element)
    return cp.Problem(cp.Minimize(0.5 * cp.sum_squares(turned - goal) + extra), constraints), u, root, goal


def nearest(name: str, z: Tensor, weight: Tensor) -> Tensor:
    """Clarabel's nearest points to z (..., BATCH, n); weight (BATCH, n), or (BATCH, n, n) where it couples."""
    coupled = weight.dim() == 3
    found = torch.empty_like(z)
    for index in np.ndindex(*z.shape[:-1]):
        k = index[-1]
        problem, u, root, goal = _problem(name, 0 if SETS[name].shared else k, coupled)
        point = z[index].numpy()
        root.value = np.linalg.inv(np.linalg.cholesky(weight[k].numpy())) if coupled else weight[k].numpy() ** -0.5
        goal.value = root.value @ point if coupled else root.value * point
        with warnings.catch_warnings(action="ignore"):  # an inaccurate solution is noticed by its status
            try:
                problem.solve(solver=cp.CLARABEL, **TIGHT)
            except cp.SolverError:  # at the tip of a cone, where Clarabel cannot be that accurate
                problem.solve(solver=cp.SCS, eps_abs=1e-10, eps_rel=1e-10, max_iters=200_000)
        assert problem.status in ("optimal", "optimal_inaccurate"), (name, index, problem.status)
        found[index] = torch.from_numpy(u.value)
    return found


def triangle(n: int) -> Tensor:
    return randn(BATCH, n, n).tril(-1) / n + torch.diag_embed(rand(BATCH, n))


METRICS: dict[str, tuple[Callable[[int], str | ph.Metric], Callable[[int], ph.Covariance]]] = {
    "oblique": (lambda n: "oblique", lambda n: ph.Diagonal(rand(BATCH, n))),
    "orthogonal": (lambda n: "orthogonal", lambda n: ph.Diagonal(rand(BATCH, n))),
    "diagonal metric": (lambda n: ph.DiagonalMetric(rand(n)), lambda n: ph.Diagonal(rand(BATCH, n))),
    "low rank": (lambda n: "oblique", lambda n: ph.LowRank(randn(BATCH, n, 2), rand(BATCH, n))),
    "spectral": (
        lambda n: "oblique",
        lambda n: ph.Spectral((n,), rand(n), randn(BATCH, n), rand(BATCH, n), "reflecting"),
    ),
    "dense": (lambda n: "oblique", lambda n: ph.Dense(triangle(n))),
}
DIAGONAL = ("oblique", "orthogonal", "diagonal metric")


def weighing(name: str, n: int) -> tuple[str | ph.Metric, ph.Covariance]:
    """A metric and a covariance (BATCH, n), the same in every order of tests."""
    generator.manual_seed(77)
    metric, covariance = METRICS[name]
    return metric(n), covariance(n)


LOW, HIGH = tensor([[0.0], [-1.0], [0.5]]), tensor([[1.0], [0.3], [0.9]])
SIDED = tensor([0.0, -INF, -1.0, -INF, 0.5, 0.0]), tensor([INF, 1.0, 1.0, INF, INF, 0.1])
EQUAL = tensor([0.0, 0.4, 0.0, 0.0]), tensor([1.0, 0.4, 1.0, 1.0])
GENERAL, GENERAL_RIGHT = randn(20, 12), rand(20)
BATCHED, BATCHED_RIGHT = randn(BATCH, 5, 8), rand(BATCH, 5)
GRID, MASSES, SLICE_MASSES = rand(7), tensor([1.0, 2.0, 3.0]), tensor([0.5, 1.0, 1.5, 0.9])
SIGNED = randn(7)
SIDES, SIDES_RIGHT = torch.stack([GRID, -GRID]), tensor([1.9, -1.3])
TREE, DEEP, CROSSED, BELOW = binary_tree(2), binary_tree(3), crossed(4, 3), rand(8) - 0.1
FEW, MANY = randn(3, 8), randn(6, 8)
PINS, PINNED = torch.eye(6, dtype=torch.float64)[[0, 5]], tensor([0.3, 0.1])
CAPS = tensor([INF] * 7)
CAPS[[1, 4]] = tensor([1.5, 0.4])
RISING = tensor(np.linspace(0.0, 1.0, 8)), tensor(np.linspace(0.5, 1.2, 8)) + 0.3 * rand(8)
EXTRA_ROWS = randn(2, 7)
CENTER = rand(6)
UNEVEN = np.array([0.0, 0.1, 0.4, 0.5, 0.9, 1.0, 1.8])
CONE, CONE_OFFSET = randn(3, 6), rand(3)
PORTFOLIO = tensor([0.3, 0.2, 0.2, 0.1, 0.1, 0.1])
SETS: dict[str, Set] = {
    "box": Set(lambda: ph.Box(0.0, 1.0), 6, 0.0, 1.0),
    "box per batch": Set(lambda: ph.Box(LOW.expand(3, 6), HIGH.expand(3, 6)), 6, LOW.expand(3, 6), HIGH.expand(3, 6)),
    "non-negative": Set(lambda: ph.NonNegative(), 6, 0.0),
    "one-sided": Set(lambda: ph.Box(*SIDED), 6, *SIDED),
    "equal bounds": Set(lambda: ph.Box(*EQUAL), 4, *EQUAL),
    "inequalities": Set(lambda: ph.LinearInequality(GENERAL, GENERAL_RIGHT), 12, G=GENERAL, d=GENERAL_RIGHT),
    "batched inequalities": Set(lambda: ph.LinearInequality(BATCHED, BATCHED_RIGHT), 8, G=BATCHED, d=BATCHED_RIGHT),
    "simplex": Set(lambda: ph.Simplex(), 6, 0.0, A=np.ones((1, 6)), b=1.0),
    "simplex per batch": Set(lambda: ph.Simplex(MASSES), 6, 0.0, A=np.ones((1, 6)), b=MASSES[:, None]),
    "simplex slices": Set(
        lambda: ph.per_slice(ph.Simplex(SLICE_MASSES), (4, 5)), 20, 0.0, A=by_slice(np.ones(5), 4), b=SLICE_MASSES
    ),
    "known values, non-negative": Set(
        lambda: ph.LinearEquality(np.eye(6)[[0, 3]], tensor([0.0, 2.0])) & ph.NonNegative(),
        6, 0.0, A=np.eye(6)[[0, 3]], b=tensor([0.0, 2.0]),
    ),
    "mass and box": Set(lambda: ph.Conservation(GRID, 1.2) & ph.Box(0.0, 1.0), 7, 0.0, 1.0, GRID[None], 1.2),
    "mass and box per batch": Set(
        lambda: ph.Conservation(GRID, MASSES) & ph.Box(LOW - 1, HIGH + 1),
        7, (LOW - 1).expand(3, 7), (HIGH + 1).expand(3, 7), GRID[None], MASSES[:, None],
    ),
    "mass of any sign and box": Set(
        lambda: ph.Conservation(SIGNED, 0.3) & ph.Box(0.0, 1.0), 7, 0.0, 1.0, SIGNED[None], 0.3
    ),
    "mass and box per slice": Set(
        lambda: ph.per_slice(ph.Conservation(GRID[:5], SLICE_MASSES) & ph.Box(0.0, 1.0), (4, 5)),
        20, 0.0, 1.0, by_slice(GRID[:5], 4), SLICE_MASSES,
    ),
    "row of ones, non-negative": Set(
        lambda: ph.LinearEquality(torch.ones(1, 6), 2.0) & ph.NonNegative(), 6, 0.0, A=np.ones((1, 6)), b=2.0
    ),
    "mass at most, box": Set(
        lambda: ph.LinearInequality(GRID[None], 1.0) & ph.Box(0.0, 1.0), 7, 0.0, 1.0, G=GRID[None], d=1.0
    ),
    "tree": Set(lambda: ph.Hierarchy(TREE) & ph.NonNegative(), 7, 0.0, A=coherence(TREE)),
    "crossed": Set(lambda: ph.Hierarchy(CROSSED) & ph.NonNegative(), 124, 0.0, A=coherence(CROSSED)),
    "overlapping": Set(lambda: ph.Hierarchy(OVERLAPPING) & ph.NonNegative(), 10, 0.0, A=coherence(OVERLAPPING)),
    "tree with caps": Set(lambda: ph.Hierarchy(TREE) & ph.Box(0.0, CAPS), 7, 0.0, CAPS, coherence(TREE)),
    "fixed nodes": Set(
        lambda: ph.Hierarchy(DEEP).fix([1, 9], [5.0, 1.0]) & ph.NonNegative(),
        15, 0.0, A=np.vstack([coherence(DEEP), np.eye(15)[[1, 9]]]), b=[0.0] * 7 + [5.0, 1.0],
    ),
    "pins and mass": Set(
        lambda: ph.Conservation(GRID[:6], 2.0) & ph.LinearEquality(PINS, PINNED) & ph.NonNegative(),
        6, 0.0, A=torch.cat([GRID[None, :6], PINS]), b=torch.cat([tensor([2.0]), PINNED]),
    ),
    "dense rows and box": Set(
        lambda: ph.LinearEquality(FEW, FEW @ BELOW) & ph.Box(0.0, 1.0), 8, 0.0, 1.0, FEW, FEW @ BELOW
    ),
    "many rows and box": Set(
        lambda: ph.LinearEquality(MANY, MANY @ BELOW) & ph.Box(0.0, 1.0), 8, 0.0, 1.0, MANY, MANY @ BELOW
    ),
    "increasing": Set(lambda: ph.Monotone(), 8, G=-differences(8)),
    "decreasing": Set(lambda: ph.Monotone("decreasing"), 8, G=differences(8)),
    "increasing in a box": Set(lambda: ph.Monotone() & ph.Box(0.0, 1.0), 8, 0.0, 1.0, G=-differences(8)),
    "increasing between profiles": Set(lambda: ph.Monotone() & ph.Box(*RISING), 8, *RISING, G=-differences(8)),
    "increasing with mass in a box": Set(
        lambda: ph.Monotone() & ph.Conservation(GRID, 1.2) & ph.Box(0.0, 1.0),
        7, 0.0, 1.0, GRID[None], 1.2, -differences(7),
    ),
    "decreasing with mass per slice": Set(
        lambda: ph.per_slice(
            ph.Monotone("decreasing") & ph.Conservation(GRID[:5], SLICE_MASSES) & ph.Box(0.0, 1.0), (4, 5)
        ),
        20, 0.0, 1.0, by_slice(GRID[:5], 4), SLICE_MASSES, differences(20, 4),
    ),
    "decreasing with mass between": Set(
        lambda: ph.Monotone("decreasing") & ph.LinearInequality(SIDES, SIDES_RIGHT) & ph.Box(0.0, 1.0),
        7, 0.0, 1.0, G=np.vstack([SIDES, differences(7)]), d=torch.cat([SIDES_RIGHT, torch.zeros(6)]).double(),
    ),
    "variation with mass between in a box": Set(
        lambda: ph.TotalVariation(0.8) & ph.LinearInequality(SIDES, SIDES_RIGHT) & ph.Box(0.0, 1.0),
        7, 0.0, 1.0, G=SIDES, d=SIDES_RIGHT, **tv_bound(0.8),
    ),
    "convex": Set(lambda: ph.Convex(), 8, G=-second_differences(np.arange(8))),
    "concave on a grid in a box": Set(
        lambda: ph.Convex("down", UNEVEN) & ph.Box(0.0, 1.0), 7, 0.0, 1.0, G=second_differences(UNEVEN)
    ),
    "convex per slice with mass": Set(
        lambda: ph.per_slice(ph.Convex(grid=UNEVEN[:5]) & ph.Conservation(GRID[:5], SLICE_MASSES), (4, 5)),
        20, A=by_slice(GRID[:5], 4), b=SLICE_MASSES, G=-second_differences(UNEVEN[:5], 4),
    ),
    "convex and falling": Set(
        lambda: ph.Convex() & ph.Monotone("decreasing"),
        6, G=np.vstack([-second_differences(np.arange(6)), differences(6)]),
    ),
    "variation": Set(lambda: ph.TotalVariation(1.5), 8, **tv_bound(1.5)),
    "variation in a box": Set(
        lambda: ph.TotalVariation(0.8) & ph.Box(0.0, 1.0), 8, 0.0, 1.0, **tv_bound(0.8)
    ),
    "variation with mass in a box": Set(
        lambda: ph.TotalVariation(0.8) & ph.Conservation(GRID, 1.2) & ph.Box(0.0, 1.0),
        7, 0.0, 1.0, GRID[None], 1.2, **tv_bound(0.8),
    ),
    "penalty": Set(lambda: ph.TotalVariationPenalty(0.3), 8, **tv_penalty(0.3)),
    "penalty in a box": Set(
        lambda: ph.TotalVariationPenalty(0.3) & ph.Box(0.0, 1.0), 8, 0.0, 1.0, **tv_penalty(0.3)
    ),
    "L1 ball": Set(lambda: ph.L1Ball(1.5), 6, **l1_ball(1.5)),
    "L1 ball around a point": Set(lambda: ph.L1Ball(0.7, CENTER), 6, **l1_ball(0.7, CENTER)),
    "L1 ball in a box": Set(lambda: ph.L1Ball(1.0, CENTER) & ph.Box(0.0, 1.0), 6, 0.0, 1.0, **l1_ball(1.0, CENTER)),
    "turnover of a portfolio": Set(
        lambda: ph.Simplex(1.0) & ph.L1Ball(0.37, PORTFOLIO),
        6, 0.0, A=np.ones((1, 6)), b=1.0, **l1_ball(0.37, PORTFOLIO),
    ),
    "L1 ball with rows on both sides": Set(
        lambda: ph.L1Ball(4.0) & ph.LinearInequality(SIDES, SIDES_RIGHT), 7, G=SIDES, d=SIDES_RIGHT, **l1_ball(4.0)
    ),
    "L1 ball on a tree": Set(
        lambda: ph.L1Ball(3.0) & ph.Hierarchy(TREE) & ph.NonNegative(), 7, 0.0, A=coherence(TREE), **l1_ball(3.0)
    ),
    "monotone L1 ball": Set(
        lambda: ph.L1Ball(2.0) & ph.Monotone("increasing"), 6, G=-differences(6), **l1_ball(2.0)
    ),
    "inequalities on a tree": Set(
        lambda: ph.LinearInequality(EXTRA_ROWS, 1.0) & ph.Hierarchy(TREE) & ph.NonNegative(),
        7, 0.0, A=coherence(TREE), G=EXTRA_ROWS, d=1.0,
    ),
    "ball": Set(lambda: ph.Ball(1.5), 6, **ball(1.5, torch.zeros(6, dtype=torch.float64))),
    "ball in a box": Set(
        lambda: ph.Ball(1.0, CENTER) & ph.Box(0.0, 1.0), 6, 0.0, 1.0, **ball(1.0, CENTER)
    ),
    "ball with mass": Set(
        lambda: ph.Ball(1.0, CENTER) & ph.Conservation(GRID[:6], GRID[:6] @ CENTER + 0.2),
        6, A=GRID[None, :6], b=float(GRID[:6] @ CENTER + 0.2), **ball(1.0, CENTER),
    ),
    "smooth": Set(
        lambda: ph.NonlinearInequality(lambda u: u.exp().sum(-1, keepdim=True) - 8.0), 6, **exponential(8.0)
    ),
    "semidefinite": Set(lambda: ph.PositiveSemidefinite(3), 6, **semidefinite(3)),
    "correlation": Set(
        lambda: ph.Correlation(3), 6, A=np.eye(6)[[0, 2, 5]], b=1.0, **semidefinite(3)
    ),
    "semidefinite in a box": Set(
        lambda: ph.PositiveSemidefinite(3) & ph.Box(-0.5, 0.7), 6, -0.5, 0.7, **semidefinite(3)
    ),
    "standard cone": Set(
        lambda: ph.SecondOrderCone(),
        5, **second_order(tensor(np.eye(5)[1:]), tensor([0.0] * 4), tensor(np.eye(5)[0]), 0.0),
    ),
    "second-order cone": Set(
        lambda: ph.SecondOrderCone(CONE, CONE_OFFSET, GRID[:6], 0.5),
        6, **second_order(CONE, CONE_OFFSET, GRID[:6], 0.5),
    ),
    "second-order cone with mass": Set(
        lambda: ph.SecondOrderCone(CONE, CONE_OFFSET, GRID[:6], 2.5) & ph.Simplex(),
        6, 0.0, A=np.ones((1, 6)), b=1.0, **second_order(CONE, CONE_OFFSET, GRID[:6], 2.5),
    ),
    "convex program": Set(
        lambda: ConvexProgram(lambda u: [cp.norm1(u) <= 2.0], 6),
        6, also=lambda u: ([cp.norm1(u) <= 2.0], 0), beyond=lambda u: [u.abs().sum(-1) - 2.0],
        curved=True, coupled=True,
    ),
}  # fmt: skip
