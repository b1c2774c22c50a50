"""The rule "mean-field": against closed forms, projected draws and finite differences."""

import math

import pytest
import torch

import probhard as ph
from probhard.laws import mean_field as cavity
from probhard.laws.family import LAPLACE, NORMAL
from probhard.laws.marginals import CensoredMarginals
from probhard.laws.mean_field import Rows, mean_field
from projection.moments import check_better

INF = math.inf


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(seed, n, count):
    return normal(seed, count, n)


def flow(n=8, seed=3):
    """A balance, line limits on both sides, and a box."""
    lines = rows(seed, n, 4) / n**0.5
    middle = torch.full((n,), 0.5, dtype=torch.float64)
    limits = ph.LinearInequality(torch.cat([lines, -lines]), torch.cat([lines @ middle, -lines @ middle]) + 0.1)
    return ph.LinearEquality(torch.ones(1, n, dtype=torch.float64), middle.sum()[None]) & limits & ph.Box(0.0, 1.0)


SETS = {  # constraint, mean, sd
    "simplex, inside": (ph.Simplex(), torch.full((10,), 0.1), 0.1),
    "simplex, vertex": (ph.Simplex(), torch.eye(10)[0], 0.3),
    "flow": (flow(), torch.full((8,), 0.5) + 0.2 * normal(1, 8), 0.2),
    "rows": (ph.LinearInequality(rows(4, 6, 12), torch.ones(12)), normal(5, 6), 0.5),
    "monotone": (ph.Monotone(), torch.linspace(0, 1, 8), 0.3),
}


def exact(law, count=20_000):
    with torch.no_grad():
        return law.sample((count,), torch.Generator().manual_seed(0))


@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("name", SETS)
def test_moments_and_scores_are_better_than_those_of_a_hundred_draws(name, metric):
    constraint, mean, sd = SETS[name]
    mean = mean.double()
    stddev = sd * (0.5 + torch.rand(mean.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    law = ph.DPPL(metric, covariance="mean-field")((mean, stddev), constraint)
    drawn = ph.DPPL(metric, covariance="monte-carlo")((mean, stddev), constraint)
    check_better(law, drawn, exact(law), spread=0.2)  # the worst: a vertex, and a metric far from the covariance
    assert float(constraint.violation(law.mean)) < 1e-12


def test_one_row_is_exact():
    row = torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64)
    mean, stddev = normal(1, 3), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    law = ph.DPPL(covariance="mean-field")((mean, stddev), ph.LinearInequality(row, torch.tensor([0.3])))
    value, spread = row @ mean, (row.square() @ stddev.square()).sqrt()
    over = CensoredMarginals(value, spread, NORMAL, torch.tensor([0.3], dtype=torch.float64))  # max(v, d)
    direction = stddev.square() * row[0] / spread.square()
    torch.testing.assert_close(law.marginals.mean, mean - direction * (over.mean - 0.3), rtol=1e-6, atol=1e-6)
    below = CensoredMarginals(value, spread, NORMAL, upper=torch.tensor([0.3], dtype=torch.float64))
    other = stddev.square() - direction.square() * (spread.square() - below.variance)
    torch.testing.assert_close(law.marginals.variance, other, rtol=1e-5, atol=1e-6)


def test_unrelated_bounds_are_clipped_marginals():
    """A balance of two variables leaves the others alone."""
    balance = ph.LinearEquality(torch.tensor([[1.0, 1.0, 0.0, 0.0]]), torch.tensor([0.0]))
    mean, stddev = torch.tensor([3.0, -3.0, 0.2, -0.3]).double(), torch.tensor([0.1, 0.1, 0.5, 1.0]).double()
    bounds = ph.Box(torch.tensor([-INF, -INF, 0.0, 0.0]), INF)
    law = ph.DPPL(covariance="mean-field")((mean, stddev), balance & bounds)
    plain = CensoredMarginals(mean[2:], stddev[2:], NORMAL, 0.0)
    torch.testing.assert_close(law.marginals.mean[2:], plain.mean)
    torch.testing.assert_close(law.marginals.variance[2:], plain.variance)


@pytest.mark.parametrize("name", SETS)
def test_gradients_are_those_of_finite_differences(name, monkeypatch):
    monkeypatch.setattr(cavity, "CLOSE", 1e-10)
    constraint, mean, sd = SETS[name]
    target = mean.double() + 0.1

    def loss(shift):
        law = ph.DPPL(covariance="mean-field")(
            (
                mean.double() + shift[0] * torch.linspace(-1, 1, len(mean)),
                sd * (1 + shift[1]) * torch.ones(len(mean)).double(),
            ),
            constraint,
        )
        return ph.crps(law, target).sum()

    at = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(at), at)
    for i in range(2):
        step = torch.zeros(2, dtype=torch.float64)
        step[i] = 1e-5
        with torch.no_grad():
            numeric = float(loss(step) - loss(-step)) / 2e-5
        assert float(gradient[i]) == pytest.approx(numeric, rel=2e-3, abs=1e-6)


