"""Values that are 0 or not small: against all sets of zeros, finite differences, and many random profiles."""

import itertools

import cvxpy as cp
import numpy as np
import pytest
import torch

import probhard as ph
from probhard.errors import InfeasibleError, ParameterError, ShapeError
from probhard.laws.covariance import Diagonal, LowRank
from probhard.pde.problems import PROBLEMS
from probhard.projection.base import Options
from probhard.projection.dispatch import projector_of

NX, LEAST, TOP, MASS = 6, 0.6, 1.1, 1.7
ROW = torch.tensor([0.4, 0.9, 0.3, 0.8, 0.5, 0.7], dtype=torch.float64)
ROWS = {
    "no row": None,
    "mass": ph.Conservation(ROW, MASS),
    "mass between": ph.LinearInequality.between(ROW, torch.tensor(1.2).double(), torch.tensor(1.5).double()),
}
PROFILES = list(itertools.product(("increasing", "decreasing"), ROWS))


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def profile(direction, rows):
    known = ph.Monotone(direction) & ph.Box(0.0, TOP) & ph.Semicontinuous(LEAST)
    return known if ROWS[rows] is None else known & ROWS[rows]


def points(count, n=NX, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 0.5 + 0.6 * torch.randn(count, n, generator=generator), torch.rand(n, generator=generator) + 0.1


def nearest_of_all(z, weight, direction, rows):
    """The best of Clarabel's answers for every set of zeros."""
    best, nearest = np.inf, None
    for zeros in itertools.product((False, True), repeat=NX):
        u = cp.Variable(NX)
        at, others = np.flatnonzero(zeros), np.flatnonzero(~np.array(zeros))
        said = [cp.diff(u) >= 0 if direction == "increasing" else cp.diff(u) <= 0, u <= TOP]
        said += ([u[at] == 0] if len(at) else []) + ([u[others] >= LEAST] if len(others) else [])
        total = ROW.numpy() @ u
        said += {"no row": [], "mass": [total == MASS], "mass between": [total >= 1.2, total <= 1.5]}[rows]
        task = cp.Problem(cp.Minimize(cp.sum_squares(cp.multiply(weight.numpy() ** -0.5, u - z.numpy()))), said)
        task.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
        if task.status == "optimal" and task.value < best:
            best, nearest = task.value, u.value
    return best, nearest


@pytest.mark.parametrize(("direction", "rows"), PROFILES)
def test_the_nearest_of_all_sets_of_zeros_is_found(direction, rows):
    z, weight = points(4)
    solution = projector_of(profile(direction, rows), z, Diagonal(weight), Options()).solve(z)
    assert bool(solution.stats.converged.all())
    assert not solution.stats.local
    for point, value in zip(z, solution.value):
        best, expected = nearest_of_all(point, weight, direction, rows)
        assert float(((value - point).square() / weight).sum()) <= best + 1e-7
        np.testing.assert_allclose(value.numpy(), expected, atol=1e-5)


def test_alone_every_value_goes_to_the_nearer_phase():
    z = torch.tensor([-3.0, -0.1, 0.0, 0.29, 0.31, 0.6, 0.9, 7.0])
    layer = ph.DPPL("orthogonal")
    value = layer.project(z, ph.Semicontinuous(0.6) & ph.Box(None, 2.0)).value
    torch.testing.assert_close(value, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.6, 0.6, 0.9, 2.0]), rtol=0, atol=0)
    least = torch.linspace(0.0, 1.4, 8)
    value = layer.project(z, ph.Semicontinuous(least)).value
    expected = torch.where((torch.maximum(z, least) - z).abs() < z.abs(), torch.maximum(z, least), 0.0)
    torch.testing.assert_close(value, torch.where(z >= least, z, expected), rtol=0, atol=0)
    above = layer.project(z, ph.Semicontinuous(0.6) & ph.Box(0.2, None)).value  # so that 0 is not allowed
    assert float(above.min()) == 0.6
    below = layer.project(z, ph.Semicontinuous(0.6) & ph.Box(None, 0.5)).value  # and here nothing else is
    assert not below.any()


@pytest.mark.parametrize(("direction", "rows"), PROFILES)
def test_gradients_are_those_of_finite_differences(direction, rows):
    z, weight = points(3, seed=5)

    def projected(z, weight, least, top, mass):
        row = {
            "no row": None,
            "mass": ph.Conservation(ROW, mass),
            "mass between": ph.LinearInequality.between(ROW, mass - 0.5, mass - 0.2),
        }[rows]
        known = ph.Monotone(direction) & ph.Box(None, top) & ph.Semicontinuous(least)
        whole = known if row is None else known & row
        return projector_of(whole, z, Diagonal(weight), Options()).solve(z).value

    data = [x.clone().requires_grad_() for x in (z, weight, *map(torch.tensor, (LEAST, TOP, MASS)))]
    assert torch.autograd.gradcheck(projected, data, eps=1e-7, atol=1e-5)
    alone = z.clone().requires_grad_()
    own = projector_of(profile(direction, rows), z, Diagonal(weight), Options()).solve(alone).value
    (both,) = torch.autograd.grad(own.square().sum(), alone)
    (all_but,) = torch.autograd.grad(projected(data[0], *data[1:]).square().sum(), data[0])
    torch.testing.assert_close(both, all_but)


