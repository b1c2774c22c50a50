"""Mixtures projected member by member: closed-form scores, draws, feasibility, and errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import probhard as ph
from probhard.projection.mixture import Mixture

N = 4


def normals(count: int = 3, batch: int = 2, seed: int = 0) -> tuple[tuple[ph.LocationScale, ...], torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(count, batch, N, generator=source, dtype=torch.float64)
    stddevs = torch.rand(count, batch, N, generator=source, dtype=torch.float64) + 0.1
    weights = torch.softmax(torch.randn(count, batch, generator=source, dtype=torch.float64), 0)
    return tuple(ph.as_location_scale(pair) for pair in zip(means, stddevs)), weights


def total(value: float = 2.0) -> ph.LinearEquality:
    return ph.LinearEquality(torch.ones(1, N, dtype=torch.float64), torch.tensor([value], dtype=torch.float64))


def integrated(mixture: Mixture, y: torch.Tensor) -> torch.Tensor:
    """The CRPS by its definition, the integral of (F(x) - [x >= y])^2."""
    grid = torch.linspace(-15, 15, 60_001, dtype=torch.float64)
    values = []
    for x in grid.split(2000):
        level = torch.stack([mixture.marginals.cdf(one.expand(y.shape)) for one in x])
        values.append((level - (x[:, None, None] >= y).double()).square())
    return torch.cat(values).sum(0) * float(grid[1] - grid[0])


def test_closed_form_is_the_integral_that_defines_it() -> None:
    members, weights = normals()
    y = torch.randn(2, N, dtype=torch.float64)
    mixture = Mixture(members, weights)
    torch.testing.assert_close(ph.crps(mixture, y), integrated(mixture, y), rtol=0, atol=1e-3)


def test_one_member_is_the_law_itself() -> None:
    members, _ = normals(1)
    y = torch.randn(2, N, dtype=torch.float64)
    torch.testing.assert_close(ph.crps(Mixture(members), y), ph.crps(members[0], y))
    torch.testing.assert_close(ph.nll(Mixture(members), y), ph.nll(members[0], y))


def test_likelihood_and_moments_are_those_of_torch() -> None:
    members, weights = normals()
    theirs = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(weights.movedim(0, -1)[:, None].expand(-1, N, -1)),
        torch.distributions.Normal(*(torch.stack([getattr(m, x) for m in members], -1) for x in ("mean", "stddev"))),
    )
    mixture, y = Mixture(members, weights), torch.randn(2, N, dtype=torch.float64)
    torch.testing.assert_close(ph.nll(mixture, y), -theirs.log_prob(y))
    torch.testing.assert_close(mixture.mean, theirs.mean)
    torch.testing.assert_close(mixture.variance, theirs.variance)
    torch.testing.assert_close(mixture.matched().variance, theirs.variance)
    quantile = mixture.marginals.icdf(torch.tensor(0.3, dtype=torch.float64))
    torch.testing.assert_close(theirs.cdf(quantile), torch.full_like(quantile, 0.3))


def test_gradients_are_those_of_differences_and_finite_at_spread_zero() -> None:
    y = torch.randn(2, N, dtype=torch.float64)

    def score(loc: torch.Tensor, scale: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        members = tuple(ph.as_location_scale((m, s)) for m, s in zip(loc, scale))
        return ph.crps(Mixture(members, torch.softmax(logits, 0)), y)

    loc = torch.randn(3, 2, N, dtype=torch.float64, requires_grad=True)
    scale = (torch.rand(3, 2, N, dtype=torch.float64) + 0.2).requires_grad_()
    logits = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(score, (loc, scale, logits))
    points = torch.zeros_like(scale, requires_grad=True)
    score(loc, points, logits).sum().backward()
    assert torch.isfinite(points.grad).all()


def test_every_member_and_draw_is_feasible() -> None:
    members, weights = normals()
    layer = ph.DPPL("oblique")
    mixture = Mixture(members, weights).projected(lambda law: layer(law, total()))
    assert mixture.feasible
    assert not Mixture(members, weights).feasible
    draws = mixture.sample((50,), torch.Generator().manual_seed(0))
    assert draws.shape == (50, 2, N)
    assert total().violation(draws).max() < 1e-12
    y = torch.randn(2, N, dtype=torch.float64)
    many = mixture.sample((20_000,), torch.Generator().manual_seed(1))
    torch.testing.assert_close(many.mean(0), mixture.mean, rtol=0, atol=0.06)
    torch.testing.assert_close(ph.crps_ensemble(many, y, estimator="fair"), ph.crps(mixture, y), rtol=0.02, atol=0.02)


def test_shares_of_draws_are_the_weights() -> None:
    places = [torch.full((2, N), float(k)) for k in range(3)]
    members = tuple(ph.as_location_scale((place, torch.full_like(place, 1e-3))) for place in places)
    weights = torch.tensor([[0.7, 0.1], [0.2, 0.1], [0.1, 0.8]])
    draws = Mixture(members, weights).sample((20_000,), torch.Generator().manual_seed(0)).round().mean(-1)
    shares = torch.stack([(draws == k).double().mean(0) for k in range(3)])
    torch.testing.assert_close(shares, weights.double(), rtol=0, atol=0.015)


def test_the_mean_of_a_curved_set_is_said_to_be_infeasible() -> None:
    sphere = ph.NonlinearEquality(lambda u: u.square().sum(-1, keepdim=True) - 1)
    sides = torch.eye(N, dtype=torch.float64)[:2]
    members = tuple(ph.as_location_scale((side, torch.full_like(side, 0.1))) for side in sides)
    layer = ph.DPPL("orthogonal", covariance="delta")
    mixture = Mixture(members).projected(lambda law: layer(law, sphere))
    assert not mixture.feasible
    assert sphere.violation(mixture.sample((20,))).max() < 1e-9


class Switch(nn.Module):
    """Two modes and their odds."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.logits = nn.Parameter(torch.randn(2, N)), nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Mixture:
        members = (ph.as_location_scale((m.expand(len(x), -1), torch.full((len(x), N), 0.1))) for m in self.mean)
        return Mixture(tuple(members), torch.softmax(self.logits, 0))


