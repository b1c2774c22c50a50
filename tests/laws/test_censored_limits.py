"""Censored marginals at their limits: no scale, any scale, narrow bounds, locations far outside."""

from __future__ import annotations

import pytest
import torch

from laws.censored_cases import INF, SCIPY, each_dtype, each_family, integral, leaves
from probhard.laws.family import UNIFORM
from probhard.laws.marginals import CensoredMarginals


@each_family
def test_far_outside_the_bounds(family):
    """Ten scales below the lower bound the moments keep relative accuracy; above, by symmetry."""
    loc, scale, lower, upper = torch.tensor([-20.0]), torch.tensor([2.0]), 0.0, 3.0
    law = SCIPY[family.name](family)(-20.0, 2.0)
    below = CensoredMarginals(loc, scale, family, lower, upper)
    above = CensoredMarginals(-loc, scale, family, -upper, -lower)
    first = integral(law.sf, lower, upper)
    second = integral(lambda x: 2 * x * law.sf(x), lower, upper)
    score = integral(lambda x: law.sf(x) ** 2, lower, upper)
    zero = torch.zeros(1)
    assert below.mean.item() == pytest.approx(first, rel=1e-8, abs=0)
    assert below.variance.item() == pytest.approx(second - first**2, rel=1e-8, abs=0)
    assert below.crps(zero).item() == pytest.approx(score, rel=1e-8, abs=0)
    for name in ("mean", "variance"):
        sign = -1 if name == "mean" else 1
        torch.testing.assert_close(getattr(above, name), sign * getattr(below, name), rtol=1e-9, atol=0)
    torch.testing.assert_close(above.crps(zero), below.crps(zero), rtol=1e-9, atol=0)


@each_family
@each_dtype
def test_zero_scale_is_a_point_mass(family, dtype):
    loc, scale, lower, upper, y = (
        torch.tensor(row, dtype=dtype, requires_grad=True)
        for row in (
            [-2.0, 0.5, 3.0, 0.0, 1.0, 0.5, 0.5, 7.0],
            [0.0] * 8,
            [0.0, 0.0, 0.0, 0.0, 0.0, -INF, -INF, 0.25],
            [1.0, 1.0, 1.0, 1.0, 1.0, INF, 1.0, 0.25],
            [0.5, 0.5, 0.5, 0.0, 2.0, -4.0, 0.75, 0.25],
        )
    )
    law = CensoredMarginals(loc, scale, family, lower, upper)
    centre = torch.tensor([0.0, 0.5, 1.0, 0.0, 1.0, 0.5, 0.5, 0.25], dtype=dtype)
    assert torch.equal(law.mean, centre)
    assert torch.equal(law.variance, torch.zeros(8, dtype=dtype))
    assert torch.equal(law.crps(y), (y - centre).abs())
    assert torch.equal(law.icdf(torch.tensor(0.3, dtype=dtype)), centre)
    assert torch.equal(law.cdf(y), (y >= centre).to(dtype))
    assert law.pit(y).tolist() == [1.0, 0.5, 0.0, 0.5, 1.0, 0.0, 1.0, 0.5]
    assert law.degenerate.all()
    assert torch.equal(law.rsample((3,)), centre.expand(3, 8))
    assert torch.equal(law.nll(y), torch.zeros(8, dtype=dtype))
    assert law.log_prob(centre).tolist() == [0.0, INF, 0.0, 0.0, 0.0, INF, INF, 0.0]
    outputs = (law.mean, law.variance, law.stddev, law.crps(y), law.nll(y), law.cdf(y), law.pit(y))
    outputs = (*outputs, law.icdf(torch.tensor(0.3, dtype=dtype)))
    variables = (loc, scale, lower, upper, y)
    for output in outputs:
        for gradient in torch.autograd.grad(output.sum(), variables, allow_unused=True, retain_graph=True):
            assert gradient is None or gradient.isfinite().all()


@each_family
@each_dtype
def test_everything_is_finite_at_any_scale(family, dtype):
    exponents = torch.linspace(-44, 12, 57)
    scale = (10**exponents).to(dtype).expand(6, 4, 57).clone().requires_grad_()
    loc = torch.tensor([-1e6, -3.0, 0.0, 0.5, 1.0, 2e3], dtype=dtype)[:, None, None].expand(6, 4, 57)
    lower = torch.tensor([0.0, -INF, 0.0, -INF], dtype=dtype)[:, None].expand(6, 4, 57)
    upper = torch.tensor([1.0, 1.0, INF, INF], dtype=dtype)[:, None].expand(6, 4, 57)
    loc, lower, upper = leaves(loc, lower, upper)
    law = CensoredMarginals(loc, scale, family, lower, upper)
    y = torch.tensor(0.5, dtype=dtype)
    mean, variance = law.mean, law.variance
    assert ((mean >= lower) & (mean <= upper)).all()
    assert (variance >= 0).all()
    assert (variance <= 0.25 * (upper - lower) ** 2).all()
    score = law.crps(y)
    assert (score[:, 0] <= 1).all()
    quantile = law.icdf(torch.tensor(0.0, dtype=dtype))
    assert torch.equal(
        quantile[:, 0], torch.maximum(lower, loc - scale)[:, 0].clamp(max=1) if family == UNIFORM else lower[:, 0]
    )
    for output in (mean, variance, score, law.stddev, law.icdf(y)):
        assert output.isfinite().all()
        for gradient in torch.autograd.grad(output.sum(), (loc, scale, lower, upper), allow_unused=True):
            assert gradient is None or gradient.isfinite().all()


@each_family
def test_narrow_bounds(family):
    """Far narrower than the scale: nearly a two-point law, whose moments and score are elementary."""
    for width in (1e-3, 1e-6, 1e-9, 1e-12):
        loc, scale = torch.tensor([0.4]), torch.ones(1)
        law = CensoredMarginals(loc, scale, family, 0.0, width)
        left = family.cdf(torch.tensor([-0.4]))
        tolerance = max(2e-5, width)
        torch.testing.assert_close(law.mean, width * (1 - left), rtol=tolerance, atol=0)
        torch.testing.assert_close(law.variance, width**2 * left * (1 - left), rtol=3 * tolerance, atol=0)
        expected = width / 4 * left**2 + 3 * width / 4 * (1 - left) ** 2
        torch.testing.assert_close(law.crps(torch.tensor([width / 4])), expected, rtol=3 * tolerance, atol=0)
