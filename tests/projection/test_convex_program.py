"""Convex programs: closed forms and cvxpy as oracles, gradients by finite differences, failures and bad input."""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

import probhard as ph
from probhard.constraints.convex_program import ConvexProgram
from probhard.laws.covariance import Covariance, Dense, Diagonal, LowRank
from probhard.projection.base import Options
from probhard.projection.dispatch import projector_of
from probhard.projection.parts import parts_of

cp = pytest.importorskip("cvxpy", reason="cvxpy is not installed; convex programs need probhard[cvx]")
pytest.importorskip("cvxpylayers.torch", reason="cvxpylayers is not installed; convex programs need probhard[cvx]")

from probhard.projection.convex_program import ProgramProjector, compiled_of  # noqa: E402
from probhard.solvers.dual_cones import dual_cones, project  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Solution may be inaccurate")  # the oracle's

N = 6
PINNED = torch.tensor([0.3, 0, 0, 0, 0, 0], dtype=torch.float64)
FREE = torch.tensor([0, 9, 9, 9, 9, 0], dtype=torch.float64)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1


def around(u, c):
    return [cp.norm(u - c, 2) <= 1]


def unit(u):
    return [cp.norm(u, 2) <= 1]


def sparse(u):
    return [cp.norm(u, 1) <= 1]


def matrix(u):
    """The symmetric 3 x 3 matrix of six numbers."""
    return cp.bmat([[u[0], u[1], u[2]], [u[1], u[3], u[4]], [u[2], u[4], u[5]]])


def semidefinite(u):
    return [matrix(u) >> 0]


def smooth_maximum(u, level):
    return [cp.log_sum_exp(u) <= level]


def entropic(u):
    return [cp.sum(cp.entr(u)) >= 1.0, cp.sum(u) == 1]


def projector(constraint, weight: Covariance | Tensor, n: int = N) -> ProgramProjector:
    weight = Diagonal(weight) if isinstance(weight, Tensor) else weight
    return ProgramProjector(parts_of(constraint, n), weight, Options())


def by_cvxpy(describe, z: Tensor, root: Tensor) -> Tensor:
    """One point by cvxpy itself."""
    u, factor = cp.Variable(len(z)), root.numpy()
    scale = 1 / np.linalg.norm(factor @ z.numpy())
    cost = cp.sum_squares(scale * factor @ u - scale * factor @ z.numpy())
    tight = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-11)
    cp.Problem(cp.Minimize(cost), describe(u)).solve(solver=cp.CLARABEL, **tight)
    return torch.from_numpy(u.value)


def on_ball(z: Tensor, weight: Tensor) -> Tensor:
    """The nearest point of the unit ball under a diagonal weight, by bisection for its multiplier."""
    low, high = torch.full_like(z[..., :1], -30.0), torch.full_like(z[..., :1], 60.0)
    for _ in range(200):
        middle = (low + high) / 2
        outside = (z / (1 + middle.exp() * weight)).norm(dim=-1, keepdim=True) > 1
        low, high = torch.where(outside, middle, low), torch.where(outside, high, middle)
    return torch.where(z.norm(dim=-1, keepdim=True) > 1, z / (1 + high.exp() * weight), z)


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
    pull = (z - solution.value) / weight / torch.softmax(solution.value, -1)  # one multiplier, the same in each coordinate
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