@pytest.mark.parametrize(("direction", "rows"), PROFILES)
def test_tangents_are_those_of_the_values(direction, rows):
    z, weight = points(1, seed=2)
    projector = projector_of(profile(direction, rows), z[0], Diagonal(weight), Options())
    tangent = projector.solve(z[0]).tangent
    jacobian = torch.autograd.functional.jacobian(lambda x: projector.solve(x).value, z[0])
    eye = torch.eye(NX)
    torch.testing.assert_close(tangent.apply(eye).mT, jacobian)
    torch.testing.assert_close(tangent.transpose(eye), jacobian)
    cov = torch.rand(NX) + 0.1
    torch.testing.assert_close(tangent.variance(Diagonal(cov)), (jacobian**2) @ cov)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("direction", ["increasing", "decreasing"])
def test_no_random_profile_is_infeasible_and_none_is_nearer(direction, dtype):
    """4,000 with weights over 1e10: bounds end the search early, so all numbers of zeros are solved for beside it."""
    count, nx = 4_000, 9
    generator = torch.Generator().manual_seed(3)
    z = 3 * torch.randn(count, nx, generator=generator)
    weight = 10 ** (10 * torch.rand(count, nx, generator=generator) - 10)
    row = 0.1 + torch.rand(nx, generator=generator)
    least = 0.3 + torch.rand(count, 1, generator=generator)
    top = least * (1.5 + torch.rand(count, 1, generator=generator))
    whole = row[: 3 + 1].sum() if direction == "decreasing" else row[-4:].sum()
    mass = (whole * (least + (top - least) * torch.rand(count, 1, generator=generator)))[:, 0]
    z, weight, row, least, top, mass = (x.to(dtype) for x in (z, weight, row, least, top, mass))
    bounds, kind = ph.Box(0.0, top), ph.Monotone(direction)
    solution = projector_of(
        kind & ph.Conservation(row, mass) & bounds & ph.Semicontinuous(least), z, Diagonal(weight), Options()
    ).solve(z)
    u = solution.value
    assert bool(solution.stats.converged.all())
    assert u.dtype == dtype
    assert bool(((u == 0) | ((u >= least) & (u <= top))).all())
    steps = u.diff(dim=-1)
    assert bool((steps >= 0).all() if direction == "increasing" else (steps <= 0).all())
    size = {torch.float64: 1e-12, torch.float32: 1e-6}[dtype]
    assert float(((u @ row - mass).abs() / mass).max()) < 4 * size
    if dtype == torch.float32:
        return
    best = torch.full((count,), torch.inf)
    for k in range(1, nx + 1):
        part = slice(0, k) if direction == "decreasing" else slice(nx - k, nx)
        line = row[part].sum()
        fits = (least[:, 0] * line <= mass) & (mass <= top[:, 0] * line)
        if not bool(fits.any()):
            continue
        one = kind & ph.Conservation(row[part], mass[fits]) & ph.Box(least[fits], top[fits])
        inner, w = z[fits][:, part], weight[fits][:, part]
        value = torch.zeros(int(fits.sum()), nx)
        value[:, part] = projector_of(one, inner, Diagonal(w), Options()).solve(inner).value
        cost = ((value - z[fits]).square() / weight[fits]).sum(-1)
        best[fits] = torch.minimum(best[fits], cost)
    cost = ((u - z).square() / weight).sum(-1)
    assert float((cost / best - 1).abs().max()) < 1e-9


def test_slices_have_their_own_least_values():
    generator = torch.Generator().manual_seed(4)
    least, mass = torch.tensor([[0.2, 0.4], [0.6, 0.8]]), torch.tensor([[0.9, 1.1], [1.3, 1.7]])
    one = ph.Monotone("decreasing") & ph.Conservation(ROW, mass) & ph.Semicontinuous(least[..., None])
    field = ph.per_slice(one & ph.Box(0.0, 1.5), (2, NX))
    z = 0.5 + torch.randn(7, 2, 2 * NX, generator=generator)
    value = ph.DPPL("orthogonal").project(z, field).value
    assert float(field.violation(value).max()) < 1e-12
    for batch, slot in itertools.product(range(2), range(2)):
        single = ph.Monotone("decreasing") & ph.Conservation(ROW, mass[batch, slot]) & ph.Box(0.0, 1.5)
        part = slice(slot * NX, (slot + 1) * NX)
        alone = ph.DPPL("orthogonal").project(z[:, batch, part], single & ph.Semicontinuous(least[batch, slot])).value
        torch.testing.assert_close(value[:, batch, part], alone)


