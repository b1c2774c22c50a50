"""Convex programs: projections against closed forms and cvxpy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

import probhard as ph
from probhard.constraints.convex_program import ConvexProgram
from probhard.laws.covariance import Dense, Diagonal, LowRank
from probhard.solvers.dual_cones import dual_cones, project
from projection.programs import (
    FREE,
    PINNED,
    N,
    around,
    by_cvxpy,
    cp,
    difference,
    entropic,
    on_ball,
    projector,
    rand,
    randn,
    semidefinite,
    smooth_maximum,
    sparse,
    unit,
)

pytestmark = pytest.mark.filterwarnings("ignore:Solution may be inaccurate")  # the oracle's


def test_second_order_cone_closed_form():
    center, z = randn(4, N, seed=1), 2 * randn(5, 4, N)
    constraint = ConvexProgram(around, N, (center,), ((N,),))
    solution = projector(constraint, torch.ones(N)).solve(z)
    offset = z - center
    expected = center + offset / offset.norm(dim=-1, keepdim=True).clamp(min=1)
    assert solution.value.shape == (5, 4, N)
    assert (solution.value - expected).abs().max() < 1e-12
    assert solution.stats.converged.all()
    assert solution.stats.residual.max() < 1e-14
    assert solution.stats.steps.min() > 0


@pytest.mark.parametrize("spread", [0.0, 4.0, 12.0])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 1e6])
def test_weights_and_sizes_of_many_orders(spread, size):
    """Where a cone solver alone is feasible but not nearest, or calls a ball empty."""
    weight = torch.logspace(0, -spread, N)
    z = 2 * size * randn(4, N)
    solution = projector(ConvexProgram(unit, N), weight).solve(z)
    expected = on_ball(z, weight)
    assert solution.stats.converged.all()
    assert ((solution.value - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-8
    assert (solution.value.norm(dim=-1) - 1).max() < 1e-12


def test_semidefinite_is_clipped_eigenvalues():
    weight = torch.tensor([1.0, 0.5, 0.5, 1.0, 0.5, 1.0])  # the Frobenius norm
    z = randn(8, N)
    solution = projector(ConvexProgram(semidefinite, N), weight).solve(z)
    index = torch.tensor([[0, 1, 2], [1, 3, 4], [2, 4, 5]])
    values, vectors = torch.linalg.eigh(z[:, index])
    expected = (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT
    assert solution.stats.converged.all()
    assert (solution.value[:, index] - expected).abs().max() < 1e-12


def test_large_semidefinite_gradient():
    """Four rows and more, where the order of the entries of a triangle matters."""
    i, j = np.triu_indices(4)
    units = [np.eye(4)[[a]].T @ np.eye(4)[[b]] for a, b in zip(i, j)]
    units = [(m + m.T) / (2 if a == b else 1) for m, a, b in zip(units, i, j)]
    constraint = ConvexProgram(lambda u: [sum(u[k] * m for k, m in enumerate(units)) >> 0], 10)
    z, scale = randn(10).requires_grad_(), torch.where(torch.from_numpy(i == j), 1.0, 0.5)
    basis = torch.from_numpy(np.stack(units))
    values, vectors = torch.linalg.eigh(torch.einsum("k,kij->ij", z, basis))
    clipped = (vectors * values.clamp(min=0)) @ vectors.mT
    expected = clipped[torch.from_numpy(i), torch.from_numpy(j)]
    nearest = projector(constraint, scale, 10).solve(z).value
    cotangent = randn(10, seed=3)
    (gradient,) = torch.autograd.grad(nearest, z, cotangent)
    (reference,) = torch.autograd.grad(expected, z, cotangent)
    assert (nearest - expected).abs().max() < 1e-12
    assert (gradient - reference).abs().max() < 1e-10


def test_exponential_cone_against_multiplier():
    """``log sum exp(u) <= level`` at its optimality condition, with a level for each element."""
    level, weight, z = torch.tensor([0.5, 1.0, 5.0]), rand(N), 2 * randn(3, N)
    solution = projector(ConvexProgram(smooth_maximum, N, (level,), ((),)), weight).solve(z)
    assert solution.stats.converged.all()
    assert (torch.logsumexp(solution.value, -1) <= level + 1e-14).all()
    # one multiplier, the same in each coordinate
    pull = (z - solution.value) / weight / torch.softmax(solution.value, -1)
    active = torch.logsumexp(z, -1) > level
    assert active.tolist() == [True, True, False]
    assert (pull[active].amax(-1) - pull[active].amin(-1)).max() < 1e-9 * pull[active].max()
    assert (solution.value[~active] - z[~active]).abs().max() < 1e-14


def test_entropy_on_the_simplex():
    """Coordinates end a billionth above 0, where logarithms are steep."""
    z, weight = 1.5 * randn(6, N), rand(N)
    solution = projector(ConvexProgram(entropic, N) & ph.NonNegative(), weight).solve(z)
    expected = torch.stack([by_cvxpy(entropic, point, torch.diag(weight.rsqrt())) for point in z])
    assert solution.stats.converged.all()
    assert (solution.value - expected).abs().max() < 1e-5
    entropy = torch.special.entr(solution.value).sum(-1)
    assert entropy.min() > 1 - 1e-12
    assert (solution.value.sum(-1) - 1).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_ball_of_l1_with_box_and_mass(kind):
    z = randn(8, N)
    factor = torch.eye(N) * 3 + randn(N, N, seed=2).tril()
    weight = Diagonal(rand(N)) if kind == "diagonal" else Dense(factor)
    constraint = ConvexProgram(sparse, N) & ph.Box(-0.2, 0.5) & ph.Conservation(torch.ones(N), 0.3)
    solution = projector(constraint, weight).solve(z)
    root = torch.linalg.inv(torch.linalg.cholesky(weight.dense()))

    def everything(u):
        return [cp.norm(u, 1) <= 1, u >= -0.2, u <= 0.5, cp.sum(u) == 0.3]

    expected = torch.stack([by_cvxpy(everything, point, root) for point in z])
    assert solution.stats.converged.all()
    assert (solution.value - expected).abs().max() < 1e-7
    assert solution.value.min() >= -0.2
    assert solution.value.max() <= 0.5
    assert (solution.value.sum(-1) - 0.3).abs().max() < 1e-15
    assert (solution.value.abs().sum(-1) - 1).max() < 1e-14


@pytest.mark.parametrize(
    ("extra", "written"),
    [
        (ph.Monotone("decreasing"), lambda u: [cp.diff(u) <= 0]),
        (ph.TotalVariation(0.7), lambda u: [cp.norm(cp.diff(u), 1) <= 0.7]),
        (ph.TotalVariation([0.7, 0.2], slices=2), lambda u: [cp.tv(u[:3]) <= 0.7, cp.tv(u[3:]) <= 0.2]),
        (ph.LinearInequality(np.array([[1.0, 1, 0, 0, 0, 0], [0, 0, 1, -1, 2, 0]]), [0.1, -0.2]), None),
        (ph.Box(PINNED - FREE, PINNED + FREE), lambda u: [u[0] == 0.3, u[5] == 0]),
    ],
    ids=["monotone", "variation", "slices", "rows", "pinned"],
)
def test_joined_parts(extra, written):
    if written is None:
        written = lambda u: [u[0] + u[1] <= 0.1, u[2] - u[3] + 2 * u[4] <= -0.2]  # noqa: E731
    z, weight = 2 * randn(5, N), rand(N)
    solution = projector(ConvexProgram(unit, N) & extra, weight).solve(z)
    root = torch.diag(weight.rsqrt())
    expected = torch.stack([by_cvxpy(lambda u: unit(u) + written(u), point, root) for point in z])
    assert solution.stats.converged.all()
    assert solution.stats.residual.max() < 1e-12
    cost, reference = (((x - z) @ root).square().sum(-1) for x in (solution.value, expected))
    assert (cost <= reference * (1 + 1e-10)).all()
    assert (solution.value - expected).abs().max() < 1e-4  # the oracle's accuracy


def test_variation_penalty_is_a_cost():
    z, weight, price = 2 * randn(5, N), rand(N), torch.tensor([0.0, 0.1, 0.5, 1.0, 4.0])
    nearest = projector(ConvexProgram(unit, N) & ph.TotalVariationPenalty(price), weight).solve(z).value
    for i in range(5):
        u = cp.Variable(N)
        cost = 0.5 * cp.sum(cp.multiply(1 / weight.numpy(), cp.square(u - z[i].numpy()))) + float(price[i]) * cp.tv(u)
        cp.Problem(cp.Minimize(cost), unit(u)).solve(solver=cp.CLARABEL)
        ours = 0.5 * ((nearest[i] - z[i]).square() / weight).sum() + price[i] * nearest[i].diff().abs().sum()
        assert float(ours) < cost.value + 1e-9
        assert np.abs(nearest[i].numpy() - u.value).max() < 1e-3  # the oracle's accuracy
        assert float(nearest[i].norm()) < 1 + 1e-12


def test_bounds_and_rows_that_differ_between_elements():
    """Infinite in some, finite in others; rows of their own in each."""
    z = 2 * randn(3, N)
    lower = torch.full((3, N), -torch.inf)
    lower[1, 0], lower[2, 3] = 0.4, -0.1
    d = torch.tensor([[torch.inf], [0.2], [-0.3]])
    rows = randn(3, 1, N, seed=4)
    box, cut = ph.Box(lower, None), ph.LinearInequality(randn(1, N, seed=5), d)
    plane = ph.LinearEquality(rows, torch.tensor([[0.1], [0.2], [0.3]]))
    together = projector(ConvexProgram(unit, N) & box & cut & plane, torch.ones(N)).solve(z)
    assert together.stats.converged.all()
    for i in range(3):
        alone = ConvexProgram(unit, N) & ph.LinearEquality(rows[i], [0.1 * (i + 1)])
        if i:
            alone = alone & ph.Box(lower[i], None) & ph.LinearInequality(randn(1, N, seed=5), d[i])
        single = projector(alone, torch.ones(N)).solve(z[i])
        assert single.value.shape == (N,)
        assert (together.value[i] - single.value).abs().max() < 1e-12


def test_zero_weights_move_only_if_they_must():
    weight = torch.tensor([0.0, 1, 1, 0, 1, 1])
    z = torch.tensor([0.5, 2, 2, -0.5, 2, 2])
    solution = projector(ConvexProgram(unit, N), weight).solve(z)
    assert solution.stats.converged
    assert (solution.value[[0, 3]] - z[[0, 3]]).abs().max() < 1e-10
    assert abs(float(solution.value.norm()) - 1) < 1e-12
    none = projector(ConvexProgram(unit, N), torch.zeros(N)).solve(z)
    assert (none.value - z / z.norm()).abs().max() < 1e-12


def test_immutable_nodes_stay():
    """A hierarchy of two leaves whose total nothing may move, its leaves in a ball around (1, 1)."""

    def near(u):
        return [cp.norm(u[1:] - 1, 2) <= 1]

    constraint = ConvexProgram(near, 3) & ph.Hierarchy(np.array([[1.0, 1], [1, 0], [0, 1]]), immutable=[0])
    z = torch.tensor([2.5, 5.0, 0.0])
    solution = projector(constraint, torch.ones(3), 3).solve(z)
    across = (1 - 2 * 0.25**2) ** 0.5 / 2**0.5  # from (1.25, 1.25), along the line of that total
    assert solution.stats.converged
    assert torch.allclose(solution.value, torch.tensor([2.5, 1.25 + across, 1.25 - across]), atol=1e-12)
    assert solution.value[0] == 2.5
    far = projector(constraint, torch.ones(3), 3)
    z = torch.tensor([9.0, 5.0, 0.0])
    assert isinstance(far.explain(z, far.solve(z).stats), ph.InfeasibleError)


def test_trained_rows_and_low_rank_weight():
    z, cotangent = 1.5 * randn(3, N), randn(3, N, seed=1)
    weight = LowRank(randn(N, 2, seed=2), rand(N, seed=3))
    rows = randn(2, N, seed=4).requires_grad_()

    def project(rows: Tensor) -> Tensor:
        constraint = ConvexProgram(unit, N) & ph.LinearEquality(rows, torch.tensor([0.1, 0.2]))
        solution = projector(constraint, weight).solve(z)
        assert solution.stats.converged.all()
        return (solution.value * cotangent).sum()

    (gradient,) = torch.autograd.grad(project(rows), rows)
    direction = randn(2, N, seed=5)
    expected = difference(project, [rows], [direction])
    assert float((gradient * direction).sum()) == pytest.approx(float(expected), rel=1e-6)


def test_projections_on_dual_cones():
    """Moreau's decomposition and the slopes, over many orders of magnitude."""
    dims = SimpleNamespace(zero=1, nonneg=2, soc=[4], psd=[4], exp=6)
    cones = dual_cones(dims)
    source = np.random.default_rng(0)
    for _ in range(50):
        w = source.standard_normal(35) * 10.0 ** source.uniform(-2, 2, 35)
        y, slope = project(w, cones)
        s, start = y - w, 0
        for size, _ in cones:
            part = slice(start, start + size)
            assert abs(y[part] @ s[part]) <= 1e-13 * (w[part] @ w[part])
            again = projected_block(-s[part], start, cones)
            assert np.abs(again).max() <= 1e-7 * np.abs(w[part]).max()  # s is in the cone, so -s projects to 0
            start += size
        step, direction = 1e-6, source.standard_normal(35) * np.abs(w)
        ahead, behind = (project(w + sign * step * direction, cones)[0] for sign in (1, -1))
        wrong = np.abs((ahead - behind) / (2 * step) - slope @ direction)
        assert np.quantile(wrong / (np.abs(direction) + np.abs(direction).max() * 1e-2), 0.9) < 1e-4


def projected_block(w: np.ndarray, start: int, cones) -> np.ndarray:
    full = np.zeros(35)
    full[start : start + len(w)] = w
    return project(full, cones)[0][start : start + len(w)]
