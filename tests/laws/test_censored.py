"""Censored marginals against quadrature, high precision, scoringrules in NumPy, draws and finite differences."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import scoringrules
import torch

from laws.censored_cases import BOUNDS, INF, POINTS, SCIPY, each_family, grid, integral, leaves, mixed
from probhard.errors import ParameterError, ShapeError
from probhard.laws.distribution import Marginals
from probhard.laws.family import LAPLACE, LOGISTIC, NORMAL
from probhard.laws.marginals import CensoredMarginals
from probhard.laws.student_t import student_t
from probhard.score import coverage, crps, crps_ensemble, degenerate, nll, pit


@each_family
@pytest.mark.parametrize(("loc", "scale"), POINTS)
def test_moments_match_quadrature(family, loc, scale):
    law = SCIPY[family.name](family)(loc, scale)
    ends = law.support()
    for lower, upper in BOUNDS:
        result = CensoredMarginals(torch.tensor([loc]), torch.tensor([scale]), family, lower, upper)
        inner = max(lower, ends[0]), max(min(upper, ends[1]), max(lower, ends[0]))

        def expectation(power, lower=lower, upper=upper, inner=inner):
            total = integral(lambda x: power(x) * law.pdf(x), *inner, loc)
            total += power(lower) * law.cdf(lower) if lower > -INF else 0.0
            return total + (power(upper) * law.sf(upper) if upper < INF else 0.0)

        mean = lower if lower == upper else expectation(lambda x: x)
        variance = 0.0 if lower == upper else expectation(lambda x, mean=mean: (x - mean) ** 2)
        assert result.mean.item() == pytest.approx(mean, abs=1e-10)
        assert result.variance.item() == pytest.approx(variance, rel=1e-10, abs=1e-10)
        assert result.stddev.item() == pytest.approx(math.sqrt(result.variance.item()), abs=1e-14)


@each_family
def test_one_bound_at_the_centre_halves_the_second_moment(family):
    half = CensoredMarginals(torch.zeros(1), torch.full((1,), 2.0), family, 0.0)
    second = half.variance + half.mean.square()
    torch.testing.assert_close(second, torch.full((1,), 2 * float(family.unit_variance)), rtol=1e-12, atol=0)


@each_family
def test_crps_matches_quadrature(family):
    loc, scale, lower, upper, y = grid()
    value = CensoredMarginals(loc, scale, family, lower, upper).crps(y)
    assert (value >= 0).all()
    for k in range(len(y)):
        law = SCIPY[family.name](family)(loc[k].item(), scale[k].item())
        low, high, target = lower[k].item(), upper[k].item(), y[k].item()
        point = min(max(target, low), high)
        knots = (loc[k].item(), *law.support())
        area = integral(lambda x, law=law: law.cdf(x) ** 2, low, point, *knots)
        area += integral(lambda x, law=law: law.sf(x) ** 2, point, high, *knots)
        assert value[k].item() == pytest.approx(abs(target - point) + area, abs=1e-10), (low, high, target)


@pytest.mark.parametrize(
    ("family", "oracle"),
    [
        (NORMAL, scoringrules.crps_cnormal),
        (LOGISTIC, scoringrules.crps_clogistic),
        (student_t(5.0), lambda y, *rest: scoringrules.crps_ct(y, 5.0, *rest)),
    ],
    ids=["normal", "logistic", "student-t"],
)
def test_crps_matches_scoringrules(family, oracle):
    loc, scale, lower, upper, y = grid()
    keep = (lower < upper) & ((y >= lower) & (y <= upper))
    loc, scale, lower, upper, y = (t[keep] for t in (loc, scale, lower, upper, y))
    value = CensoredMarginals(loc, scale, family, lower, upper).crps(y)
    with np.errstate(all="ignore"):
        exact = oracle(*(t.numpy() for t in (y, loc, scale, lower, upper)))
    known = ~np.isnan(exact)  # it gives NaN for some infinite or zero bounds
    assert known.sum() >= 25
    np.testing.assert_allclose(value.numpy()[known], exact[known], rtol=1e-11, atol=1e-13)


@each_family
def test_without_bounds_it_is_the_plain_law(family):
    loc, scale, y, *_ = mixed()
    y[:3] = loc[:3]
    free, plain = CensoredMarginals(loc, scale, family), Marginals(loc, scale, family)
    for name in ("crps", "cdf", "pit", "log_prob", "nll"):
        torch.testing.assert_close(getattr(free, name)(y), getattr(plain, name)(y), rtol=1e-12, atol=1e-14)
    for name in ("mean", "variance", "stddev"):
        torch.testing.assert_close(getattr(free, name), getattr(plain, name), rtol=1e-12, atol=1e-14)
    level = torch.rand(60)
    assert torch.equal(free.icdf(level), plain.icdf(level))
    variables = leaves(loc, scale, y)
    expected = torch.autograd.grad(family.crps(*variables).sum(), variables)
    result = torch.autograd.grad(CensoredMarginals(*variables[:2], family).crps(variables[2]).sum(), variables)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-14)


@each_family
def test_draws_follow_the_law(family):
    loc, scale = torch.tensor([0.2, -1.0]), torch.tensor([1.5, 0.7])
    law = CensoredMarginals(loc, scale, family, torch.tensor([-1.0, 0.0]), torch.tensor([1.2, 4.0]))
    draws = law.rsample((1_000_000,), torch.Generator().manual_seed(3))
    assert ((draws >= law.lower) & (draws <= law.upper)).all()
    error = law.stddev / 1000
    assert ((draws.mean(0) - law.mean).abs() <= 4 * error).all()
    noise = (draws - law.mean).square().std(0) / 1000
    assert ((draws.var(0) - law.variance).abs() <= 4 * noise).all()
    for point in (-1.0, 0.0, 0.7, 1.2):
        value = torch.full((2,), point)
        frequency = (draws <= value).double().mean(0)
        assert ((frequency - law.cdf(value)).abs() < 4 * 0.5e-3).all()
    y = torch.tensor([0.4, 0.3])
    torch.testing.assert_close(crps_ensemble(draws, y), law.crps(y), rtol=0, atol=4e-3)
    at_lower = (draws == law.lower).double().mean(0)
    torch.testing.assert_close(law.log_prob(law.lower).exp(), at_lower, rtol=0, atol=2e-3)


@each_family
def test_total_probability_is_one(family):
    law = CensoredMarginals(torch.tensor([0.2]), torch.tensor([0.8]), family, -0.5, 0.7)
    density = integral(lambda x: law.log_prob(torch.from_numpy(x)).exp().numpy(), -0.5, 0.7, 0.2)
    masses = law.log_prob(law.lower).exp() + law.log_prob(law.upper).exp()
    assert density + masses.item() == pytest.approx(1.0, abs=1e-10)
    assert law.log_prob(torch.tensor([-0.51])).item() == -INF
    assert law.log_prob(torch.tensor([0.71])).item() == -INF
    value = torch.tensor([-0.51, -0.5, 0.1, 0.69, 0.7, 0.8])
    plain = Marginals(law.loc, law.scale, family).cdf(value)
    assert law.cdf(value).tolist() == [0.0, *plain[1:4].tolist(), 1.0, 1.0]


def test_scores_take_censored_laws():
    loc, scale = leaves(torch.tensor([-0.5, 0.4, 0.2, 0.3]), torch.tensor([1.0, 0.5, 0.0, 1.0]))
    law = CensoredMarginals(loc, scale, NORMAL, torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([INF, 1.0, 1.0, 1.0]))
    dist = SimpleNamespace(marginals=law)
    y = torch.tensor([0.0, 0.3, 0.2, 1.0])
    assert torch.equal(crps(dist, y), law.crps(y))
    assert degenerate(dist).tolist() == [False, False, True, True]
    density = torch.distributions.Normal(0.4, 0.5).log_prob(torch.tensor(0.3))
    expected = torch.tensor([-math.log(scipy.stats.norm.cdf(0.5)), -density, 0.0, 0.0])
    torch.testing.assert_close(nll(dist, y), expected)
    mask = torch.tensor([True, False, True, False])
    broken = torch.where(mask, y, math.nan)
    for score in (crps, nll, pit, coverage):
        full = score(dist, y)
        torch.testing.assert_close(score(dist, broken, mask=mask), torch.where(mask, full, 0.0), rtol=0, atol=0)
    gradients = torch.autograd.grad((nll(dist, broken, mask) + crps(dist, broken, mask)).sum(), (loc, scale))
    assert all(g.isfinite().all() and (g[~mask] == 0).all() for g in gradients)
    half = 0.5 * scipy.stats.norm.cdf(0.5)
    torch.testing.assert_close(pit(dist, y), torch.tensor([half, scipy.stats.norm.cdf(-0.2), 0.5, 0.5]))
    assert coverage(dist, y).tolist() == [1.0, 1.0, 1.0, 1.0]
    assert coverage(dist, torch.tensor([-0.1, 1.1, 0.3, 0.9])).tolist() == [0.0] * 4
    assert nll(dist, torch.tensor([-0.1, 0.3, 0.2, 1.0]))[0].item() == INF
    with pytest.raises(ShapeError):
        crps(dist, torch.zeros(3))


def test_shapes_dtypes_and_bad_bounds():
    lower = torch.zeros(5, 1, 3)
    law = CensoredMarginals(torch.zeros(2, 3), torch.ones(3), LAPLACE, lower, 2.0)
    assert law.batch_shape == law.mean.shape == law.variance.shape == (5, 2, 3)
    assert law.crps(torch.zeros(4, 1, 1, 3)).shape == (4, 5, 2, 3)
    assert law.rsample((7,)).shape == (7, 5, 2, 3)
    single = CensoredMarginals(torch.zeros(3).float(), torch.ones(3).float(), NORMAL, 0.0)
    assert single.mean.dtype == single.variance.dtype == single.crps(torch.ones(3).float()).dtype == torch.float32
    assert single.crps(torch.ones(3)).dtype == torch.float64
    assert single.crps(torch.full((3,), math.nan)).isnan().all()
    for bounds in ((1.0, 0.0), (math.nan, 1.0), (INF, INF), (-INF, -INF)):
        with pytest.raises(ParameterError, match="lower <= upper"):
            CensoredMarginals(torch.zeros(3), torch.ones(3), NORMAL, *bounds)
    with pytest.raises(ShapeError, match="do not broadcast"):
        CensoredMarginals(torch.zeros(3), torch.ones(3), NORMAL, torch.zeros(2))


def test_degrees_of_freedom_as_a_tensor():
    df = torch.tensor([2.5, 5.0, 30.0], dtype=torch.float32)
    loc, scale, y, lower, upper = (t.reshape(4, 3) for t in mixed(12))
    law = CensoredMarginals(loc, scale, student_t(df).independent(), lower, upper)
    for k, each in enumerate(df.tolist()):
        alone = CensoredMarginals(loc[:, k], scale[:, k], student_t(each), lower[:, k], upper[:, k])
        torch.testing.assert_close(law.mean[:, k], alone.mean, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(law.variance[:, k], alone.variance, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(law.crps(y)[:, k], alone.crps(y[:, k]), rtol=1e-11, atol=1e-13)
