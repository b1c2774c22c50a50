"""Bottom-up laws: dense algebra, draws, the loss of both kinds of law, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import probhard as ph

S = np.vstack([[[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]], np.eye(4)])
HIERARCHY = ph.Hierarchy(S)
SUMS = ph.Step("bottom-up")
DOUBLE = torch.float64


def normal(seed: int = 0) -> ph.LocationScale:
    random = torch.Generator().manual_seed(seed)
    loc, spread = (torch.rand(5, 4, dtype=DOUBLE, generator=random) for _ in range(2))
    factor = torch.randn(5, 4, 2, dtype=DOUBLE, generator=random)
    return ph.LocationScale(10 * loc, ph.LowRank(factor, spread + 0.1))


def test_margins_are_those_of_dense_algebra():
    law = normal()
    summed = ph.BottomUp(law, HIERARCHY)
    dense = S @ law.cov.dense().numpy() @ S.T
    np.testing.assert_allclose(summed.mean, law.loc.numpy() @ S.T, rtol=1e-12)
    np.testing.assert_allclose(summed.variance, np.diagonal(dense, axis1=-2, axis2=-1), rtol=1e-10)
    np.testing.assert_allclose(summed.marginals.variance, summed.variance, rtol=1e-12)


def test_functionals_are_those_of_dense_algebra():
    law, target = normal(), ph.BottomUp(normal(1), HIERARCHY).mean
    rows = torch.randn(3, 7, dtype=DOUBLE)
    summed = ph.BottomUp(law, HIERARCHY)
    root = torch.from_numpy(S) @ torch.linalg.cholesky(law.cov.dense())
    whole = ph.LocationScale(summed.mean, ph.LowRank(root, torch.zeros(7, dtype=DOUBLE)))
    assert ph.functional_rule(summed) == "closed form"
    torch.testing.assert_close(
        ph.crps(summed, target, functionals=rows), ph.crps(whole, target, functionals=rows), rtol=1e-9, atol=1e-9
    )


def test_functionals_of_counts_come_from_draws_with_their_moments():
    summed = ph.BottomUp(mixture(), HIERARCHY)
    assert ph.functional_rule(summed) == "draws"
    assert bool(torch.isfinite(ph.crps(summed, summed.mean, functionals=torch.ones(1, 7, dtype=DOUBLE))).all())
    assert float(HIERARCHY.violation(summed.fixed_draws(10)).max()) < 1e-12


def test_it_is_the_projection_that_holds_the_bottoms():
    law = normal()
    whole = ph.LocationScale(
        torch.cat([torch.randn(5, 3, dtype=DOUBLE), law.loc], -1), ph.Diagonal(torch.ones(7).double())
    )
    held = ph.DPPL("orthogonal")(whole, ph.Hierarchy(S, immutable=range(3, 7)))
    torch.testing.assert_close(held.mean, ph.BottomUp(law, HIERARCHY).mean)


def test_draws_add_up_and_have_the_right_moments():
    summed = ph.BottomUp(normal(), HIERARCHY)
    draws = summed.sample((20_000,), torch.Generator().manual_seed(1))
    assert float(HIERARCHY.violation(draws).max()) < 1e-12
    torch.testing.assert_close(draws.var(0), summed.variance, rtol=0.06, atol=0.0)


def test_the_closed_form_loss_is_the_expectation_of_that_of_draws():
    """CLOVER's sample CRPS at all levels, and what we train with instead."""
    law, target = normal(), ph.BottomUp(normal(1), HIERARCHY).mean
    torch.manual_seed(0)
    sampled = ph.Method(ph.Step("bottom-up", draws=4000), SUMS, "crps")
    closed = ph.Method(SUMS, SUMS, "crps")
    losses = [
        float(ph.ConstrainedModel(nn.Identity(), HIERARCHY, method).loss((law, target))) for method in (sampled, closed)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


def mixture() -> ph.PoissonMixture:
    random = torch.Generator().manual_seed(2)
    rates = 5 * torch.rand(5, 4, 3, dtype=DOUBLE, generator=random) + 0.1
    return ph.PoissonMixture(torch.randn(5, 3, dtype=DOUBLE, generator=random), rates)


def test_counts_are_scored_by_the_joint_likelihood_of_the_bottoms():
    law = mixture()
    target = ph.BottomUp(law, HIERARCHY).sample((), torch.Generator().manual_seed(3))
    model = ph.ConstrainedModel(nn.Identity(), HIERARCHY, ph.Method(SUMS, SUMS, "nll"))
    assert float(model.loss((law, target))) == pytest.approx(-float(law.log_prob(target[:, 3:]).sum()))
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[:, 4] = False
    hidden = torch.where(mask, target, torch.nan)
    expected = -float(law.log_prob(target[:, 3:], mask[:, 3:]).sum())
    assert float(model.loss((law, hidden, mask))) == pytest.approx(expected)


def test_counts_stay_counts_in_sums():
    summed = ph.BottomUp(mixture(), HIERARCHY)
    draws = summed.sample((3000,), torch.Generator().manual_seed(4))
    assert float(HIERARCHY.violation(draws).max()) == 0
    assert bool((draws >= 0).all())
    assert bool((draws == draws.round()).all())
    torch.testing.assert_close(draws.var(0), summed.variance, rtol=0.2, atol=0.0)
    torch.testing.assert_close(summed.marginals.variance, summed.variance)


def test_a_projecting_method_takes_the_moments_of_a_mixture():
    rates = torch.cat([mixture().rates.sum(-2, keepdim=True).repeat(1, 3, 1), mixture().rates], -2)
    law = ph.PoissonMixture(mixture().log_weights, rates)
    model = ph.ConstrainedModel(nn.Identity(), HIERARCHY, "probhard-ob")
    assert float(HIERARCHY.violation(model.sample(law, 50)).max()) < 1e-9


def test_points_are_summed():
    points = torch.rand(6, 4, dtype=DOUBLE)
    model = ph.ConstrainedModel(nn.Identity(), HIERARCHY, ph.Method(SUMS, SUMS))
    torch.testing.assert_close(model(points), points @ torch.from_numpy(S).T)


def test_what_is_refused():
    with pytest.raises(ph.ParameterError, match="bottom-up"):
        ph.BottomUp(normal(), HIERARCHY & ph.NonNegative())
    with pytest.raises(ph.ShapeError, match="4"):
        ph.BottomUp((torch.zeros(7), torch.ones(7)), HIERARCHY)
    with pytest.raises(ph.ParameterError, match="gradient"):
        ph.BottomUp(mixture(), HIERARCHY).rsample()


def test_the_method_survives_its_record():
    method = ph.Method(SUMS, SUMS, "nll")
    assert ph.Method.from_record(method.record()) == method
