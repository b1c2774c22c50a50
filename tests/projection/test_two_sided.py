"""Monotone profiles and profiles of little variation whose weighted sum lies between two numbers."""

import cvxpy as cp
import numpy as np
import pytest
import torch

import probhard as ph
from probhard.constraints import Box, LinearInequality, Monotone, TotalVariation, per_slice
from probhard.laws.covariance import Diagonal
from probhard.pde.problems import PROBLEMS
from probhard.projection.base import Options
from probhard.projection.dispatch import projector_of
from probhard.projection.parts import parts_of
from probhard.projection.polyhedral import FaceProjector
from probhard.projection.profiles import PooledProjector

NX, LEAST, MOST = 9, -1.2, 0.9
SHAPES = {
    "increasing": Monotone("increasing"),
    "decreasing": Monotone("decreasing"),
    "variation": TotalVariation(2.5),
}


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def problem(name, slices=1):
    a = 0.1 + torch.rand(NX, generator=torch.Generator().manual_seed(4))
    band = LinearInequality(torch.stack([a, -a]), torch.tensor([MOST, -LEAST]))
    one = SHAPES[name] & Box(-0.8, 1.1) & band
    return a, one if slices == 1 else per_slice(one, (slices, NX))


def points(count, slices=1):
    generator = torch.Generator().manual_seed(1)
    z = 1.5 * torch.randn(count, slices * NX, generator=generator)
    return z, torch.rand(slices * NX, generator=generator) + 0.2


def oracle(name, z, weight, a):
    u = cp.Variable(NX)
    step = cp.diff(u)
    shape = {"increasing": step >= 0, "decreasing": step <= 0, "variation": cp.norm1(step) <= 2.5}[name]
    distance = cp.sum_squares(cp.multiply(1 / np.sqrt(weight), u - z))
    task = cp.Problem(cp.Minimize(distance), [shape, u >= -0.8, u <= 1.1, a @ u >= LEAST, a @ u <= MOST])
    task.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    return u.value


@pytest.mark.parametrize("name", SHAPES)
def test_cvxpy_agrees_within_and_at_both_ends(name):
    a, constraint = problem(name)
    z, weight = points(40)
    projector = projector_of(constraint, z, Diagonal(weight), Options())
    assert isinstance(projector, PooledProjector)
    solution = projector.solve(z)
    assert bool(solution.stats.converged.all())
    sums = solution.value @ a
    assert float((sums - MOST).max()) < 1e-14
    assert float((LEAST - sums).max()) < 1e-14
    ends = [int((sums - end).abs().lt(1e-12).sum()) for end in (LEAST, MOST)]
    assert min(*ends, len(z) - sum(ends)) >= 3  # all three are met
    for row, value in zip(z[:12], solution.value):
        assert np.abs(value.numpy() - oracle(name, row.numpy(), weight.numpy(), a.numpy())).max() < 1e-6


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_and_tangent(name):
    _, constraint = problem(name)
    z, weight = points(6)

    def value(z, weight):
        return projector_of(constraint, z, Diagonal(weight), Options()).solve(z).value

    assert torch.autograd.gradcheck(value, [z.requires_grad_(), weight.requires_grad_()], eps=1e-7, atol=1e-6)
    weight = weight.detach()
    solution = projector_of(constraint, z, Diagonal(weight), Options()).solve(z.detach())
    jacobian = torch.func.vmap(torch.func.jacrev(lambda x: x))(z).detach()  # the identity, one per point
    moved = solution.tangent.apply(jacobian.movedim(1, 0)).movedim(0, -1)
    step = 1e-6
    near = [value(z.detach() + sign * step * jacobian.movedim(1, 0), weight) for sign in (1, -1)]
    torch.testing.assert_close(moved, ((near[0] - near[1]) / (2 * step)).movedim(0, -1), rtol=0, atol=1e-7)


def test_gradients_of_the_ends():
    a, _ = problem("increasing")
    z, weight = points(6)

    def value(least, most):
        band = LinearInequality.between(a, least, most)
        return projector_of(Monotone() & band, z, Diagonal(weight), Options()).solve(z).value

    ends = [torch.full((6,), end, requires_grad=True) for end in (LEAST, MOST)]
    assert torch.autograd.gradcheck(value, ends, eps=1e-7, atol=1e-6)


def test_fields_agree_with_active_sets():
    _, constraint = problem("decreasing", slices=3)
    z, weight = points(20, slices=3)
    fast = projector_of(constraint, z, Diagonal(weight), Options())
    assert isinstance(fast, PooledProjector)
    slow = FaceProjector(parts_of(constraint, z.shape[-1]), Diagonal(weight), Options())
    torch.testing.assert_close(fast.solve(z).value, slow.solve(z).value, rtol=0, atol=1e-9)


def test_other_rows_are_left_to_active_sets():
    a, _ = problem("increasing")
    z, weight = points(5)
    for rows in (torch.stack([a, -2 * a]), a[None], torch.stack([a, a.flip(0)])):
        constraint = Monotone() & LinearInequality(rows, torch.full((len(rows),), 0.5))
        projector = projector_of(constraint, z, Diagonal(weight), Options())
        assert isinstance(projector, FaceProjector)


def test_ends_out_of_reach_are_flagged():
    a, _ = problem("increasing")
    z, weight = points(5)
    band = LinearInequality(torch.stack([a, -a]), torch.tensor([30.0, -20.0]))
    solution = projector_of(Monotone() & Box(0.0, 1.0) & band, z, Diagonal(weight), Options()).solve(z)
    assert not bool(solution.stats.converged.any())


def test_ends_in_the_wrong_order_are_flagged_and_infinite_ones_are_none():
    a, _ = problem("increasing")
    z, weight = points(5)
    for most, least, expected in ((0.3, 0.4, False), (torch.inf, -torch.inf, True), (torch.inf, 0.4, True)):
        band = LinearInequality(torch.stack([a, -a]), torch.tensor([most, -least]))
        solution = projector_of(Monotone() & band, z, Diagonal(weight), Options(validate=False)).solve(z)
        assert bool((solution.stats.converged == expected).all())
        assert bool(solution.value.isfinite().all())
        assert not expected or bool((solution.value @ a >= least - 1e-14).all())
    band = LinearInequality(torch.stack([a, -a]), torch.tensor([0.3, -0.4]))
    with pytest.raises(ph.InfeasibleError, match=r"Profile 0: a sum is to be at least 0\.4 and at most 0\.3"):
        projector_of(Monotone() & band, z, Diagonal(weight), Options())
    free = projector_of(Monotone(), z, Diagonal(weight), Options()).solve(z).value
    band = LinearInequality(torch.stack([a, -a]), torch.tensor([torch.inf, torch.inf]))
    assert torch.equal(projector_of(Monotone() & band, z, Diagonal(weight), Options()).solve(z).value, free)


@pytest.mark.parametrize("name", ["advection", "stefan", "pme"])
def test_exact_fields_obey_the_interval_of_their_mass(name):
    exact = PROBLEMS[name](dtype=torch.float64)
    parameters = exact.parameters(50, torch.Generator().manual_seed(3))
    fields = exact.solution(parameters).flatten(-2)
    known = exact.physics(parameters, "interval")
    solution = ph.DPPL("orthogonal").project_samples(fields, known)
    assert bool(solution.stats.converged.all())
    # Stefan's first slice has u(0, 0) = 1 at mass 0, half a cell that the interval allows
    torch.testing.assert_close(solution.value, fields, rtol=0, atol=1e-12)
    assert float(exact.physics(parameters).violation(fields).max()) > 1e-4
