"""Censored marginals against quadrature, high precision, scoringrules in NumPy, draws and finite differences."""

from __future__ import annotations

import itertools
import math
import shutil
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
import scipy.stats
import scoringrules
import torch
from torch.autograd import gradcheck, gradgradcheck

from probhard.errors import ParameterError, ShapeError
from probhard.laws.distribution import Marginals
from probhard.laws.family import LAPLACE, LOGISTIC, NORMAL, UNIFORM, Family
from probhard.laws.marginals import CensoredMarginals
from probhard.laws.student_t import student_t
from probhard.laws.tails import TAILS, tail_of
from probhard.score import coverage, crps, crps_ensemble, degenerate, nll, pit

INF = math.inf
FAMILIES = [NORMAL, LAPLACE, LOGISTIC, UNIFORM, student_t(5.0), student_t(2.5)]
SCIPY = {
    "normal": lambda f: scipy.stats.norm,
    "laplace": lambda f: scipy.stats.laplace,
    "logistic": lambda f: scipy.stats.logistic,
    "uniform": lambda f: lambda loc, scale: scipy.stats.uniform(loc - scale, 2 * scale),
    "student-t": lambda f: lambda loc, scale: scipy.stats.t(f.df, loc, scale),
}
BOUNDS = [(-1.0, 1.0), (0.0, INF), (-INF, 0.5), (-INF, INF), (0.3, 0.9), (-2.0, -1.4), (0.2, 0.2)]
POINTS = [(0.1, 0.8), (-0.9, 1.3), (1.7, 0.6), (0.3, 1.0), (-0.2, 3.0)]  # loc, scale
TARGETS = [-2.5, 0.0, 0.25, 0.7, 3.0]

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.name}{getattr(f, 'df', '')}")
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


NODES, WEIGHTS = np.polynomial.legendre.leggauss(24)


def integral(function, low: float, high: float, *breaks: float) -> float:
    """Composite Gauss-Legendre rule; infinite pieces in the logarithm of the distance to their finite end."""
    total, knots = 0.0, [low, *sorted(b for b in breaks if low < b < high), high]
    for a, b in itertools.pairwise(knots):
        infinite = math.isinf(a) or math.isinf(b)
        edges = np.linspace(-45, 90, 121) if infinite else np.linspace(a, b, 13)
        half = np.diff(edges)[:, None] / 2
        x, weight = (edges[:-1, None] + half + half * NODES).ravel(), (half * WEIGHTS).ravel()
        if infinite:
            x, weight = (a + np.exp(x) if math.isinf(b) else b - np.exp(x)), weight * np.exp(x)
        total += float(np.sum(weight * function(x)))
    return total


def grid() -> tuple[torch.Tensor, ...]:
    """loc, scale, lower, upper and y: every combination of the tables above."""
    rows = [(*point, *bounds, y) for point in POINTS for bounds in BOUNDS for y in TARGETS]
    return tuple(torch.tensor(column) for column in zip(*rows))


def mixed(n: int = 60) -> tuple[torch.Tensor, ...]:
    """loc, scale, y, lower, upper with loc and y on either side of the bounds, none at a kink."""
    loc, y, lower = 1.5 * torch.randn(3, n)
    return loc, 0.4 + torch.rand(n), y, lower, lower + 0.2 + 2 * torch.rand(n)


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


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


