"""Convex programs: residuals, gradients by finite differences, failures, bad input and the layer."""

from __future__ import annotations

import runpy
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

import probhard as ph
from probhard.constraints.convex_program import ConvexProgram
from probhard.laws.covariance import Dense, Diagonal
from probhard.projection.base import Options
from probhard.projection.convex_program import ProgramProjector, compiled_of
from probhard.projection.dispatch import projector_of
from projection.programs import (
    N,
    around,
    cp,
    difference,
    matrix,
    projector,
    rand,
    randn,
    semidefinite,
    smooth_maximum,
    sparse,
    unit,
)

pytestmark = pytest.mark.filterwarnings("ignore:Solution may be inaccurate")  # the oracle's


def test_residual_and_excess():
    def describe(u, total, row):
        return [cp.sum(u) == total, 2 * u[0] - u[1] == 3, row @ u == 1, cp.norm(u) <= total, u >= -1]

    total, row = torch.tensor([1.0, 4.0]), randn(N, seed=6)
    constraint = ConvexProgram(describe, N, (total, row), ((), (N,)))
    u = randn(3, 1, N)
    wide = u.expand(3, 2, N)
    expected = [2 * wide[..., 0] - wide[..., 1] - 3, wide.sum(-1) - total, wide @ row - 1]
    assert torch.allclose(constraint.residual(u), torch.stack(expected, -1), atol=1e-14)
    length = wide.norm(dim=-1)
    beyond = [(length - total).clamp(min=0).unsqueeze(-1), (-1 - wide).clamp(min=0)]
    assert torch.allclose(constraint.excess(u), torch.cat(beyond, -1), atol=1e-14)
    sides = [2 * wide[..., 0].abs() + wide[..., 1].abs() + 3, wide.sum(-1).abs() + total + wide.abs().sum(-1)]
    sides.append((wide @ row).abs() + 1 + wide.abs() @ row.abs())
    assert torch.allclose(constraint.scale(u), torch.stack(sides, -1))
    assert torch.allclose(constraint.unit(u)[1, 1], torch.tensor([3.0, 6.0, row.abs().sum()]))
    assert torch.allclose(constraint.excess_scale(u)[..., 0], 2 * length + total)
    assert torch.allclose(constraint.excess_scale(u)[..., 1:], 1 + 2 * wide.abs())
    assert torch.allclose(constraint.excess_unit(u)[..., 0], wide.abs().sum(-1) / length)
    slope = constraint.residual(u.requires_grad_())[..., 0].sum()
    assert torch.autograd.grad(slope, u)[0][0, 0].tolist() == [4, -2, 0, 0, 0, 0]  # rows have gradients, once per total
    assert constraint.to(torch.float32).args[0].dtype == torch.float32
    assert repr(constraint) == "ConvexProgram(describe, variables=6)"


def in_units(u, scale):
    return [cp.norm(scale * u) <= 1, cp.SOC(scale * u[0] + 3, scale * u[1:]), scale * matrix(u) + np.eye(3) >> 0]


def test_units_do_not_change_relative_violations():
    """Points of a size of 1e10 in rows of a size of 1 are measured by those rows."""
    u = 2 * randn(5, N, seed=3)
    plain, large = (ConvexProgram(in_units, N, (torch.tensor(x),), ((),)) for x in (1.0, 1e-10))
    near = plain.relative_violation(u)
    assert torch.allclose(large.relative_violation(1e10 * u), near, rtol=1e-9)
    assert bool((near > 0.1).any())
    size = u.abs().amax(-1, keepdim=True)
    assert torch.allclose(large.relative_violation(1e10 * u, 1e10 * size), plain.relative_violation(u, size), rtol=1e-9)


def test_a_ball_beside_a_program():
    z, weight, center = 3 * randn(4, N, seed=5), rand(4, N), 0.2 * randn(N, seed=9)
    joined = projector(ConvexProgram(sparse, N) & ph.Ball(0.6, center), weight).solve(z)
    written = ConvexProgram(lambda u: [*sparse(u), cp.norm(u - center.numpy(), 2) <= 0.6], N)
    assert torch.allclose(joined.value, projector(written, weight).solve(z).value, atol=1e-9)
    assert bool(joined.stats.converged.all())


def test_points_that_are_not_finite_are_not_feasible():
    constraint = ConvexProgram(in_units, N, (torch.tensor(1.0),), ((),))
    u = torch.zeros(3, N)
    u[1, 2], u[2, 3] = torch.nan, torch.inf
    assert constraint.violation(u).isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("scale", [1e-10, 1e-4, 1e7])
def test_units_do_not_change_the_nearest_point(scale):
    z, weight = 3 * randn(4, N, seed=5).requires_grad_(), rand(4, N)
    bound = ph.LinearInequality(torch.ones(1, N), torch.tensor([0.5]))
    plain = ConvexProgram(in_units, N, (torch.tensor(1.0),), ((),)) & bound
    moved = ph.LinearInequality(torch.ones(1, N), torch.tensor([0.5]) / scale)
    moved = ConvexProgram(in_units, N, (torch.tensor(scale),), ((),)) & moved
    first, second = projector(plain, weight).solve(z), projector(moved, weight).solve(z / scale)
    assert bool(first.stats.converged.all())
    assert bool(second.stats.converged.all())
    assert torch.allclose(first.value, scale * second.value, atol=1e-9)
    slopes = [torch.autograd.grad(value[..., 0].sum(), z)[0] for value in (first.value, scale * second.value)]
    assert torch.allclose(*slopes, atol=1e-6)


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
    columns = [
        (program.solve(z + step * e).value - program.solve(z - step * e).value) / (2 * step) for e in torch.eye(N)
    ]
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
        (
            lambda: projector(ConvexProgram(unit, N) & ph.NonlinearInequality(torch.square), torch.ones(N)),
            ph.ParameterError,
            "functions of",
        ),
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
