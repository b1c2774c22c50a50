"""Pooled projections (monotone, total variation) against cvxpy, scipy, exact arithmetic and finite differences."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.optimize import isotonic_regression

from probhard.laws.covariance import Dense, Diagonal, LowRank
from probhard.projection.profiles import SHAPES, PooledProjector, ProfileSet, _closed_form, project_points
from probhard.solvers.profiles import pooling
from projection.profile_cases import CASES, NX, assert_feasible, oracle, problem, solved


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
        u = PooledProjector(ProfileSet(shape), Diagonal(weight)).solve(z).value
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
    projector = PooledProjector(ProfileSet("tv-bound", **arguments), Diagonal(weight), slices=3)
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
