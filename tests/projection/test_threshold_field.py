"""Turnover limits, balls and shares by soft thresholds: against projected draws, quadrature and finite differences."""

import math

import pytest
import torch

import probhard as ph
from probhard.laws import soft_threshold as field
from probhard.laws.family import LAPLACE
from probhard.laws.marginals import CensoredMarginals
from probhard.laws.split_marginals import SplitMarginals
from probhard.projection.threshold_field import ThresholdField
from projection.moments import check_better

HELD = torch.tensor([0.3, 0.2, 0.2, 0.1, 0.1, 0.1, 0.0, 0.0], dtype=torch.float64)
TURNOVER = ph.Simplex() & ph.L1Ball(0.3, center=HELD)
SETS = {
    "turnover": TURNOVER,
    "turnover and caps": TURNOVER & ph.Box(0.0, 0.35),
    "ball": ph.L1Ball(0.5, center=HELD),
    "simplex": ph.Simplex(),
    "budget": ph.LinearEquality(torch.linspace(1, 2, 8)[None].double(), torch.tensor([1.5]).double()) & ph.Box(0, 0.4),
}


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def exact_gradients(monkeypatch):
    monkeypatch.setattr(field, "CLOSE", 1e-12)
    monkeypatch.setattr(field, "ADJOINT", 1e-12)
    monkeypatch.setattr(field, "STEPS", 400)


