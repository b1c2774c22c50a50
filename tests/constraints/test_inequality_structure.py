"""Inequalities: rows as bounds, joins, violations, and methods that use them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import probhard as ph
from constraints.inequalities import built, each_set, normal, spread
from probhard.projection.lifting import lift
from probhard.projection.parts import parts_of
from probhard.rows.disjoint import DisjointRows
from sets import BATCH, INF, TREE


def test_rows_of_one_variable_are_bounds():
    rows = torch.tensor([[2.0, 0, 0], [0, -1, 0], [0, 0, 1], [1, 0, 0]])
    resolved = ph.LinearInequality(rows, torch.tensor([4.0, 1.0, 3.0, 1.0])).resolve(3)
    assert isinstance(resolved, ph.Box)
    torch.testing.assert_close(resolved.lower, torch.tensor([-INF, -1.0, -INF]))
    torch.testing.assert_close(resolved.upper, torch.tensor([1.0, INF, 3.0]))


def test_bounds_and_rows_are_told_apart():
    rows = torch.tensor([[2.0, 0, 0], [1, 1, 1]])
    resolved = ph.LinearInequality(rows, torch.tensor([[4.0, 1.0], [2.0, 1.0]])).resolve(3)
    parts = {type(part) for part in resolved.parts()}
    assert parts == {ph.Box, ph.LinearInequality}
    torch.testing.assert_close(resolved.parts()[0].upper, torch.tensor([[2.0, INF, INF], [1.0, INF, INF]]))


@pytest.mark.parametrize("order", ["in order", "shuffled", "scaled"])
@pytest.mark.parametrize("direction", ["increasing", "decreasing"])
def test_difference_rows_are_monotone(direction, order):
    rows = torch.eye(6)[:-1] - torch.eye(6)[1:]
    rows = rows if direction == "increasing" else -rows
    if order == "shuffled":
        rows = rows[[3, 0, 4, 2, 1]]
    elif order == "scaled":
        rows = rows * torch.arange(1.0, 6)[:, None]
    resolved = ph.LinearInequality(rows, 0.0).resolve(6)
    assert isinstance(resolved, ph.Monotone)
    assert resolved.direction == direction
    z = normal(2, 10, 6)
    expected = ph.DPPL("orthogonal").project(z, ph.Monotone(direction)).value
    torch.testing.assert_close(ph.DPPL("orthogonal").project(z, ph.LinearInequality(rows)).value, expected)


@pytest.mark.parametrize("change", ["right side", "mixed", "gap", "more"])
def test_other_rows_stay_rows(change):
    rows, d = torch.eye(6)[:-1] - torch.eye(6)[1:], torch.zeros(5)
    if change == "right side":
        d[2] = 0.1
    elif change == "mixed":
        rows[2] = -rows[2]
    elif change == "gap":
        rows, d = rows[:-1], d[:-1]
    else:
        rows, d = torch.cat([rows, torch.ones(1, 6)]), torch.zeros(6)
    assert isinstance(ph.LinearInequality(rows, d).resolve(6), ph.LinearInequality)


def test_one_row_is_searched_along():
    for constraint in (ph.LinearEquality(torch.ones(1, 6), 1.0) & ph.NonNegative(), ph.Simplex()):
        assert isinstance(lift(parts_of(constraint, 6)).system.core, DisjointRows)
    resolved = ph.Simplex(2.0).resolve(4)
    assert [type(part) for part in resolved.parts()] == [ph.Conservation, ph.NonNegative]


def test_boxes_tighten():
    tightened = ph.Box(0.0, torch.tensor([1.0, 2.0, 3.0])) & ph.Box(torch.tensor([-1.0, 0.5, 0.5]), 2.0)
    assert isinstance(tightened, ph.Box)
    torch.testing.assert_close(tightened.lower, torch.tensor([0.0, 0.5, 0.5]))
    torch.testing.assert_close(tightened.upper, torch.tensor([1.0, 2.0, 2.0]))
    with pytest.raises(TypeError):
        ph.NonNegative() & 3


@each_set
def test_representation_and_dtype(name):
    entry, constraint = built(name)
    words = repr(constraint)
    assert re.match(r"[A-Z]\w+\(", words)
    assert constraint.algorithm
    single = constraint.to(torch.float32)
    assert type(single) is type(constraint)
    u = spread(entry)
    torch.testing.assert_close(single.violation(u), constraint.violation(u), rtol=1e-5, atol=1e-5)


@each_set
def test_violation_and_penalty_agree_with_rows_and_bounds(name):
    entry, constraint = built(name)
    u = spread(entry).requires_grad_()
    excesses = torch.stack([entry.excesses(u[:, k], k) for k in range(BATCH)], 1)  # (3, BATCH, q)
    violation, penalty = constraint.violation(u), constraint.penalty(u)
    assert violation.shape == penalty.shape == (3, BATCH)
    torch.testing.assert_close(violation > 0, excesses.abs().amax(-1) > 0)
    if not isinstance(getattr(constraint, "linear", None), ph.Hierarchy) and name not in ("fixed nodes", "smooth"):
        torch.testing.assert_close(violation, excesses.abs().amax(-1))
    (slope,) = torch.autograd.grad(penalty.sum(), u, allow_unused=not entry.projection)
    assert slope is None or slope.isfinite().all()
    feasible = ph.DPPL("orthogonal").project(u.detach(), constraint).value
    assert constraint.penalty(feasible).max() < 1e-12
    assert (penalty[violation > 0] > 0).all()


@each_set
def test_quantiles_of_draws_stay_within_bounds(name):
    entry, constraint = built(name)
    law = (entry.loc + normal(4, BATCH, entry.n), torch.ones(BATCH, entry.n))
    draws = ph.DPPL(covariance="delta")(law, constraint).sample((60,), torch.Generator().manual_seed(1))
    quantiles = ph.sample_quantiles(draws, (0.05, 0.5, 0.95))
    assert entry.outside(quantiles) == 0
    if entry.G is not None and "creasing" in name:  # order survives in marginal quantiles
        rows = torch.from_numpy(entry.data("G", 0)[entry.data("d", 0) == 0])
        assert (quantiles @ rows.T).max() <= 1e-12


def test_constraint_error_counts_inequalities():
    constraint = ph.Conservation(torch.ones(2), 1.0) & ph.NonNegative()
    u = torch.tensor([[1.5, -0.5], [0.5, 0.5]])
    error = ph.constraint_error(constraint, u)
    assert float(error.largest) == 0.5
    assert float(error.mean) == 0.25
    assert float(error.mean_square) == 0.125
    assert float(ph.constraint_error(ph.NonNegative(), u).mean) == 0.25


METHODS = ["softc", "hardc", "probhard-ob", "probhard-or", "probhard-inf", "probconserv", "hier-e2e"]


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 14)

    def forward(self, x):
        mean, raw = self.linear(x).chunk(2, -1)
        return mean, nn.functional.softplus(raw) + 0.1


@pytest.mark.parametrize("method", METHODS)
def test_methods_run_on_a_hierarchy_of_non_negative_series(method):
    constraint = ph.Hierarchy(TREE) & ph.NonNegative()
    model = ph.ConstrainedModel(Backbone(), constraint, method)
    x = normal(1, 4, 3)
    bottom = torch.rand(4, 4)
    y = bottom @ torch.from_numpy(TREE).T
    loss = model.loss((x, y))
    loss.backward()
    assert loss.isfinite()
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().sum() > 0
    forecast, draws = model.forecast((x, y)), model.sample((x, y), 50)
    assert draws.shape == (50, 4, 7)
    assert ph.crps(forecast, y).isfinite().all()
    if method in ("probhard-ob", "probhard-or", "probhard-inf", "hier-e2e"):
        assert forecast.feasible
        assert (draws >= 0).all()
        assert constraint.violation(draws).max() < 1e-9
        assert (forecast.mean >= 0).all()
        assert ph.constraint_error(constraint, forecast).largest < 1e-9
    elif method == "hardc":
        assert ph.constraint_error(constraint, forecast).largest < 1e-9
        assert not forecast.feasible
    elif method == "probconserv":
        assert ph.constraint_error(constraint.linear_part(), draws).largest < 1e-9
        assert (draws < 0).any()
    else:
        assert constraint.violation(draws).max() > 0.1