def test_draws_and_mean_of_a_projected_law_obey():
    z, weight = points(3)
    constraint = profile("decreasing", "mass")
    law = ph.DPPL("oblique")((z, weight.sqrt().expand_as(z)), constraint)
    draws = law.sample((500,))
    assert law.feasible
    assert not law.exact
    for u in (draws, law.mean):
        assert bool(((u == 0) | (u >= LEAST)).all())
        assert float(constraint.violation(u).max()) < 1e-12
    assert bool((draws == 0).any())
    assert bool((law.variance >= 0).all())


def test_violation_is_the_way_to_the_nearer_phase():
    constraint = ph.Semicontinuous(0.6)
    u = torch.tensor([[0.0, 0.7, 0.6], [0.1, 0.9, 0.0], [0.0, 0.5, 2.0], [-0.3, 0.0, 1.0]])
    torch.testing.assert_close(constraint.violation(u), torch.tensor([0.0, 0.1, 0.1, 0.3]))
    torch.testing.assert_close(constraint.penalty(u), torch.tensor([0.0, 0.01, 0.01, 0.09]))
    both = constraint & ph.Semicontinuous(torch.tensor([0.9, 0.2, 0.2]))
    value = ph.DPPL("orthogonal").project(torch.tensor([0.7, 0.7, 0.5]), both).value
    torch.testing.assert_close(value, torch.tensor([0.9, 0.7, 0.6]))
    assert constraint.to(torch.float32).least.dtype == torch.float32
    assert repr(constraint) == "Semicontinuous(least=0.6)"
    assert "zeros" in constraint.algorithm


ONES, SINGLE = torch.ones(3, dtype=torch.float64), torch.float32
FALLING, HALF = ph.Monotone("decreasing"), ph.Semicontinuous(0.6)


def between(least, most, row=ONES):
    return ph.LinearInequality.between(row, torch.tensor(least).double(), torch.tensor(most).double())