@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("sd", [0.01, 0.1])
@pytest.mark.parametrize("name", SETS)
def test_moments_and_scores_are_better_than_those_of_a_hundred_draws(name, sd, metric):
    constraint = SETS[name]
    mean = HELD + 0.1 * normal(3, 8)
    stddev = sd * (0.5 + torch.rand(8, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    law = ph.DPPL(metric, covariance="mean-field")((mean, stddev), constraint)
    assert isinstance(law.projector.mean_field[0], ThresholdField)
    drawn = ph.DPPL(metric, covariance="monte-carlo")((mean, stddev), constraint)
    check_better(law, drawn, law.sample((20_000,), torch.Generator().manual_seed(0)), spread=0.05)
    assert float(constraint.violation(law.mean)) < 1e-12


@pytest.mark.parametrize("name", SETS)
def test_gradients_are_those_of_the_fixed_point(name, exact_gradients):
    mean, stddev = HELD + 0.1 * normal(4, 2, 8), 0.05 + 0.05 * normal(5, 2, 8).abs()
    target = HELD + 0.01 * normal(6, 2, 8)

    def score(mean, stddev):
        law = ph.DPPL("orthogonal", covariance="mean-field")((mean, stddev), SETS[name])
        return ph.crps(law, target).sum()

    torch.autograd.gradcheck(score, (mean.requires_grad_(), stddev.requires_grad_()), eps=1e-6, atol=1e-5, rtol=1e-4)


def test_gradients_of_the_limit_and_the_portfolio(exact_gradients):
    mean, stddev = HELD + 0.1 * normal(4, 8), 0.05 + 0.05 * normal(5, 8).abs()

    def score(radius, center):
        law = ph.DPPL(covariance="mean-field")((mean, stddev), ph.Simplex() & ph.L1Ball(radius, center=center))
        return ph.crps(law, HELD).sum()

    data = torch.tensor(0.3, dtype=torch.float64), HELD[:6].new_tensor([0.3, 0.2, 0.15, 0.15, 0.08, 0.07, 0.03, 0.02])
    torch.autograd.gradcheck(score, tuple(x.requires_grad_() for x in data), eps=1e-6, atol=1e-5, rtol=1e-4)


def test_the_default_takes_the_rule_where_it_fits():
    stddev = torch.full((8,), 0.05, dtype=torch.float64)
    assert isinstance(ph.DPPL()((HELD, stddev), TURNOVER).marginals, SplitMarginals)
    laplace = ph.LocationScale(HELD, ph.Diagonal(stddev.square()), LAPLACE)
    assert not isinstance(ph.DPPL()(laplace, TURNOVER).marginals, SplitMarginals)


@pytest.mark.parametrize("sd", [0.0, 1e-9, 1e-5, 30.0])
def test_extreme_spreads_are_finite(sd):
    mean = (HELD + 0.2 * normal(7, 50, 8)).requires_grad_()
    layer = ph.DPPL("oblique" if sd else "orthogonal")
    law = layer((mean, torch.full((50, 8), sd, dtype=torch.float64)), TURNOVER)
    point = ph.DPPL("orthogonal").project(mean.detach(), TURNOVER).value
    laws = law.marginals
    ph.crps(law, HELD.expand(50, 8)).sum().backward()
    assert all(torch.isfinite(x).all() for x in (laws.mean, laws.variance, mean.grad))
    assert TURNOVER.violation(law.mean).max() < 1e-12
    if sd < 1:
        torch.testing.assert_close(laws.mean, point, atol=4 * sd + 1e-9, rtol=0)


def test_laws_without_any_spread_or_weight_are_points():
    certain = torch.zeros(8, dtype=torch.float64)
    law = ph.DPPL()((HELD, certain), TURNOVER)
    assert torch.equal(law.mean, HELD)
    assert not ph.crps(law, HELD).any()
    moved = ph.DPPL()((HELD + 1, certain), TURNOVER)
    assert TURNOVER.violation(moved.mean).max() < 1e-9


def test_batches_and_single_precision():
    mean, stddev = HELD + 0.1 * normal(1, 3, 2, 8), torch.full((8,), 0.05, dtype=torch.float64)
    law = ph.DPPL()((mean, stddev.expand(3, 2, 8)), TURNOVER).marginals
    alone = ph.DPPL()((mean[1, 1], stddev), TURNOVER).marginals
    torch.testing.assert_close(law.mean[1, 1], alone.mean)
    single = ph.DPPL()((mean.float(), stddev.float().expand(3, 2, 8)), TURNOVER).marginals
    assert single.mean.dtype == torch.float32
    torch.testing.assert_close(single.mean.double(), law.mean, atol=1e-4, rtol=0)


def split():
    """A law with three atoms, and points between them on both sides."""
    center = torch.tensor([0.2], dtype=torch.float64)
    loc, scale = torch.tensor([[0.1], [0.25]]).double(), torch.tensor([[0.15], [0.1]]).double()
    lower, upper = torch.tensor([[0.2], [0.0]]).double(), torch.tensor([[math.inf], [0.2]]).double()
    return SplitMarginals(CensoredMarginals(loc, scale, lower=lower, upper=upper), center)


def test_two_pieces_agree_with_their_draws():
    law, draws = split(), split().rsample((200_000,), torch.Generator().manual_seed(0))
    assert float((draws == 0.2).double().mean()) > 0.3
    torch.testing.assert_close(law.mean, draws.mean(0), atol=1e-3, rtol=0)
    torch.testing.assert_close(law.variance, draws.var(0), atol=1e-3, rtol=0)
    torch.testing.assert_close(law.stddev, draws.std(0), atol=2e-3, rtol=0)
    for y in (-0.1, 0.0, 0.1, 0.2, 0.3):
        at = torch.tensor([y], dtype=torch.float64)
        own = (draws - at).abs().mean(0) - (draws[:100_000] - draws[100_000:]).abs().mean(0) / 2
        torch.testing.assert_close(law.crps(at), own, atol=2e-3, rtol=0)
        torch.testing.assert_close(law.cdf(at), (draws <= at).double().mean(0), atol=5e-3, rtol=0)
        before = (draws < at).double().mean(0)
        torch.testing.assert_close(law.pit(at), 0.5 * (before + law.cdf(at)), atol=5e-3, rtol=0)


def test_quantiles_and_densities_of_two_pieces():
    law = split()
    for p in (0.01, 0.1, 0.3, 0.5, 0.7, 0.9):
        q = law.icdf(torch.tensor([p], dtype=torch.float64))
        assert float(law.cdf(q)) >= p - 1e-12
        assert float(law.cdf(q - 1e-9)) <= p + 1e-7
    at = torch.tensor([0.2], dtype=torch.float64)
    stays = law.cdf(at) - law.cdf(at - 1e-12)
    torch.testing.assert_close(law.log_prob(at), stays.log(), atol=1e-9, rtol=0)
    between = torch.tensor([0.3], dtype=torch.float64)
    slope = (law.cdf(between + 1e-6) - law.cdf(between - 1e-6)) / 2e-6
    torch.testing.assert_close(law.log_prob(between), slope.log(), atol=1e-6, rtol=0)
    torch.testing.assert_close(law.nll(between), -law.log_prob(between))
    torch.testing.assert_close(law.nll(at), -law.log_prob(at))
    assert law.nll(torch.tensor([math.nan]).double(), torch.tensor([False])) == 0
    assert not law.degenerate.any()