def test_residual_and_excess():
    def describe(u, total, row):
        return [cp.sum(u) == total, 2 * u[0] - u[1] == 3, row @ u == 1, cp.norm(u) <= total, u >= -1]

    total, row = torch.tensor([1.0, 4.0]), randn(N, seed=6)
    constraint = ConvexProgram(describe, N, (total, row), ((), (N,)))
    u = randn(3, 1, N)
    wide = u.expand(3, 2, N)
    expected = [2 * wide[..., 0] - wide[..., 1] - 3, wide.sum(-1) - total, wide @ row - 1]
    assert torch.allclose(constraint.residual(u), torch.stack(expected, -1), atol=1e-14)
    beyond = [(wide.norm(dim=-1) - total).clamp(min=0), (-1 - wide).clamp(min=0).amax(-1)]
    assert torch.allclose(constraint.excess(u), torch.stack(beyond, -1), atol=1e-14)
    assert constraint.scale(u).shape == (3, 2, 3)
    assert constraint.excess_scale(u).shape == (3, 2, 2)
    assert torch.allclose(constraint.excess_scale(u)[..., 0], 1 + wide.abs().amax(-1))
    slope = constraint.residual(u.requires_grad_())[..., 0].sum()
    assert torch.autograd.grad(slope, u)[0][0, 0].tolist() == [4, -2, 0, 0, 0, 0]  # rows have gradients, once per total
    assert constraint.to(torch.float32).args[0].dtype == torch.float32
    assert repr(constraint) == "ConvexProgram(describe, variables=6)"


def difference(function, inputs: list[Tensor], directions: list[Tensor], step: float = 1e-5) -> Tensor:
    with torch.no_grad():
        ahead, behind = (
            function(*(x + s * step * d for x, d in zip(inputs, directions, strict=True))) for s in (1, -1)
        )
    return (ahead - behind) / (2 * step)


@pytest.mark.parametrize("kind", ["diagonal", "dense"])
@pytest.mark.parametrize("case", ["cone", "exponential", "semidefinite", "joined"])
def test_gradients_by_finite_differences(case, kind):
    """In the point, the weight, the data, bounds and right-hand sides."""
    z = 1.5 * randn(3, N, seed=7)
    weight = rand(N, seed=8) if kind == "diagonal" else 3 * torch.eye(N) + randn(N, N, seed=8).tril()
    cotangent, data = randn(3, N, seed=9), randn(3, N, seed=10) / 2

    def project(z: Tensor, weight: Tensor, data: Tensor) -> Tensor:
        metric = Diagonal(weight) if kind == "diagonal" else Dense(weight.tril())
        if case == "cone":
            constraint = ConvexProgram(around, N, (data,), ((N,),))
        elif case == "exponential":
            constraint = ConvexProgram(smooth_maximum, N, (1 + data[:, 0],), ((),))
        elif case == "semidefinite":
            constraint = ConvexProgram(semidefinite, N)
        else:
            mass = ph.LinearEquality(torch.ones(1, N), data[:, :1] / 4)
            constraint = ConvexProgram(unit, N) & ph.Box(data / 4 - 0.4, None) & mass
        solution = projector(constraint, metric).solve(z)
        assert solution.stats.converged.all()
        return (solution.value * cotangent).sum()

    inputs = [x.requires_grad_() for x in (z, weight, data)]
    gradients = torch.autograd.grad(project(*inputs), inputs, allow_unused=True)
    for i, gradient in enumerate(gradients):
        if gradient is None:
            assert (case, i) == ("semidefinite", 2)
            continue
        directions = [randn(*x.shape, seed=11 + j) * float(i == j) for j, x in enumerate(inputs)]
        if i == 1 and kind == "dense":
            directions[1] = directions[1].tril()
        expected = difference(project, inputs, directions)
        assert float((gradient * directions[i]).sum()) == pytest.approx(float(expected), rel=1e-5)


def test_tangent_is_the_jacobian():
    z, weight = 1.5 * randn(2, N), rand(N)
    program = projector(ConvexProgram(unit, N), weight)
    solution = program.solve(z)
    tangent = solution.tangent
    step = 1e-5
    columns = [(program.solve(z + step * e).value - program.solve(z - step * e).value) / (2 * step) for e in torch.eye(N)]
    expected = torch.stack(columns, -1)
    assert (z.norm(dim=-1) > 1).all()
    assert (tangent.matrix - expected).abs().max() < 1e-7
    x = randn(3, 2, N, seed=2)
    assert torch.allclose(tangent.apply(x), (expected @ x.unsqueeze(-1)).squeeze(-1), atol=1e-6)
    assert torch.allclose(tangent.transpose(x), (expected.mT @ x.unsqueeze(-1)).squeeze(-1), atol=1e-6)
    cov = Diagonal(rand(2, N, seed=3))
    assert torch.allclose(tangent.variance(cov), (expected.square() * cov.variance.unsqueeze(-2)).sum(-1), atol=1e-6)
    _, mean, scale, _ = program.moments(z, cov)
    assert torch.equal(mean, solution.value)
    assert torch.allclose(scale.square(), tangent.variance(cov))


