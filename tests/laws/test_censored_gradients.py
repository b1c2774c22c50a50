"""Derivatives of censored marginals: finite differences, limits at the bounds, functional transforms."""

from __future__ import annotations

import shutil

import mpmath
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from laws.censored_cases import INF, each_family, leaves, mixed
from probhard.laws.family import NORMAL, UNIFORM
from probhard.laws.marginals import CensoredMarginals


@each_family
def test_derivatives(family):
    rows = [(-0.4, 0.6, -0.7, 1.1, 0.3, 2.0), (0.7, 1.1, 0.9, 1.3, 0.6, 1.6), (0.5, 0.2, 0.3, -0.8, 2.0, 1.3)]
    loc, scale, y = leaves(*torch.tensor(rows))  # below, inside and above; targets inside and outside
    lower, upper = leaves(
        torch.tensor([0.0, -0.1, -1.9, 0.1, -1.0, 0.0]), torch.tensor([1.0, 0.9, -1.0, 1.2, 1.1, 1.4])
    )

    def score(loc, scale, y, lower, upper):
        return CensoredMarginals(loc, scale, family, lower, upper, validate_args=False).crps(y)

    def moments(loc, scale, lower, upper):
        law = CensoredMarginals(loc, scale, family, lower, upper, validate_args=False)
        return law.mean, law.variance

    assert gradcheck(score, (loc, scale, y, lower, upper))
    assert gradcheck(score, (loc, scale, y, lower, upper), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(score, (loc, scale, y, lower, upper), fast_mode=True)
    assert gradcheck(moments, (loc, scale, lower, upper))
    assert gradcheck(moments, (loc, scale, lower, upper), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(moments, (loc, scale, lower, upper), fast_mode=True)
    one_sided = (loc, scale, y, lower)
    assert gradcheck(lambda a, b, c, d: score(a, b, c, d, torch.full_like(a, INF)), one_sided, fast_mode=True)
    assert gradcheck(lambda a, b, d: moments(a, b, d, torch.full_like(a, INF)), (loc, scale, lower), fast_mode=True)


@each_family
def test_other_methods_are_differentiable(family):
    loc, scale, y, lower, upper = mixed(12)
    y = torch.minimum(torch.maximum(y, lower), upper)  # several targets sit at a bound
    keep = family.cdf((lower - loc) / scale) * family.cdf((loc - upper) / scale) > 0
    keep &= (y - loc).abs() < scale if family == UNIFORM else keep
    loc, scale, y, lower, upper = leaves(*(t[keep] for t in (loc, scale, y, lower, upper)))
    target, level = y.detach(), torch.linspace(0.05, 0.95, len(y))
    # Bounds move together with their atoms, so only loc and scale are free here.
    low, high = lower.detach(), upper.detach()
    assert gradcheck(
        lambda a, b: CensoredMarginals(a, b, family, low, high).log_prob(target), (loc, scale), fast_mode=True
    )
    assert gradcheck(lambda a, b: CensoredMarginals(a, b, family, low, high).icdf(level), (loc, scale), fast_mode=True)
    middle = (low + high) / 2
    assert gradcheck(lambda a, b: CensoredMarginals(a, b, family, low, high).cdf(middle), (loc, scale), fast_mode=True)


@each_family
def test_gradients_where_the_location_sits_on_a_bound(family):
    """A projected mean often equals its bound: the derivative there is the limit from both sides."""
    for bound, other in ((0.0, 2.0), (0.0, -2.0)):
        lower, upper = min(bound, other), max(bound, other)
        results = []
        for offset in (-1e-9, 0.0, 1e-9):
            loc, scale = leaves(torch.tensor([offset]), torch.tensor([0.7]))
            law = CensoredMarginals(loc, scale, family, lower, upper)
            parts = (law.mean, law.variance, law.crps(torch.tensor([other / 4])))
            results.append(torch.stack([g for p in parts for g in torch.autograd.grad(p.sum(), (loc, scale))]))
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-7)
        torch.testing.assert_close(results[2], results[1], rtol=0, atol=1e-7)


def test_a_location_outside_still_learns():
    """The score pulls a location that lies below its bound, near and far, unless the tail underflows."""
    for distance, dtype in ((0.3, torch.float64), (0.3, torch.float32), (8.0, torch.float32), (25.0, torch.float64)):
        loc, scale = leaves(torch.tensor([-distance], dtype=dtype), torch.ones(1, dtype=dtype))
        value = CensoredMarginals(loc, scale, NORMAL, 0.0).crps(torch.ones(1, dtype=dtype))
        to_loc, to_scale = torch.autograd.grad(value.sum(), (loc, scale))
        assert to_loc.item() < 0
        assert to_scale.item() < 0
        with mpmath.workdps(60):
            near, far = (mpmath.ncdf(-mpmath.mpf(loc.item()) * -1 - y) for y in (0, 1))
            exact = 2 * far - 2 * near + near**2
        assert to_loc.item() == pytest.approx(float(exact), rel=1e-5 if dtype == torch.float32 else 1e-12, abs=0)
    # At a target on the bound the score pushes outwards instead: the mass at the bound grows.
    loc = torch.tensor([-0.3], requires_grad=True)
    CensoredMarginals(loc, torch.ones(1), NORMAL, 0.0).crps(torch.zeros(1)).sum().backward()
    assert loc.grad.item() > 0


@each_family
def test_functional_transforms(family):
    parts = mixed(5)

    def score(loc, scale, y, lower, upper):
        law = CensoredMarginals(loc, scale, family, lower, upper)
        return law.crps(y) + law.mean + law.variance

    variables = leaves(*parts)
    expected = torch.autograd.grad(score(*variables).sum(), variables)
    torch.testing.assert_close(torch.func.vmap(score)(*parts), score(*parts))
    for position in range(5):
        for transform in (torch.func.jacrev, torch.func.jacfwd):
            torch.testing.assert_close(transform(score, position)(*parts), torch.diag(expected[position]))
    each = torch.func.vmap(torch.func.grad(score, argnums=(0, 1)))(*parts)
    torch.testing.assert_close(each, expected[:2])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled(compiler):
    loc, scale, y, lower, upper = leaves(*mixed(8))

    def loss(loc, scale):
        law = CensoredMarginals(loc, scale, NORMAL, lower.detach(), upper.detach())
        return (law.crps(y.detach()) + law.mean).sum()

    expected = torch.autograd.grad(loss(loc, scale), (loc, scale))
    result = torch.autograd.grad(torch.compile(loss)(loc, scale), (loc, scale))
    torch.testing.assert_close(result, expected)
