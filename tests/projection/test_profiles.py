"""Pooled projections (monotone, total variation, TVD) against cvxpy, scipy, exact arithmetic and finite differences."""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from fractions import Fraction

import cvxpy as cp
import numpy as np
import pytest
import torch
from scipy.optimize import isotonic_regression

from probhard._util import jit
from probhard.errors import ParameterError, ShapeError
from probhard.laws.covariance import Dense, Diagonal, LowRank
from probhard.projection.diminishing import DiminishingProjector
from probhard.projection.profiles import SHAPES, PooledProjector, ProfileSet, _closed_form, project_points
from probhard.solvers import profiles as solvers
from probhard.solvers.profiles import phases, pooling

NX = 12
CASES = [(shape, bounds, row) for shape in SHAPES for bounds in (False, True) for row in (False, True)]


def problem(shape, bounds, row, batch=(), seed=0, nx=NX):
    """Arguments of a projector, feasible, and points with their weights; generic, so that no kink is near."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    z, weight = 1.5 * normal(*batch, nx), torch.exp(0.7 * normal(*batch, nx))
    amount = {"tv-penalty": 0.4, "tv-bound": 2.5}.get(shape)
    arguments = {
        "amount": None if amount is None else torch.full((*batch, 1), amount),
        "lower": torch.full((*batch, 1), -0.8) if bounds else None,
        "upper": torch.full((*batch, 1), 1.1) if bounds else None,
        "row": 0.2 + torch.rand(nx, generator=generator) if row else None,
        "mass": torch.full((*batch, 1), 1.0) if row else None,
    }
    return arguments, z, weight


def solved(shape, arguments, z, weight, **options):
    return PooledProjector(shape, weight=Diagonal(weight), **arguments, **options).solve(z)


def oracle(shape, z, weight, amount, lower, upper, row, mass):
    u = cp.Variable(len(z))
    objective = cp.sum_squares(cp.multiply(1 / np.sqrt(weight), u - z)) / 2
    variation = cp.norm1(cp.diff(u))
    constraints = []
    if shape == "tv-penalty":
        objective += float(amount) * variation
    else:
        kinds = {"increasing": cp.diff(u) >= 0, "decreasing": cp.diff(u) <= 0}
        constraints.append(kinds[shape] if shape in kinds else variation <= float(amount))
    if lower is not None:
        constraints += [u >= float(lower), u <= float(upper)]
    if row is not None:
        constraints.append(np.asarray(row) @ u == float(mass))
    program = cp.Problem(cp.Minimize(objective), constraints)
    program.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    assert program.status == cp.OPTIMAL
    return u.value


def variation(u):
    return u.diff(dim=-1).abs().sum(-1)


def assert_feasible(shape, u, arguments):
    """To rounding: bounds and order exactly, the row and the variation in relation to their terms."""
    lower, upper, row, mass = (arguments[name] for name in ("lower", "upper", "row", "mass"))
    assert lower is None or bool((u >= lower).all())
    assert upper is None or bool((u <= upper).all())
    if shape in ("increasing", "decreasing"):
        assert bool((u.diff(dim=-1) * (1 if shape == "increasing" else -1) >= 0).all())
    if shape == "tv-bound":
        assert bool((variation(u) <= arguments["amount"].squeeze(-1) * (1 + 1e-12)).all())
    if row is not None:
        terms = row * u
        off = (terms.sum(-1) - mass.squeeze(-1)).abs()
        assert float((off / (terms.abs().sum(-1) + mass.squeeze(-1).abs())).max()) < 1e-14


@pytest.mark.parametrize(("shape", "bounds", "row"), CASES)
def test_cvxpy_agrees(shape, bounds, row):
    for seed in range(3):
        arguments, z, weight = problem(shape, bounds, row, seed=seed)
        if row and seed == 2:
            arguments["row"] = arguments["row"] * torch.tensor([1.0, -1.0, 0.0] * (NX // 3))
            arguments["mass"] = torch.tensor([0.3])
        solution = solved(shape, arguments, z, weight)
        expected = oracle(shape, z.numpy(), weight.numpy(), **arguments)
        assert np.abs(solution.value.numpy() - expected).max() < 1e-6
        assert bool(solution.stats.converged)
        assert_feasible(shape, solution.value, arguments)


@pytest.mark.parametrize(("shape", "bounds", "row"), CASES)
def test_values_of_the_kernels_are_those_of_the_closed_form(shape, bounds, row):
    """Gradients are taken of the closed form, values from the kernels."""
    arguments, z, weight = problem(shape, bounds, row, batch=(500,), seed=1)
    z, weight = z.unsqueeze(-2), weight.unsqueeze(-2)
    numbers = [arguments[name] for name in ("amount", "lower", "upper", "mass")]
    profiles = ProfileSet(shape, *numbers, arguments["row"])
    value, pooled, residual = project_points(profiles, z, weight)
    torch.testing.assert_close(_closed_form(profiles, pooled, z), value, rtol=0, atol=1e-13)
    assert float(residual.max()) < 1e-14


@pytest.mark.parametrize("shape", SHAPES)
def test_one_bound_is_enough(shape):
    arguments, z, weight = problem(shape, False, True, seed=3)
    for name, end, far in (("lower", 0.05, 50.0), ("upper", 0.2, -50.0)):
        both = arguments | {"lower": torch.tensor([min(end, far)]), "upper": torch.tensor([max(end, far)])}
        one = solved(shape, arguments | {name: torch.tensor([end])}, z, weight).value
        assert bool((one == end).any())
        torch.testing.assert_close(one, solved(shape, both, z, weight).value, rtol=0, atol=1e-14)


def test_monotone_regression_agrees_with_scipy():
    z, weight = torch.randn(40, 60), torch.exp(2 * torch.randn(40, 60))
    for shape in ("increasing", "decreasing"):
        u = PooledProjector(shape, None, None, None, None, None, Diagonal(weight)).solve(z).value
        for i in range(40):
            expected = isotonic_regression(
                z[i].numpy(), weights=1 / weight[i].numpy(), increasing=shape == "increasing"
            )
            np.testing.assert_allclose(u[i].numpy(), expected.x, rtol=0, atol=1e-13)


def exact_penalty(z, weight, amount):
    """The penalised profile in rational arithmetic, by trying all patterns of jumps."""
    n, z, q, amount = len(z), [Fraction(x) for x in z], [1 / Fraction(w) for w in weight], Fraction(amount)
    for edges in itertools.product((-1, 0, 1), repeat=n - 1):
        u, first, padded = [], 0, (0, *edges, 0)
        for i in range(n):
            if i == n - 1 or edges[i]:
                moment = sum(q[j] * z[j] for j in range(first, i + 1)) - amount * (padded[first] - padded[i + 1])
                u += [moment / sum(q[first : i + 1])] * (i + 1 - first)
                first = i + 1
        duals = list(itertools.accumulate(q[i] * (z[i] - u[i]) for i in range(n - 1)))
        if all(abs(d) <= amount for d in duals) and all((u[i + 1] - u[i]) * edges[i] >= 0 for i in range(n - 1)):
            return np.array([float(x) for x in u])
    raise AssertionError("no pattern is optimal")


def test_weights_may_range_over_twelve_orders_of_magnitude():
    """A dynamic problem that kept slopes would be off by 1e-4 here."""
    generator = np.random.default_rng(0)
    for _ in range(60):
        z, weight = generator.normal(size=5), generator.choice([1e-12, 1e-6, 1.0], size=5)
        weight[generator.integers(5)] = 1.0
        amount = 10 ** generator.uniform(-2, 1) * generator.choice([1.0, 1e6, 1e11])
        arguments = {"amount": torch.tensor(amount), "lower": None, "upper": None, "row": None, "mass": None}
        u = solved("tv-penalty", arguments, torch.tensor(z), torch.tensor(weight)).value
        np.testing.assert_allclose(u.numpy(), exact_penalty(z, weight, amount), rtol=0, atol=1e-14)


def test_groups_of_long_profiles_are_optimal_in_exact_arithmetic():
    """Weights over 1e12 again: the duals of the groups that were result lie within the penalty, rationally."""
    generator = np.random.default_rng(0)
    none, far = np.empty((1, 0)), np.full(1, np.inf)
    for _ in range(40):
        n = 60
        z, weight = generator.normal(size=n).cumsum(), generator.choice([1e-12, 1.0], size=n)
        amount = 10 ** generator.uniform(-2, 1) * generator.choice([1.0, 1e6, 1e11])
        result = pooling.solve(2, z[None], weight[None], np.full(1, amount), -far, far, none, far, far)
        edges = [int(e) for e in result[3][0]]
        scale = Fraction(weight.max())  # as the kernel scales them, so that roundings are the same
        q, z = [Fraction(weight.max() / w) for w in weight], [Fraction(x) for x in z]
        limit, dual, first, values = Fraction(amount) * scale, Fraction(0), 0, []
        for i in range(n):
            if i == n - 1 or edges[i]:
                jumps = (edges[first - 1] if first else 0) - edges[i]
                moment = sum(q[j] * z[j] for j in range(first, i + 1)) - limit * jumps
                values += [moment / sum(q[first : i + 1])] * (i + 1 - first)
                first = i + 1
        for i in range(n - 1):
            dual += q[i] * (z[i] - values[i])
            assert abs(dual) <= limit * (1 + Fraction(1, 10**9))
            assert (values[i + 1] - values[i]) * edges[i] >= 0


def parts(arguments, z, weight):
    """The names and copies of all tensors that take a gradient."""
    names = [name for name in ("amount", "lower", "upper", "mass") if arguments[name] is not None]
    return names, [x.clone().requires_grad_() for x in (z, weight, *(arguments[name] for name in names))]


@pytest.mark.parametrize(("shape", "bounds", "row"), CASES)
def test_gradients_agree_with_finite_differences(shape, bounds, row):
    arguments, z, weight = problem(shape, bounds, row, batch=(3,), seed=13)
    names, tensors = parts(arguments, z, weight)
    seen = set()

    def value(z, weight, *numbers):
        solution = solved(shape, arguments | dict(zip(names, numbers)), z, weight)
        pooled = solution.tangent.pooled
        seen.update(pooled.side.unique().tolist())
        seen.update({"group"} if bool((pooled.first != torch.arange(NX)).any()) else ())
        return solution.value

    assert torch.autograd.gradcheck(value, tensors, eps=1e-7, atol=1e-6, rtol=1e-5)
    assert seen == ({"group", -1, 0, 1} if bounds else {"group", 0})


@pytest.mark.parametrize(("shape", "bounds", "row"), CASES)
def test_tangent_is_the_jacobian_and_its_variances_are_exact(shape, bounds, row):
    arguments, z, weight = problem(shape, bounds, row, batch=(3,), seed=7)
    solution = solved(shape, arguments, z, weight)
    tangent, eye = solution.tangent, torch.eye(NX).unsqueeze(1)
    dense = tangent.apply(eye).movedim(0, -1)  # (3, n, n)
    step = 1e-6
    moved = [solved(shape, arguments, z + sign * step * eye, weight).value for sign in (1, -1)]
    torch.testing.assert_close(dense, ((moved[0] - moved[1]) / (2 * step)).movedim(0, -1), rtol=0, atol=1e-8)
    torch.testing.assert_close(tangent.transpose(eye).movedim(0, -1), dense.mT, rtol=0, atol=1e-14)
    covariances = [
        Diagonal(torch.rand(3, NX)),
        Diagonal(weight),
        LowRank(torch.randn(3, NX, 2), torch.rand(3, NX)),
        Dense(torch.randn(NX, NX).tril()),
    ]
    for cov in covariances:
        expected = (dense @ cov.dense() @ dense.mT).diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(tangent.variance(cov), expected, rtol=1e-11, atol=1e-13)
    assert tangent.shape == z.shape


@pytest.mark.parametrize(("shape", "bounds", "row"), [case for case in CASES if case[1]])
def test_gradients_of_variances(shape, bounds, row):
    arguments, z, weight = problem(shape, bounds, row, seed=9)
    cov = torch.rand(NX)

    def variance(weight, cov):
        return solved(shape, arguments, z, weight).tangent.variance(Diagonal(cov))

    assert torch.autograd.gradcheck(variance, [weight.requires_grad_(), cov.requires_grad_()], atol=1e-7)


def test_what_a_row_fixes_has_no_variance():
    """One free group under a row: the variance is 0, not a difference of roundings."""
    arguments, z, weight = problem("tv-bound", False, True)
    arguments["amount"] = torch.zeros(1)
    tangent = solved("tv-bound", arguments, z, weight).tangent
    assert float(tangent.variance(Diagonal(weight)).abs().max()) == 0


def test_samples_and_slices_are_profiles_of_their_own():
    arguments, _, _ = problem("tv-bound", True, True, batch=(2,))
    arguments["amount"] = torch.tensor([[1.0, 2.0, 3.0], [0.5, 1.5, 2.5]])
    z, weight = torch.randn(4, 2, 3 * NX), torch.exp(torch.randn(2, 3 * NX))
    projector = PooledProjector("tv-bound", weight=Diagonal(weight), slices=3, **arguments)
    solution = projector.solve(z)
    assert solution.value.shape == z.shape
    assert solution.tangent.shape == z.shape
    assert solution.stats.residual.shape == solution.stats.steps.shape == solution.stats.converged.shape == (4, 2)
    one = arguments | {"amount": arguments["amount"][1, 2], "lower": arguments["lower"][1], "upper": torch.tensor(1.1)}
    one["mass"] = arguments["mass"][1]
    alone = solved("tv-bound", one, z[3, 1, 2 * NX :], weight[1, 2 * NX :]).value
    torch.testing.assert_close(solution.value[3, 1, 2 * NX :], alone, rtol=0, atol=0)
    x = torch.randn(5, 4, 2, 3 * NX)
    assert solution.tangent.apply(x).shape == x.shape
    _, mean, scale, _ = projector.moments(z, Diagonal(weight))
    assert mean.shape == scale.shape == z.shape


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nx", [1, 2])
def test_short_profiles(shape, nx):
    for seed in range(4):
        arguments, z, weight = problem(shape, True, True, seed=seed, nx=nx)
        arguments["mass"] = 0.4 * arguments["row"].sum().reshape(1)
        solution = solved(shape, arguments, z, weight)
        expected = oracle(shape, z.numpy(), weight.numpy(), **arguments) if nx > 1 else np.array([0.4])
        np.testing.assert_allclose(solution.value.numpy(), expected, rtol=0, atol=1e-6)
        assert_feasible(shape, solution.value, arguments)


@pytest.mark.parametrize("shape", SHAPES)
def test_feasible_points_stay_where_they_are(shape):
    arguments, _, weight = problem(shape, True, False)
    if shape == "tv-penalty":
        arguments["amount"] = torch.zeros(1)
    z = torch.linspace(-0.5, 0.7, NX) * (-1 if shape == "decreasing" else 1)
    for point in (z, torch.full((NX,), 0.3)):
        assert torch.equal(solved(shape, arguments, point, weight).value, point)


def test_amounts_at_their_ends():
    arguments, z, weight = problem("tv-bound", True, False)
    clipped = z.clamp(-0.8, 1.1)
    arguments["amount"] = variation(clipped).reshape(1)
    assert torch.equal(solved("tv-bound", arguments, z, weight).value, clipped)
    arguments["amount"] = torch.zeros(1)
    u = solved("tv-bound", arguments, z, weight).value
    torch.testing.assert_close(u, ((z / weight).sum() / (1 / weight).sum()).expand(NX), rtol=0, atol=1e-14)
    assert float(variation(u)) == 0
    arguments["amount"] = torch.tensor([1e6])
    penalised = solved("tv-penalty", arguments, z, weight).value
    torch.testing.assert_close(penalised, u, rtol=0, atol=1e-14)


@pytest.mark.parametrize("shape", SHAPES)
def test_sets_of_one_point(shape):
    arguments, z, weight = problem(shape, True, False)
    arguments["lower"] = arguments["upper"] = torch.full((1,), 0.25)
    solution = solved(shape, arguments, z, weight)
    assert torch.equal(solution.value, torch.full((NX,), 0.25))
    assert float(solution.tangent.variance(Diagonal(weight)).abs().max()) == 0
    arguments |= {"row": torch.ones(NX), "mass": torch.full((1,), 0.25 * NX)}
    assert bool(solved(shape, arguments, z, weight).stats.converged)


def test_all_clipped():
    arguments, z, weight = problem("increasing", True, False)
    upper = arguments["upper"].requires_grad_()
    solution = solved("increasing", arguments, z.abs() + 5, weight.requires_grad_())
    assert torch.equal(solution.value.detach(), torch.full((NX,), 1.1))
    (gradient,) = torch.autograd.grad(solution.value.sum(), upper)
    assert float(gradient) == NX


def test_points_without_variance_move_only_if_they_must():
    z, weight = torch.tensor([0.0, 3.0, 1.0, 2.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    weight.requires_grad_()
    u = PooledProjector("increasing", None, None, None, None, None, Diagonal(weight)).solve(z).value
    torch.testing.assert_close(u, torch.tensor([0.0, 3.0, 3.0, 3.0]), rtol=0, atol=1e-11)
    (gradient,) = torch.autograd.grad(u.square().sum(), weight)
    assert bool(gradient.isfinite().all())
    equal = PooledProjector("increasing", None, None, None, None, None, Diagonal(torch.zeros(4))).solve(z).value
    torch.testing.assert_close(equal, torch.tensor([0.0, 2.0, 2.0, 2.0]))


def attainable(shape, row, amount):
    """Ends of ``row . u`` over the set, by linear programming."""
    ends = []
    for turn in (-1, 1):
        u = cp.Variable(len(row))
        constraints = [u >= -0.8, u <= 1.1]
        if shape == "tv-bound":
            constraints.append(cp.norm1(cp.diff(u)) <= amount)
        elif shape != "tv-penalty":
            constraints.append(cp.diff(u) * (1 if shape == "increasing" else -1) >= 0)
        program = cp.Problem(cp.Maximize(turn * row.numpy() @ u), constraints)
        ends.append(turn * program.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11))
    return ends


@pytest.mark.parametrize(
    ("shape", "amount"), [*((s, 0.7) for s in SHAPES), *(("tv-bound", a) for a in (0.0, 2.5, 5.0))]
)
def test_masses_out_of_reach_are_flagged_and_those_in_reach_are_not(shape, amount):
    for row in (torch.tensor([1.0, -1.0, 2.0, 0.5, -2.0, 0.0]), torch.tensor([1.0, 2.0, -3.0, 1.0, -2.0, 1.0])):
        least, most = attainable(shape, row, amount)
        z, weight = torch.randn(6), torch.rand(6) + 0.1
        size = max(abs(least), abs(most), 0.1)
        for mass, possible in ((least, 1), (most, -1)):
            arguments = {"amount": torch.tensor([amount]), "lower": torch.tensor([-0.8]), "upper": torch.tensor([1.1])}
            arguments |= {"row": row, "mass": torch.tensor([mass - possible * 1e-3 * size])}
            stats = solved(shape, arguments, z, weight).stats
            assert not bool(stats.converged)
            assert 1e-5 < float(stats.residual) < 1
            if most - least > 1e-6:
                arguments["mass"] = torch.tensor([mass + possible * 1e-3 * (most - least)])
                solution = solved(shape, arguments, z, weight)
                assert bool(solution.stats.converged)
                assert_feasible(shape, solution.value, arguments)


def test_a_mass_at_its_limit_gives_the_vertex():
    row, z, weight = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.1, 0.2, 0.3]), torch.ones(3)
    for excess, good in ((0.0, True), (1e-13, True), (1e-9, False)):
        arguments = {"amount": torch.zeros(1), "lower": torch.zeros(1), "upper": torch.ones(1), "row": row}
        arguments["mass"] = torch.tensor([3.0 * (1 + excess)])
        solution = solved("tv-penalty", arguments, z, weight)
        torch.testing.assert_close(solution.value, torch.tensor([1.0, 0.2, 1.0]), rtol=0, atol=1e-15)
        assert bool(solution.stats.converged) is good
    single = {name: x.float() for name, x in arguments.items()} | {"mass": torch.tensor([3.0000005])}
    assert bool(solved("tv-penalty", single, z.float(), weight.float()).stats.converged)


def test_a_row_without_bounds_may_be_out_of_reach_of_monotone_profiles():
    arguments = {"amount": None, "lower": None, "upper": None, "row": torch.tensor([1.0, 0.0, -1.0])}
    for mass, good in ((-1.0, True), (0.0, True), (1.0, False)):
        stats = solved("increasing", arguments | {"mass": torch.tensor([mass])}, torch.randn(3), torch.ones(3)).stats
        assert bool(stats.converged) is good


@pytest.mark.parametrize(("shape", "bounds", "row"), CASES)
def test_single_precision_is_solved_in_double_and_stays_within_its_bounds(shape, bounds, row):
    arguments, z, weight = problem(shape, bounds, row, batch=(50,))
    double = solved(shape, arguments, z, weight).value
    single = {name: None if x is None else x.float() for name, x in arguments.items()}
    solution = solved(shape, single, z.float(), weight.float())
    assert solution.value.dtype == solution.stats.residual.dtype == torch.float32
    assert bool(solution.stats.converged.all())
    torch.testing.assert_close(solution.value.double(), double, rtol=0, atol=1e-5)
    if bounds:
        assert bool(((solution.value >= single["lower"]) & (solution.value <= single["upper"])).all())
    if shape == "increasing":
        assert bool((solution.value.diff(dim=-1) >= 0).all())
    assert solution.tangent.apply(z.float()).dtype == torch.float32
    assert solution.tangent.variance(Diagonal(weight.float())).dtype == torch.float32


def test_kernels_give_the_same_numbers_without_numba(monkeypatch):
    monkeypatch.setattr(jit, "AVAILABLE", False)
    for name in ("unbounded", "capacity", "duals", "pooling", "phases"):
        monkeypatch.setattr(solvers, name, getattr(solvers, name))  # imported anew, and put back afterwards
        monkeypatch.delitem(sys.modules, f"probhard.solvers.profiles.{name}")
    plain = importlib.import_module("probhard.solvers.profiles.pooling")
    other = importlib.import_module("probhard.solvers.profiles.phases")
    for function in (plain.solve, plain.balance, plain.attainable, other.solve):
        assert not hasattr(function, "py_func")  # as a compiled function has
    generator = np.random.default_rng(0)
    z, weight, row = generator.normal(size=(6, 9)), generator.uniform(0.1, 1, (6, 9)), generator.normal(size=(6, 9))
    amount, mass = np.full(6, 1.2), generator.normal(size=6)
    for kind, line in itertools.product(range(4), (np.empty((6, 0)), row)):
        arguments = (kind, z, weight, amount, np.full(6, -0.7), np.full(6, 0.9), line, mass, mass + 0.2)
        for ours, theirs in zip(pooling.solve(*arguments), plain.solve(*arguments)):
            np.testing.assert_array_equal(ours, theirs)
    zeros = np.arange(6) > 0
    for kind, line in itertools.product(range(2), (np.empty((6, 0)), np.abs(row))):
        limits = (np.full(6, 0.2), np.full(6, 0.9), np.abs(mass), np.abs(mass))
        arguments = (kind, z, weight, line, limits, zeros, 1e-12)
        for ours, theirs in zip(phases.solve(*arguments), other.solve(*arguments)):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_not_one_of_many_random_profiles_is_infeasible(shape):
    """25,000 per shape: weights over 1e6, points up to 1e6 from the bounds, signed rows, an offset of 100."""
    count, nx = 25_000, 10
    generator = torch.Generator().manual_seed(SHAPES.index(shape))

    def uniform(*size):
        return torch.rand(*size, generator=generator)

    offset = 100 * (uniform(count, 1) < 0.2)
    z = offset + torch.randn(count, nx, generator=generator) * 10 ** (6 * uniform(count, 1))
    lower = offset - uniform(count, 1)
    upper, amount = lower + 2 * uniform(count, 1), 2 * uniform(count, 1)
    inside = (lower + (upper - lower) * uniform(count, nx)).sort(-1, descending=shape == "decreasing").values
    if shape == "tv-bound":
        shrink = (amount / variation(inside).unsqueeze(-1)).clamp(max=0.99)
        inside = inside.mean(-1, keepdim=True) + (inside - inside.mean(-1, keepdim=True)) * shrink
    row = torch.randn(count, nx, generator=generator) * (uniform(count, nx) < 0.8)
    row[:, 0] += row[:, 0] == 0
    arguments = {"amount": amount, "lower": lower, "upper": upper, "row": row}
    arguments["mass"] = (row * inside).sum(-1, keepdim=True)
    begin = time.perf_counter()
    solution = solved(shape, arguments, z, 10 ** (-6 * uniform(count, nx)))
    print(f"\n{shape}: {count} profiles of {nx} points in {time.perf_counter() - begin:.2f} s")
    assert bool(solution.stats.converged.all())
    assert_feasible(shape, solution.value, arguments)


def test_small_amounts_of_variation_hold_as_the_numbers_add_up():
    """Where the amount is a few thousand units of rounding of the values."""
    z, weight, amount = 1e3 + torch.randn(2000, NX), torch.rand(2000, NX) + 0.1, 10 ** (-10 * torch.rand(2000, 1))
    u = PooledProjector("tv-bound", amount, None, None, None, None, Diagonal(weight)).solve(z).value
    assert bool((variation(u) <= amount.squeeze(-1) * (1 + 1e-12)).all())
    assert bool((variation(u) >= 0.9 * amount.squeeze(-1) - 1e-10).all())


def test_values_that_are_not_numbers_are_flagged():
    arguments, z, weight = problem("tv-bound", True, True)
    z[3] = torch.nan
    assert not bool(solved("tv-bound", arguments, z, weight).stats.converged)


def test_bad_arguments_are_explained():
    weight = Diagonal(torch.ones(6))
    with pytest.raises(ParameterError, match="is not known"):
        PooledProjector("convex", None, None, None, None, None, weight)
    with pytest.raises(ParameterError, match="needs its amount"):
        PooledProjector("tv-bound", None, None, None, None, None, weight)
    with pytest.raises(ParameterError, match="a row needs its mass"):
        PooledProjector("increasing", None, None, None, torch.ones(6), None, weight)
    with pytest.raises(ShapeError, match="4 profiles"):
        PooledProjector("increasing", None, None, None, None, None, weight, slices=4)
    with pytest.raises(ShapeError, match="2 x 4"):
        DiminishingProjector((2, 4), None, None, weight)


def field(seed, batch=(), times=5):
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch, times, NX)
    z = torch.randn(shape, generator=generator) * torch.tensor([0.6, 1.5, 0.15, 1.0, 2.0]).unsqueeze(-1)[:times]
    return z.flatten(-2), torch.exp(0.5 * torch.randn(shape, generator=generator)).flatten(-2)


@pytest.mark.parametrize("bounds", [None, (-0.6, 0.9)])
def test_variation_diminishes(bounds):
    z, weight = field(0, batch=(200,))
    lower, upper = (None, None) if bounds is None else (torch.tensor(b) for b in bounds)
    solution = DiminishingProjector((5, NX), lower, upper, Diagonal(weight)).solve(z)
    u = solution.value.unflatten(-1, (5, NX))
    assert bool((variation(u)[:, 1:] <= variation(u)[:, :-1] * (1 + 1e-12)).all())
    first = z[:, :NX] if bounds is None else z[:, :NX].clamp(*bounds)
    assert torch.equal(u[:, 0], first)
    assert bool(solution.stats.converged.all())
    for i, t in itertools.product(range(2), range(1, 5)):
        parts = (x[i].unflatten(0, (5, NX))[t].numpy() for x in (z, weight))
        expected = oracle("tv-bound", *parts, variation(u[i, t - 1]), lower, upper, None, None)
        np.testing.assert_allclose(u[i, t].numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bounds", [None, (-0.6, 0.9)])
def test_gradients_and_moments_of_diminishing_fields(bounds):
    z, weight = field(1, batch=(1,), times=4)
    lower, upper = (None, None) if bounds is None else (torch.tensor(b) for b in bounds)

    def value(z, weight, *ends):
        low, high = ends if ends else (lower, upper)
        return DiminishingProjector((4, NX), low, high, Diagonal(weight)).solve(z).value

    ends = [] if bounds is None else [x.clone().requires_grad_() for x in (lower, upper)]
    assert torch.autograd.gradcheck(value, [z.requires_grad_(), weight.requires_grad_(), *ends], eps=1e-7, atol=1e-6)
    z, weight = z.detach(), weight.detach()
    projector = DiminishingProjector((4, NX), lower, upper, Diagonal(weight))
    tangent, eye, step = projector.solve(z).tangent, torch.eye(4 * NX).unsqueeze(1), 1e-6
    dense = tangent.apply(eye).movedim(0, -1)
    differences = (projector.solve(z + step * eye).value - projector.solve(z - step * eye).value) / (2 * step)
    torch.testing.assert_close(dense, differences.movedim(0, -1), rtol=0, atol=1e-8)
    torch.testing.assert_close(tangent.transpose(eye).movedim(0, -1), dense.mT, rtol=0, atol=1e-13)
    depends = [bool((dense[0, t * NX :, (t - 1) * NX : t * NX] != 0).any()) for t in (1, 3)]
    assert depends == [True, True]  # the third slice has room of its own and sets the amount of the fourth
    assert bool((dense[0, 2 * NX : 3 * NX, : 2 * NX] == 0).all())
    for cov in (Diagonal(torch.rand(4 * NX)), LowRank(torch.randn(4 * NX, 3), torch.rand(4 * NX))):
        expected = (dense @ cov.dense() @ dense.mT).diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(tangent.variance(cov), expected, rtol=1e-10, atol=1e-12)
    _, mean, scale, _ = projector.moments(z, Diagonal(weight))
    assert mean.shape == scale.shape == z.shape


def test_diminishing_fields_of_one_value_stay_so():
    z, weight = field(2)
    z[:NX] = 0.5
    u = DiminishingProjector((5, NX), None, None, Diagonal(weight)).solve(z).value.unflatten(-1, (5, NX))
    assert float(variation(u).max()) == 0
    low = DiminishingProjector((5, NX), torch.tensor(-0.1), torch.tensor(0.1), Diagonal(weight.float())).solve(
        z.float()
    )
    assert low.value.dtype == torch.float32
    assert bool((low.value.abs() <= torch.tensor(0.1)).all())