def test_jacobian_of_many_variables_is_refused():
    n = 65
    tangent = projector(ConvexProgram(unit, n), torch.ones(n), n).solve(randn(n)).tangent
    assert tangent.transpose(randn(n, seed=1)).shape == (n,)
    with pytest.raises(ph.ParameterError, match="asked for 65 variables"):
        tangent.apply(randn(n))


def crossing(u, low):
    return [cp.norm(u, 2) <= 1, u[0] >= low]


def test_infeasible_element_is_flagged_and_the_others_kept():
    low = torch.tensor([0.5, 2.0, 0.9])
    z = randn(4, 3, N).requires_grad_()
    program = projector(ConvexProgram(crossing, N, (low,), ((),)), torch.ones(N))
    solution = program.solve(z)
    assert solution.stats.converged.tolist() == [[True, False, True]] * 4
    assert torch.isfinite(solution.value).all()
    good = solution.value[:, [0, 2]]
    assert (good.norm(dim=-1) - 1).max() < 1e-12
    assert (good[..., 0] - low[[0, 2]]).min() > -1e-12
    (gradient,) = torch.autograd.grad(good.square().sum(), z)
    assert torch.isfinite(gradient).all()
    assert (gradient[:, 1] == 0).all()
    error = program.explain(z, solution.stats)
    assert isinstance(error, ph.InfeasibleError)
    assert "batch element (0, 1)" in str(error)
    fine = projector(ConvexProgram(unit, N), torch.ones(N))
    stats = fine.solve(z).stats
    spoilt = type(stats)(stats.steps, stats.residual, torch.zeros_like(stats.converged))
    assert fine.explain(z, spoilt) is None  # no empty set where there is a point


@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_draws_are_feasible(kind):
    constraint = ConvexProgram(sparse, N) & ph.Box(-0.2, 0.5) & ph.Conservation(torch.ones(N), 0.3)
    cov = Diagonal(rand(N)) if kind == "diagonal" else Dense(torch.eye(N) + randn(N, N).tril() / 3)
    law = ph.LocationScale(randn(N, seed=1), cov)
    draws = law.rsample((200,), torch.Generator().manual_seed(0))
    solution = projector(constraint, cov).solve(draws)
    assert solution.stats.converged.all()
    assert constraint.violation(solution.value).max() < 1e-14
    assert solution.value.var(0).max() > 1e-4  # they did not all land on one point


def test_single_precision_in_and_out():
    z = 2 * randn(5, N)
    constraint = ConvexProgram(unit, N) & ph.Box(-0.3, None)
    double = projector(constraint, torch.ones(N)).solve(z)
    single = projector(constraint, torch.ones(N, dtype=torch.float32)).solve(z.float())
    assert single.value.dtype == torch.float32
    assert single.stats.converged.all()
    assert (single.value.double() - double.value).abs().max() < 1e-6
    assert (single.value >= torch.tensor(-0.3, dtype=torch.float32)).all()


def test_compiled_once_for_all_batches():
    first = projector(ConvexProgram(around, N, (randn(3, N),), ((N,),)), torch.ones(N))
    second = projector(ConvexProgram(around, N, (randn(7, 1, N, seed=1),), ((N,),)), rand(7, 2, N))
    assert first.parts.convex_programs[0].compiled is second.parts.convex_programs[0].compiled
    assert compiled_of(first.terms, N, True) is compiled_of(second.terms, N, True)
    assert second.solve(randn(2, N)).value.shape == (7, 2, N)


def test_no_points():
    solution = projector(ConvexProgram(unit, N), torch.ones(N)).solve(torch.zeros(0, N))
    assert solution.value.shape == (0, N)
    assert solution.stats.converged.shape == (0,)