def test_a_model_learns_two_modes_that_obey() -> None:
    torch.manual_seed(0)
    modes = torch.tensor([[2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0]])
    target = modes[(torch.rand(400) < 0.25).long()]
    model = ph.ConstrainedModel(Switch(), ph.LinearEquality(torch.ones(1, N), torch.tensor([2.0])), "probhard-or")
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(300):
        optimizer.zero_grad()
        (model.loss((torch.zeros(400, 1), target)) / 400).backward()
        optimizer.step()
    forecast = model.forecast(torch.zeros(1, 1))
    assert isinstance(forecast, Mixture)
    assert forecast.feasible
    found = torch.stack([member.mean[0] for member in forecast.members]).detach()
    order = found[:, 0].argsort(descending=True)
    torch.testing.assert_close(found[order], modes, rtol=0, atol=0.15)
    assert math.isclose(float(forecast.shares[order[0], 0]), 0.75, abs_tol=0.08)
    assert (model.sample(torch.zeros(3, 1), 7).sum(-1) - 2).abs().max() < 1e-5


@pytest.mark.parametrize("method", sorted(ph.METHODS))
def test_methods_take_mixtures(method: str) -> None:
    model = ph.ConstrainedModel(Switch(), ph.LinearEquality(torch.ones(1, N), torch.tensor([2.0])), method)
    model.loss((torch.zeros(5, 1), torch.randn(5, N))).backward()
    assert torch.isfinite(model.backbone.mean.grad).all()


def test_errors_say_what_to_do() -> None:
    members, weights = normals()
    with pytest.raises(ph.ParameterError, match="no members"):
        Mixture(())
    with pytest.raises(ph.ShapeError, match="softmax"):
        Mixture(members, weights[:2])
    with pytest.raises(ph.ParameterError, match="add up to 1"):
        Mixture(members, 2 * weights)
    clipped = Mixture(members, weights).projected(lambda law: ph.DPPL()(law, ph.NonNegative()))
    with pytest.raises(ph.ParameterError, match="clipped at bounds"):
        ph.crps(clipped, torch.zeros(2, N, dtype=torch.float64))


def test_functionals_are_those_of_draws() -> None:
    members, weights = normals()
    mixture = Mixture(members, weights).projected(lambda law: ph.DPPL("oblique")(law, total()))
    rows = torch.randn(3, N, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = torch.randn(2, N, dtype=torch.float64)
    draws = mixture.sample((40_000,), torch.Generator().manual_seed(1))
    expected = ph.crps_ensemble(draws @ rows.mT, y @ rows.mT, estimator="fair")
    torch.testing.assert_close(ph.crps(mixture, y, functionals=rows), expected, rtol=0.02, atol=0.02)
    clipped = Mixture(members, weights).projected(lambda law: ph.DPPL()(law, ph.NonNegative()))
    with pytest.raises(ph.ParameterError, match="crps_ensemble"):
        ph.crps(clipped, y, functionals=rows)
