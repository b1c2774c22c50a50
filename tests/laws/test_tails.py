"""Tails of unit laws, masses and partial moments, against high precision and quadrature."""

from __future__ import annotations

import mpmath
import pytest
import torch

from laws.censored_cases import FAMILIES, INF, SCIPY, each_family, integral
from probhard.errors import ParameterError
from probhard.laws.family import LOGISTIC, NORMAL, Family
from probhard.laws.marginals import CensoredMarginals
from probhard.laws.student_t import student_t
from probhard.laws.tails import TAILS, tail_of


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


def test_unknown_family():
    class Other(type(NORMAL)):
        name = "other"

    assert set(TAILS) == {f.name for f in FAMILIES}
    other: Family = Other(exact=True)
    with pytest.raises(ParameterError, match="partial moments of a other law"):
        _ = CensoredMarginals(torch.zeros(1), torch.ones(1), other, 0.0).mean