def test_a_mean_outside_with_its_target_inside_has_gradients():
    row, limit = torch.ones(1, 4, dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    mean = torch.full((4,), 0.5, dtype=torch.float64, requires_grad=True)
    stddev = torch.full((4,), 0.3, dtype=torch.float64, requires_grad=True)
    law = ph.DPPL()((mean, stddev), ph.LinearInequality(row, limit) & ph.Box(0.0, 1.0))
    ph.crps(law, torch.full((4,), 0.1, dtype=torch.float64)).sum().backward()
    assert (mean.grad > 0).all()
    assert (stddev.grad.abs() > 1e-3).all()


def test_compiled_and_plain_iterations_agree(monkeypatch):
    a = normal(7, 3, 5, 5)
    gram, loc = a @ a.mT / 5 + 0.1 * torch.eye(5), normal(8, 3, 5)
    problem = Rows(loc, gram, torch.full((3, 5), -INF), torch.zeros(3, 5), 0.5 * gram)
    problem = problem.map(lambda x: x.double())
    first = mean_field(problem, NORMAL)
    monkeypatch.setattr(cavity, "AVAILABLE", False)
    second = mean_field(problem, NORMAL)
    for name in ("loc", "scale"):
        found = []
        for fields in (first, second):
            whole = torch.full((3, 6), math.nan, dtype=torch.float64)
            at = torch.where(fields.used, fields.index, 5)
            found.append(whole.scatter(-1, at, getattr(fields, name))[:, :5])
        both = ~(found[0] + found[1]).isnan()
        assert both.sum() > 5
        torch.testing.assert_close(found[0][both], found[1][both], rtol=1e-3, atol=1e-3)


def test_other_families():
    law = ph.LocationScale(torch.eye(5)[0].double(), ph.Diagonal(torch.full((5,), 0.04).double()), LAPLACE)
    projected = ph.DPPL(covariance="mean-field")(law, ph.Simplex())
    draws = exact(projected)
    torch.testing.assert_close(projected.marginals.mean, draws.mean(0), atol=0.03 * 0.2, rtol=0.05)
    torch.testing.assert_close(projected.marginals.stddev, draws.std(0), atol=0.02, rtol=0.2)


@pytest.mark.parametrize("distance", [1e1, 1e2, 1e3])
def test_far_means_end_where_their_projection_is(distance):
    constraint = ph.LinearInequality(rows(5, 5, 60), torch.ones(60, dtype=torch.float64))
    law = (distance * 3 * normal(6, 5), torch.full((5,), 0.3, dtype=torch.float64))
    ours, delta = (ph.DPPL(covariance=rule)(law, constraint) for rule in ("mean-field", "delta"))
    torch.testing.assert_close(ours.marginals.mean, delta.mean, atol=0.05, rtol=0)


def test_parallel_rows_count_once():
    row = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    twice = ph.LinearInequality(torch.cat([row, 2 * row, -row]), torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64))
    once = ph.LinearInequality.between(row[0], torch.tensor(0.0), torch.tensor(1.0))
    law = (torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    first, second = (ph.DPPL(covariance="mean-field")(law, constraint).marginals for constraint in (twice, once))
    torch.testing.assert_close(first.mean, second.mean)
    torch.testing.assert_close(first.variance, second.variance)


def test_auto_takes_it_for_rows_bounds_and_turnover_but_not_for_balls():
    law = (torch.full((4,), 0.25, dtype=torch.float64), torch.full((4,), 0.1, dtype=torch.float64))
    kinds = {
        "mean-field": [
            flow(4),
            ph.Monotone(),
            ph.Simplex() & ph.L1Ball(0.4, center=torch.tensor([0.4, 0.3, 0.2, 0.1])),
        ],
        "censored": [ph.Box(0.0, 1.0), ph.Simplex()],
        None: [ph.Ball(1.0), ph.Monotone() & ph.L1Ball(0.4)],
    }
    for kind, constraints in kinds.items():
        for constraint in constraints:
            assert ph.DPPL()(law, constraint)._closed == kind
    with pytest.raises(ph.ParameterError, match="mean-field"):
        ph.DPPL(covariance="mean-field")(law, ph.Ball(1.0))
