"""Pooled projections at their limits: short profiles, single points, masses out of reach, float32, bad input."""

from __future__ import annotations

import importlib
import itertools
import sys
import time

import cvxpy as cp
import numpy as np
import pytest
import torch

from probhard._util import jit
from probhard.errors import ParameterError, ShapeError
from probhard.laws.covariance import Diagonal
from probhard.projection.diminishing import DiminishingProjector
from probhard.projection.profiles import SHAPES, PooledProjector, ProfileSet
from probhard.solvers import profiles as solvers
from probhard.solvers.profiles import phases, pooling
from projection.profile_cases import CASES, NX, assert_feasible, oracle, problem, solved, variation


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
    u = PooledProjector(ProfileSet("increasing"), Diagonal(weight)).solve(z).value
    torch.testing.assert_close(u, torch.tensor([0.0, 3.0, 3.0, 3.0]), rtol=0, atol=1e-11)
    (gradient,) = torch.autograd.grad(u.square().sum(), weight)
    assert bool(gradient.isfinite().all())
    equal = PooledProjector(ProfileSet("increasing"), Diagonal(torch.zeros(4))).solve(z).value
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
    u = PooledProjector(ProfileSet("tv-bound", amount), Diagonal(weight)).solve(z).value
    assert bool((variation(u) <= amount.squeeze(-1) * (1 + 1e-12)).all())
    assert bool((variation(u) >= 0.9 * amount.squeeze(-1) - 1e-10).all())


def test_values_that_are_not_numbers_are_flagged():
    arguments, z, weight = problem("tv-bound", True, True)
    z[3] = torch.nan
    assert not bool(solved("tv-bound", arguments, z, weight).stats.converged)


def test_bad_arguments_are_explained():
    weight = Diagonal(torch.ones(6))
    with pytest.raises(ParameterError, match="is not known"):
        PooledProjector(ProfileSet("convex"), weight)
    with pytest.raises(ParameterError, match="needs its amount"):
        PooledProjector(ProfileSet("tv-bound"), weight)
    with pytest.raises(ParameterError, match="a row needs its mass"):
        PooledProjector(ProfileSet("increasing", row=torch.ones(6)), weight)
    with pytest.raises(ShapeError, match="4 profiles"):
        PooledProjector(ProfileSet("increasing"), weight, slices=4)
    with pytest.raises(ShapeError, match="2 x 4"):
        DiminishingProjector((2, 4), None, None, weight)