EDGES = {
    "no upper end": ([0.1, 0.1, 0.1], HALF & FALLING & between(1.0, torch.inf), [0.6, 0.6, 0.0]),
    "a far upper end": ([0.1, 0.1, 0.1], HALF & FALLING & between(1.0, 1e14), [0.6, 0.6, 0.0]),
    "no lower end": ([0.6, 0.6, 0.6], HALF & FALLING & between(-torch.inf, 1.0), [0.6, 0.0, 0.0]),
    "no zeros": ([0.1, 0.1, 0.1], HALF & FALLING & ph.Box(0.2) & between(-torch.inf, 9.0), [0.6, 0.6, 0.6]),
    "weights of 0": (
        [0.7, 0.3, 0.1], HALF & FALLING & ph.Conservation(torch.tensor([0.0, 1.0, 1.0]).double(), 0.0), [0.7, 0.0, 0.0],
    ),
    "a small weight": (
        [0.1, 0.0, 0.0], HALF & FALLING & ph.Conservation(torch.tensor([1e-13, 1.0, 1.0]).double(), 7e-14),
        [0.7, 0.0, 0.0],
    ),
    "a sum of 0 but for rounding": ([0.7, 0.3, 0.1], HALF & FALLING & ph.Conservation(ONES, 1e-16), [0.0, 0.0, 0.0]),
    "far points": ([1.0, -1e160, 1.0], ph.Semicontinuous(0.5), [1.0, 0.0, 1.0]),
    "least and upper of other precisions": (
        [0.9, 0.8, 0.1], ph.Semicontinuous(0.7) & ph.Box(0.0, torch.tensor(0.7, dtype=SINGLE)), [0.7, 0.7, 0.0],
    ),
    "and the other way round": (
        [0.9, 0.8, 0.1], ph.Semicontinuous(torch.tensor(0.6, dtype=SINGLE)) & ph.Box(0.0, 0.6), [0.6, 0.6, 0.0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_at_the_edges(name):
    z, constraint, expected = EDGES[name]
    value = ph.DPPL("orthogonal").project(torch.tensor(z), constraint).value
    torch.testing.assert_close(value, torch.tensor(expected), rtol=1e-7, atol=1e-15)


REFUSED = {
    "negative": (lambda: ph.Semicontinuous(-0.5), ParameterError, "-0.5"),
    "infinite": (lambda: ph.Semicontinuous(torch.tensor([1.0, torch.inf])), ParameterError, "inf"),
    "a sum without order": (lambda: ph.Semicontinuous(0.6) & ph.Conservation(ROW, 1.0), ParameterError, "Monotone"),
    "a signed row": (
        lambda: ph.Semicontinuous(0.6) & ph.Monotone() & ph.Conservation(ROW - 0.5, 1.0), ParameterError, "negative",
    ),
    "a ball": (lambda: ph.Semicontinuous(0.6) & ph.Ball(1.0), ParameterError, "use it alone"),
    "variation": (lambda: ph.Semicontinuous(0.6) & ph.TotalVariation(1.0), ParameterError, "Monotone"),
    "least values along a profile": (
        lambda: ph.Semicontinuous(torch.linspace(0.1, 1, NX)) & ph.Monotone(), ParameterError, "uniform",
    ),
    "another size": (lambda: ph.Semicontinuous(torch.ones(4)), ShapeError, "4 variables"),
    "a sum between two numbers of zeros": (
        lambda: ph.Semicontinuous(1.0) & ph.Box(0.0, 1.0) & ph.Monotone() & ph.Conservation(ROW, 1.0),
        InfeasibleError, "at least 1",
    ),
    "bounds that leave nothing": (
        lambda: ph.Semicontinuous(0.6) & ph.Box(0.2, 0.5) & ph.Monotone(), InfeasibleError, "leave no values",
    ),
    "bounds that leave nothing, and a sum": (
        lambda: ph.Semicontinuous(0.6) & ph.Box(0.2, 0.5) & ph.Monotone() & ph.Conservation(ROW, 1.0),
        InfeasibleError, "no values that are 0",
    ),
    "slices that do not divide": (
        lambda: ph.Semicontinuous(0.6) & ph.Monotone(slices=4), ShapeError, "4 slices",
    ),
    "more than all": (
        lambda: ph.Semicontinuous(1.0) & ph.Box(0.0, 1.0) & ph.Monotone() & ph.Conservation(ROW, 9.0),
        InfeasibleError, "only allow",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_named(name):
    build, kind, said = REFUSED[name]
    z = torch.full((2, NX), 0.5)
    with pytest.raises(kind, match=said):
        ph.DPPL("orthogonal").project(z, build())


def test_a_coupled_metric_is_refused():
    z, weight = points(2)
    cov = LowRank(torch.ones(NX, 1), weight)
    with pytest.raises(ParameterError, match="diagonal metric"):
        ph.DPPL("oblique")(ph.LocationScale(z, cov), ph.Semicontinuous(0.6))


def test_sums_that_no_number_of_zeros_gives_are_flagged_alone():
    mass = torch.stack([ROW[-2:].sum(), torch.tensor(1.0)])  # of the values 1, the last two give the first sum
    constraint = ph.Semicontinuous(1.0) & ph.Box(0.0, 1.0) & ph.Monotone() & ph.Conservation(ROW, mass)
    solution = ph.DPPL("orthogonal", on_failure="flag").project(torch.full((2, NX), 0.5), constraint)
    assert solution.stats.converged.tolist() == [True, False]
    assert solution.value[0].tolist() == [0.0] * 4 + [1.0] * 2
    bad = torch.full((2, NX), torch.nan)
    projector = projector_of(constraint, bad, Diagonal(torch.ones(NX)), Options())
    assert not bool(projector.solve(bad).stats.converged.any())


@pytest.mark.parametrize("name", ["stefan", "advection", "burgers", "pme"])
def test_exact_fronts_have_two_phases(name):
    problem = PROBLEMS[name](dtype=torch.float64)
    parameter = problem.parameters(20, torch.Generator().manual_seed(0))
    exact = problem.solution(parameter).flatten(-2)
    phases = ph.per_slice(problem.slice_phases(parameter), problem.shape)
    assert float(phases.violation(exact).max()) < 1e-12
    if name == "pme":  # which has no jump, so that its trapezoid sum is not exact
        return
    noisy = exact + 0.1 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
    layer = ph.DPPL("orthogonal")
    errors = []
    for known in (False, True):
        rule = problem.physics(parameter, "jump", phases=known)
        value = layer.project(noisy, rule).value
        assert float(rule.violation(value).max()) < 1e-10
        errors.append(float((value - exact).square().mean()))
    assert errors[1] < 0.8 * errors[0]


def test_default_masses_ask_fronts_for_what_no_phases_have():
    problem = PROBLEMS["advection"](dtype=torch.float64)
    with pytest.raises(InfeasibleError, match="mass='jump'"):
        ph.DPPL("orthogonal").project(torch.zeros(2000), problem.physics(1.3, phases=True))


def test_a_wave_has_no_phases():
    with pytest.raises(ParameterError, match="Heat has no phases"):
        PROBLEMS["heat"]().physics(2.0, phases=True)