@pytest.mark.parametrize("module", ["cvxpy", "cvxpylayers"])
def test_missing_extra(monkeypatch, module):
    for name in [m for m in sys.modules if m.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)

    def fresh(u):
        return [cp.norm(u, 2) <= 1]

    with pytest.raises(ph.MissingExtraError, match=rf"needs {module}.*probhard\[cvx\]"):
        projector(ConvexProgram(fresh, N), torch.ones(N)).solve(randn(N))


def test_import_leaves_the_extra_alone(monkeypatch):
    for name in [m for m in sys.modules if m.partition(".")[0] in ("cvxpy", "cvxpylayers", "clarabel")]:
        monkeypatch.setitem(sys.modules, name, None)
    for module in ("constraints.convex_program", "projection.convex_program"):
        names = runpy.run_path(sys.modules[f"probhard.{module}"].__file__)
        with pytest.raises(ph.MissingExtraError):
            names["cvx"]("cvxpy")


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: ConvexProgram(3, N), ph.ParameterError, "got int as its description"),
        (lambda: ConvexProgram(lambda u: [cp.norm(u) >= 1], N), ph.ParameterError, "not convex"),
        (lambda: ConvexProgram(lambda u: [3], N), ph.ParameterError, "returned a int"),
        (lambda: ConvexProgram(lambda u: [cp.Variable(N) >= u], N), ph.ParameterError, "variables of its own"),
        (
            lambda: ConvexProgram(lambda u, a, b: [a * b * cp.sum(u) <= 1], N, (1.0, 2.0), ((), ())),
            ph.ParameterError,
            "not DPP",
        ),
        (lambda: ConvexProgram(around, N, (randn(N),)), ph.ShapeError, "1 args and 0 shapes"),
        (lambda: ConvexProgram(around, N, (randn(3, N - 1),), ((N,),)), ph.ShapeError, "has shape .3, 5."),
        (
            lambda: ConvexProgram(lambda u, a, b: [u >= a, u <= b], N, (randn(2, N), randn(3, N)), ((N,), (N,))),
            ph.ShapeError,
            "batch shapes",
        ),
        (lambda: ConvexProgram(around, N, (torch.full((N,), torch.nan),), ((N,),)), ph.ParameterError, "NaN"),
        (lambda: ConvexProgram(unit, N).residual(randn(N + 1)), ph.ShapeError, "6 variables"),
        (lambda: projector(ConvexProgram(unit, N) & ph.Ball(1.0), torch.ones(N)), ph.ParameterError, "functions of"),
    ],
)
def test_bad_input(build, error, words):
    with pytest.raises(error, match=words) as caught:
        build()
    assert caught.value.why
    assert caught.value.fix


def test_not_inside_torch_func():
    program = projector(ConvexProgram(unit, N), torch.ones(N))
    with pytest.raises(ph.ParameterError, match=r"torch\.func"):
        torch.func.grad(lambda z: program.solve(z).value.sum())(randn(N))


def test_layer():
    """DPPL end to end: moments, feasible draws, gradients, failures."""
    constraint = ConvexProgram(unit, N) & ph.Conservation(torch.ones(N), 0.3)
    loc, scale = randn(2, N).requires_grad_(), rand(2, N)
    layer = ph.DPPL(draws=20)
    assert isinstance(projector_of(constraint, loc, Diagonal(scale), Options()), ProgramProjector)
    projected = layer(ph.LocationScale(loc, Diagonal(scale.square())), constraint)
    assert constraint.violation(projected.mean.detach()).max() < 1e-14
    assert (projected.variance > 0).all()
    (gradient,) = torch.autograd.grad(projected.mean[0].square().sum(), loc)
    assert gradient[0].abs().max() > 0
    assert (gradient[1] == 0).all()
    draws = projected.sample((10,), torch.Generator().manual_seed(0))
    assert constraint.violation(draws).max() < 1e-14
    empty = ConvexProgram(crossing, N, (torch.tensor([0.5, 2.0]),), ((),))
    with pytest.raises(ph.InfeasibleError, match=r"batch element \(1,\)"):
        layer(ph.LocationScale(loc, Diagonal(scale.square())), empty)
