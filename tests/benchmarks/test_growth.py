"""The growth, million-series and bandwidth benchmarks in small sizes, and what they made faster."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import probhard as ph
from probhard._util import jit
from probhard.rows.elimination import Numbering, pairs_within, plan_elimination
from probhard.solvers import active_set, forest
from probhard.solvers.quadratic import QuadraticProblem

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.hierarchies import tree

from benchmarks import bandwidth, growth, growth_cases, growth_report, million


@pytest.mark.parametrize("slope", [0.0, 1.0, 2.0])
def test_exponents_are_those_of_powers_with_a_fixed_cost(slope):
    sizes = [10**k for k in range(7)]
    seconds = [3e-6 * size**slope for size in sizes]
    assert growth_report.exponent(sizes, seconds) == pytest.approx(slope, abs=1e-9)
    crooked = [1.0 if size < 10**4 else time for size, time in zip(sizes, seconds)]
    assert growth_report.exponent(sizes, crooked) == pytest.approx(slope, abs=1e-9)  # only the upper two decades count
    assert math.isnan(growth_report.exponent(sizes[:2], seconds[:2]))


def test_table_and_plot_tell_what_grows_too_fast(tmp_path):
    lines = [
        {**growth.Point("tree, oblique", "n", n, n**power * 1e-7, n**power * 1e-7, 8, 0.0, 1.0).record(), "case": case}
        for case, power in (("tree, oblique", 1.0), ("one mass row, oblique", 1.5))
        for n in (100, 1000, 10_000)
    ]
    rows = {line.split(" | ")[0].strip("| "): line for line in growth_report.render(lines).splitlines() if "|" in line}
    assert "| 1.00 |" in rows["tree, oblique"]
    assert "in order; stopped" in rows["tree, oblique"]
    assert "| 1.50 |" in rows["one mass row, oblique"]
    assert "above 1" in rows["one mass row, oblique"]
    growth_report.plot(lines, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("case", growth_cases.cases(quick=True), ids=lambda case: f"{case.name}-{case.axis}")
def test_every_case_runs_and_is_feasible(case):
    found = growth.measure(case, case.sizes[-1] if case.axis == "batch" else case.sizes[0], seconds=0.0)
    assert found.violation < 1e-12
    assert min(found.seconds, found.seconds_backward) > 0


def test_million_in_small():
    found = list(million.run(quick=True))
    assert [step.count for step in found] == [1, 1, 20, 1, 1, 5]
    assert all(step.violation < 1e-12 and step.seconds > 0 for step in found)


@pytest.mark.parametrize("fault", ["incoherent", "negative", "missing"])
def test_the_checker_catches_an_infeasible_draw(fault):
    hierarchy = growth_cases.tens(100)
    draws = hierarchy.aggregate(torch.rand(3, 100))
    assert million.check(hierarchy.summation, draws) < 1e-12
    if fault == "incoherent":
        draws[1, 4] *= 1 + 1e-11
    elif fault == "negative":
        draws = hierarchy.aggregate(draws[:, -100:].index_fill(1, torch.tensor([7]), -1e-9))
    else:
        draws[2, 50] = torch.nan
    with pytest.raises(ph.ConvergenceError, match="draw is incoherent"):
        million.check(hierarchy.summation, draws)


def test_bandwidth_in_small():
    found = list(bandwidth.run(quick=True))
    assert {step.dtype for step in found} == {"float32", "float64"}
    assert all(step.factor > 0 and step.bandwidth > 0 for step in found)


def test_pairs_and_numbers():
    first, second = pairs_within(np.array([2, 0, 3]))
    assert list(zip(first, second)) == [(0, 0), (1, 0), (1, 1), (2, 2), (3, 2), (3, 3), (4, 2), (4, 3), (4, 4)]
    numbers = Numbering(np.array([5, 0, 3]), np.array([1, 0, 3]), 6)
    assert numbers.of(np.array([1, 3, 0]), np.array([5, 3, 0])).tolist() == [0, 2, 1]
    assert numbers.within(Numbering(np.array([3, 1]), np.array([3, 5]), 6)).tolist() == [1, -1, 0]


def test_columns_of_a_large_graph_hold_its_fill():
    """Above 2,048 rows the first rounds are shared: every entry of the Cholesky factor must be there."""
    rng = np.random.default_rng(0)
    rows, size = 2100, 2600
    columns = np.concatenate([np.arange(size), rng.integers(0, size, 400)])
    at = np.concatenate([np.arange(size) % rows, rng.integers(0, rows, 400)])
    matrix = sp.csr_array((np.ones(len(at)), (at, columns)), shape=(rows, size))
    matrix.data[:] = rng.standard_normal(matrix.nnz)
    plan = plan_elimination(matrix)
    assert plan.early > 0
    order = plan.columns.row[plan.columns.start[:-1]]
    assert sorted(order) == list(range(rows))
    permuted = matrix.toarray()[order]
    pivot, other = np.nonzero(np.tril(np.abs(np.linalg.cholesky(permuted @ permuted.T)) > 1e-12).T)
    column = np.repeat(order, np.diff(plan.columns.start))
    there = set(zip(column.tolist(), plan.columns.row.tolist()))
    assert {(int(order[p]), int(order[j])) for p, j in zip(pivot, other)} <= there


@pytest.mark.skipif(not jit.AVAILABLE, reason="numba is not installed")
@pytest.mark.parametrize("fan_out", [(2, 2), (2, 3, 4), (1, 4, 1, 2)])
def test_forest_steps_are_those_of_active_sets(fan_out, monkeypatch):
    """Bounds above and below, of width 0 too, a certain variable, and a bound that the elements share."""
    hierarchy = tree(fan_out)
    core, n, count = hierarchy.system.core, hierarchy.variables, 40
    truth = hierarchy.aggregate(torch.rand(count, hierarchy.bottoms))
    upper = truth + torch.rand(count, n)
    upper[:, -1] = truth[:, -1] = torch.where(torch.arange(count) % 4 == 0, 0.0, truth[:, -1])
    truth = hierarchy.aggregate(truth[:, -hierarchy.bottoms :])
    centre, weight = truth + 0.2 * torch.randn(count, n), torch.rand(count, n) + 0.1
    centre[:, -2], weight[:, -2] = truth[:, -2], 0.0
    lower, natural = torch.zeros(n).expand(count, n), weight.clamp(min=1e-12)
    problem = QuadraticProblem(core, torch.zeros(count, core.row_count), centre, weight, natural, lower, upper)
    assert forest.suits(problem)
    side = torch.zeros(count, n, dtype=torch.int8)
    found = active_set._iterate(problem, side, 12)
    monkeypatch.setattr(forest, "suits", lambda _: False)
    expected = active_set._iterate(problem, side, 12)
    assert torch.equal(found.done, expected.done)
    assert found.done.sum() > count // 4
    assert (found.side[found.done] != 0).any()
    assert torch.equal(found.side[found.done], expected.side[found.done])
    assert torch.equal(found.steps, expected.steps)
    movable = ((found.side == 0) & (weight > 0)).double() @ core.dense().abs().mT  # else multipliers are rounding
    sure = found.done & (movable > 0).all(-1)
    assert sure.sum() > count // 8
    for name in ("value", "multiplier"):
        torch.testing.assert_close(getattr(found, name)[sure], getattr(expected, name)[sure])
