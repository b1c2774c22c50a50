"""The incomplete beta function and Student's t against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special
import torch
from torch.autograd import gradcheck, gradgradcheck

from probhard.errors import ParameterError
from probhard.laws.special import (
    betainc,
    log_beta,
    log_gamma_half_step,
    student_t_cdf,
    student_t_icdf,
    student_t_log_density,
    student_t_masses,
)


@pytest.fixture
def plain_dtype() -> torch.dtype:
    """These tests name float64 where they need it."""
    return torch.float32


DEGREES = (0.5, 2.1, 3.0, 5.0, 10.0, 30.0, 100.0, 1e3, 1e4)


def points() -> torch.Tensor:
    size = torch.cat(
        [torch.logspace(-8, 8, 801, dtype=torch.float64), torch.linspace(0.01, 12, 801, dtype=torch.float64)]
    )
    return torch.cat([size, -size, torch.zeros(1).double()])


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (-1, 2.5), (-1, 4), (3, 4)])
def test_betainc_matches_scipy(low, high):
    random = np.random.default_rng(0)
    a, b = 10 ** random.uniform(low, high, (2, 5000))
    x = random.beta(a, b)
    x[::5] = random.uniform(size=x[::5].shape)
    value = betainc(torch.tensor(a), torch.tensor(b), torch.tensor(x))
    np.testing.assert_allclose(value.numpy(), scipy.special.betainc(a, b, x), rtol=1e-10, atol=1e-12)


def test_betainc_limits_and_domain():
    x = torch.tensor([0.0, 1.0, -0.1, 1.1]).double()
    value = betainc(2.0, 3.0, x)
    assert value[:2].tolist() == [0.0, 1.0]
    assert value[2:].isnan().all()


def test_betainc_float32_is_computed_in_float64():
    a, b, x = torch.full((9,), 9e3), torch.full((9,), 8e3), torch.linspace(0.51, 0.55, 9)
    value = betainc(a, b, x)
    assert value.dtype == torch.float32
    exact = scipy.special.betainc(9e3, 8e3, x.double().numpy())
    np.testing.assert_allclose(value.numpy(), exact, rtol=1e-6)


def test_betainc_refuses_gradients():
    x = torch.tensor([0.3], requires_grad=True)
    with pytest.raises(ParameterError, match="value only"):
        betainc(2.0, 3.0, x)
    with torch.no_grad():
        assert betainc(2.0, 3.0, x).item() == pytest.approx(scipy.special.betainc(2, 3, 0.3), rel=1e-6)


def test_log_beta_and_half_step():
    mpmath = pytest.importorskip("mpmath")  # scipy's betaln cancels here; sympy, which torch needs, brings mpmath
    a = torch.logspace(-1, 4, 101, dtype=torch.float64)
    b = a.flip(0)
    with mpmath.workdps(40):
        beta = [float(mpmath.log(mpmath.beta(p, q))) for p, q in zip(a.tolist(), b.tolist())]
        step = [float(mpmath.loggamma(mpmath.mpf(p) + 0.5) - mpmath.loggamma(p)) for p in a.tolist()]
    np.testing.assert_allclose(log_beta(a, b), beta, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(log_gamma_half_step(a), step, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("df", DEGREES)
def test_cdf_matches_scipy(df):
    z = points()
    exact = scipy.special.stdtr(df, z.numpy())
    np.testing.assert_allclose(student_t_cdf(z, df).numpy(), exact, rtol=1e-11, atol=1e-300)
    np.testing.assert_allclose(student_t_cdf(z, df).numpy(), exact, rtol=0, atol=1e-12)
    tensor = student_t_cdf(z, torch.tensor(df, dtype=torch.float64))
    np.testing.assert_allclose(tensor.numpy(), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("df", DEGREES)
def test_float32_cdf_has_all_its_digits(df):
    z = points().float()
    for degrees in (df, torch.tensor(df)):
        inner, outer = student_t_masses(z, degrees)
        exact_inner, exact_outer = student_t_masses(z.double(), degrees)
        np.testing.assert_allclose(inner, exact_inner, rtol=3e-8, atol=1e-300)
        np.testing.assert_allclose(outer, exact_outer, rtol=3e-8, atol=1e-300)
    assert student_t_cdf(z, df).dtype == torch.float32


def test_cdf_of_one_degree_is_the_arctangent():
    z = points()
    np.testing.assert_allclose(student_t_cdf(-z.abs(), 1.0), np.arctan2(1, z.abs().numpy()) / math.pi, rtol=1e-13)


def test_central_mass_keeps_relative_accuracy():
    z = torch.logspace(-100, -1, 50, dtype=torch.float64)
    central = student_t_masses(z, 5.0)[0]
    density = math.exp(scipy.special.gammaln(3) - scipy.special.gammaln(2.5)) / math.sqrt(5 * math.pi)
    small = z < 1e-6
    np.testing.assert_allclose(central[small] / z[small], 2 * density, rtol=1e-11)


@pytest.mark.parametrize("df", [3.0, torch.tensor([3.0, 1e4]).double()])
def test_cdf_at_infinity(df):
    z = torch.tensor([[math.inf], [-math.inf]]).double()
    value = student_t_cdf(z.expand(2, 2), df)
    assert value[0].tolist() == [1.0, 1.0]
    assert value[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("df", DEGREES)
def test_icdf_inverts(df):
    p = torch.cat(
        [
            torch.logspace(-60, -1, 200, dtype=torch.float64),
            torch.linspace(0.01, 0.999, 199, dtype=torch.float64),
        ]
    )
    z = student_t_icdf(p, df)
    np.testing.assert_allclose(student_t_cdf(z, df), p, rtol=1e-11)
    middle = slice(200, None)  # scipy's own inverse fails in far tails of few degrees of freedom
    np.testing.assert_allclose(z[middle], scipy.special.stdtrit(df, p[middle].numpy()), rtol=1e-9, atol=1e-12)


def test_icdf_limits():
    z = student_t_icdf(torch.tensor([0.0, 0.5, 1.0]), 4.0)
    assert z.tolist() == [-math.inf, 0.0, math.inf]
    assert z.dtype == torch.float32


@pytest.mark.parametrize("df", [2.5, 40.0, torch.tensor([2.5, 3.0, 7.0, 40.0, 1e3]).double()])
def test_cdf_derivatives(df):
    z = torch.tensor([-3.0, -0.4, 0.0, 1.0, 2.5]).double().requires_grad_()
    assert gradcheck(lambda t: student_t_cdf(t, df), z, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(lambda t: student_t_cdf(t, df), z)
    (gradient,) = torch.autograd.grad(student_t_cdf(z, df).sum(), z)
    torch.testing.assert_close(gradient, student_t_log_density(z, df).exp())


def test_functional_transforms():
    z = torch.linspace(-3, 3, 7, dtype=torch.float64)
    value, density = student_t_cdf(z, 5.0), student_t_log_density(z, 5.0).exp()
    torch.testing.assert_close(torch.func.vmap(lambda t: student_t_cdf(t, 5.0))(z), value, rtol=0, atol=1e-15)
    jacobian = torch.func.jacrev(lambda t: student_t_cdf(t, 5.0))(z)
    torch.testing.assert_close(jacobian, torch.diag(density))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(lambda t: student_t_cdf(t, 5.0)))(z), density)
    batched = torch.func.vmap(lambda t: betainc(2.0, 3.0, t))(z.abs() / 4)
    torch.testing.assert_close(batched, betainc(2.0, 3.0, z.abs() / 4))
    quantiles = torch.func.vmap(lambda t: student_t_icdf(t, 5.0))(value)
    torch.testing.assert_close(quantiles, z)