@pytest.mark.parametrize("depth", [0.0, 0.4, 3.0, 10.0, 25.0])
def test_tails_keep_their_digits(depth):
    """``first``, ``second`` and ``square`` by their closed forms with fifty digits, relative error."""
    t = torch.tensor([-depth])
    with mpmath.workdps(60):
        x, pi = mpmath.mpf(-depth), mpmath.pi
        mass, density = mpmath.erfc(-x / mpmath.sqrt(2)) / 2, mpmath.exp(-x * x / 2) / mpmath.sqrt(2 * pi)
        power = x * mass**2 + 2 * density * mass - mpmath.erfc(-x) / 2 / mpmath.sqrt(pi)
        odds = mpmath.exp(x)
        exact = {
            NORMAL: (mass, x * mass + density, (x * x + 1) * mass + x * density, power),
            LOGISTIC: (
                odds / (1 + odds),
                mpmath.log1p(odds),
                -2 * mpmath.polylog(2, -odds),
                mpmath.log1p(odds) - odds / (1 + odds),
            ),
        }
        for family, values in exact.items():
            tail = tail_of(family, t)
            for result, value in zip((tail.mass, tail.first, tail.second(), tail.square()), values):
                assert result.item() == pytest.approx(float(value), rel=1e-9, abs=0), family.name


@each_family
def test_partial_moments_are_integrals_of_each_other(family):
    law = SCIPY[family.name](family)(0.0, 1.0)
    for t in (-4.0, -0.6, 0.0):
        tail, low = tail_of(family, torch.tensor([t])), law.support()[0]
        oracle = {
            "mass": law.cdf(t),
            "first": integral(law.cdf, low, max(t, low)),
            "square": integral(lambda x: law.cdf(x) ** 2, low, max(t, low)),
        }
        for name, exact in oracle.items():
            part = getattr(tail, name)
            value = part() if callable(part) else part
            assert value.item() == pytest.approx(exact, rel=1e-8, abs=1e-13), name


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


@pytest.mark.parametrize("z", [-40.0, -30.0, -5.0, 0.0, 3.0])
@each_family
def test_log_masses_in_the_tails(family, z):
    with mpmath.workdps(50):
        x = mpmath.mpf(z)
        half = mpmath.mpf(getattr(family, "df", 5.0)) / 2
        outer = mpmath.betainc(half, 0.5, 0, 2 * half / (2 * half + x * x), regularized=True) / 2
        mass = {
            "normal": lambda: mpmath.ncdf(x),
            "laplace": lambda: mpmath.exp(x) / 2 if x < 0 else 1 - mpmath.exp(-x) / 2,
            "logistic": lambda: 1 / (1 + mpmath.exp(-x)),
            "uniform": lambda: min(max((x + 1) / 2, mpmath.mpf(0)), mpmath.mpf(1)),
            "student-t": lambda: outer if x < 0 else 1 - outer,
        }[family.name]()
        exact = float(mpmath.log(mass)) if mass > 0 else -INF
    scale = torch.tensor([2.0], requires_grad=True)
    left = CensoredMarginals(torch.tensor([-2 * z]), scale, family, lower=0.0).log_prob(torch.zeros(1))
    right = CensoredMarginals(torch.tensor([2 * z]), scale, family, upper=0.0).log_prob(torch.zeros(1))
    for value in (left, right):
        assert value.item() == pytest.approx(exact, rel=1e-12)
        (gradient,) = torch.autograd.grad(value.sum(), scale)
        assert gradient.isfinite().all()


def test_log_mass_of_a_light_student_tail_that_underflows():
    family = student_t(400.0)
    with mpmath.workdps(50):
        outer = mpmath.betainc(200, 0.5, 0, mpmath.mpf(400) / (400 + 250**2), regularized=True) / 2
    loc = torch.tensor([-250.0], requires_grad=True)
    value = CensoredMarginals(loc, torch.ones(1), family, upper=0.0, lower=-INF).log_prob(torch.zeros(1))
    (gradient,) = torch.autograd.grad(value.sum(), loc)
    assert value.item() == pytest.approx(float(mpmath.log(outer)), abs=1e-2)
    assert gradient.item() == pytest.approx(400 / 250, rel=1e-2)


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


def test_unknown_family():
    class Other(type(NORMAL)):
        name = "other"

    assert set(TAILS) == {f.name for f in FAMILIES}
    other: Family = Other(exact=True)
    with pytest.raises(ParameterError, match="partial moments of a other law"):
        _ = CensoredMarginals(torch.zeros(1), torch.ones(1), other, 0.0).mean


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
