"""Unit laws, their CRPS and their draws against scipy, scoringrules and quadrature."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import scoringrules
import torch
from torch.autograd import gradcheck, gradgradcheck

from probhard.errors import ParameterError, ShapeError
from probhard.laws.family import LAPLACE, LOGISTIC, NORMAL, UNIFORM, Family
from probhard.laws.student_t import student_t


@pytest.fixture
def plain_dtype() -> torch.dtype:
    """These tests name float64 where they need it."""
    return torch.float32


T5 = student_t(5.0)
FAMILIES = [NORMAL, LAPLACE, LOGISTIC, UNIFORM, T5, student_t(2.5)]
SCIPY = {
    "normal": lambda f: scipy.stats.norm(),
    "laplace": lambda f: scipy.stats.laplace(),
    "logistic": lambda f: scipy.stats.logistic(),
    "uniform": lambda f: scipy.stats.uniform(-1, 2),
    "student-t": lambda f: scipy.stats.t(f.df),
}
ORACLE = {
    "normal": lambda f, y, loc, scale: scoringrules.crps_normal(y, loc, scale),
    "laplace": lambda f, y, loc, scale: scoringrules.crps_laplace(y, loc, scale),
    "logistic": lambda f, y, loc, scale: scoringrules.crps_logistic(y, loc, scale),
    "uniform": lambda f, y, loc, scale: scoringrules.crps_uniform(y, loc - scale, loc + scale),
    "student-t": lambda f, y, loc, scale: scoringrules.crps_t(y, f.df, loc, scale),
}


def label(family: Family) -> str:
    return f"{family.name}{getattr(family, 'df', '')}"


each_family = pytest.mark.parametrize("family", FAMILIES, ids=label)


def triple(n: int = 200, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    loc, y = (3 * torch.randn(n, dtype=torch.float64, generator=generator) for _ in range(2))
    return loc, torch.rand(n, dtype=torch.float64, generator=generator) * 3 + 0.3, y


@each_family
def test_law_matches_scipy(family):
    law = SCIPY[family.name](family)
    z = torch.linspace(-9, 9, 301, dtype=torch.float64)
    p = torch.cat(
        [
            torch.logspace(-30, -2, 50, dtype=torch.float64),
            torch.linspace(0.02, 0.99, 50, dtype=torch.float64),
        ]
    )
    np.testing.assert_allclose(family.cdf(z), law.cdf(z.numpy()), rtol=1e-11, atol=1e-13)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(family.log_density(z), law.logpdf(z.numpy()), rtol=1e-11)
    np.testing.assert_allclose(family.icdf(p), law.ppf(p.numpy()), rtol=1e-8, atol=1e-10)
    assert float(family.unit_variance) == pytest.approx(float(law.var()), rel=1e-12)


@each_family
def test_limits_at_infinity(family):
    z = torch.tensor([-math.inf, math.inf]).double()
    assert family.cdf(z).tolist() == [0.0, 1.0]
    assert family.log_density(z).tolist() == [-math.inf, -math.inf]
    slope, spread = family.crps_terms(z)
    assert slope.tolist() == [-1.0, 1.0]
    mean_distance = scipy.integrate.quad(lambda x: 2 * family.cdf(torch.tensor(x).double()).item() ** 2, -np.inf, 0)[0]
    bound = 2 * scipy.integrate.quad(lambda x: family.cdf(torch.tensor(x).double()).item(), -np.inf, 0)[0]
    # E|X - X'| / 2 is the integral of F (1 - F), here by symmetry twice its left half.
    np.testing.assert_allclose(spread, mean_distance - bound, rtol=1e-7)
    torch.testing.assert_close(family.crps_spread(z), spread, rtol=0, atol=0)


@each_family
def test_crps_matches_scoringrules(family):
    loc, scale, y = triple()
    oracle = ORACLE[family.name](family, y.numpy(), loc.numpy(), scale.numpy())
    np.testing.assert_allclose(family.crps(loc, scale, y), oracle, rtol=1e-10, atol=1e-13)


@each_family
@pytest.mark.parametrize("z", [-4.0, -0.7, 0.0, 0.3, 2.0])
def test_crps_matches_quadrature(family, z):
    law = SCIPY[family.name](family)
    left = scipy.integrate.quad(lambda x: law.cdf(x) ** 2, -np.inf, z, epsabs=1e-11, limit=200)[0]
    right = scipy.integrate.quad(lambda x: law.sf(x) ** 2, z, np.inf, epsabs=1e-11, limit=200)[0]
    value = family.crps(torch.zeros(1).double(), torch.ones(1).double(), torch.tensor([z]).double())
    assert value.item() == pytest.approx(left + right, rel=1e-7)


@each_family
def test_crps_derivatives(family):
    loc, scale, y = (t.requires_grad_() for t in triple(7))
    assert gradcheck(family.crps, (loc, scale, y), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(family.crps, (loc, scale, y))


@each_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_scale_is_the_absolute_error(family, dtype):
    loc = torch.tensor([1.0, -2.0, 0.5], dtype=dtype, requires_grad=True)
    scale = torch.zeros(3, dtype=dtype, requires_grad=True)
    y = torch.tensor([3.0, -5.0, 0.5], dtype=dtype)
    value = family.crps(loc, scale, y)
    assert value.tolist() == [2.0, 3.0, 0.0]
    to_loc, to_scale = torch.autograd.grad(value.sum(), (loc, scale))
    assert to_loc.tolist() == [-1.0, 1.0, 0.0]
    far = family.crps_spread(torch.tensor([math.inf, 0.0], dtype=dtype))
    torch.testing.assert_close(to_scale, far[[0, 0, 1]], rtol=0, atol=0)
    assert far.isfinite().all()


@each_family
def test_float32_sweep_of_scales(family):
    exponents = torch.linspace(-45, 30, 301, dtype=torch.float64)
    scale = (10**exponents).float().requires_grad_()
    loc = torch.zeros_like(scale).requires_grad_()
    value = family.crps(loc, scale, torch.ones_like(scale))
    to_loc, to_scale = torch.autograd.grad(value.sum(), (loc, scale))
    wide = scale.detach().double().clamp_min(1e-38)
    slope, spread = family.crps_terms(-1 / wide)
    for result, exact in ((value, -slope + wide * spread), (to_loc, slope), (to_scale, spread)):
        assert result.isfinite().all()
        np.testing.assert_allclose(result.detach(), exact, rtol=2e-5, atol=1e-6)
    if family is NORMAL:
        assert to_scale[0].item() == pytest.approx(-1 / math.sqrt(math.pi), rel=1e-6)


@each_family
def test_score_and_gradient_penalty_in_one_loss(family):
    def penalised(loc: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = family.crps(loc, scale, y)
        gradients = torch.autograd.grad(value.sum(), (loc, scale), create_graph=True)
        return value + sum(t.square() for t in gradients)

    assert gradcheck(penalised, tuple(t.requires_grad_() for t in triple(7)))


def test_second_order_is_finite_at_scale_zero():
    for family in FAMILIES:
        scale = torch.tensor([0.0, 1e-44, 1e-30], requires_grad=True)
        loc = torch.tensor([5.0, 5.0, 5.0], requires_grad=True)
        first = torch.autograd.grad(family.crps(loc, scale, torch.zeros(3)).sum(), (loc, scale), create_graph=True)
        second = torch.autograd.grad(sum(t.sum() for t in first), (loc, scale))
        assert all(t.isfinite().all() for t in second), family


def test_nan_is_not_hidden():
    one, nan = torch.ones(1), torch.full((1,), math.nan)
    for arguments in ((nan, one, one), (one, nan, one), (one, one, nan)):
        assert NORMAL.crps(*arguments).isnan().all()


def test_crps_broadcasts_and_promotes():
    loc, scale, y = (
        torch.zeros(4, 1, 3, requires_grad=True),
        torch.ones(3, requires_grad=True),
        torch.randn(2, 3).double(),
    )
    value = NORMAL.crps(loc, scale, y)
    assert value.shape == (4, 2, 3)
    assert value.dtype == torch.float64
    value.sum().backward()
    assert loc.grad.shape == loc.shape
    assert scale.grad.dtype == torch.float32


@each_family
def test_functional_transforms(family):
    loc, scale, y = triple(5)
    value = family.crps(loc, scale, y)
    leaves = [t.clone().requires_grad_() for t in (loc, scale, y)]
    gradients = torch.autograd.grad(family.crps(*leaves).sum(), leaves)
    torch.testing.assert_close(torch.func.vmap(family.crps)(loc, scale, y), value)
    torch.testing.assert_close(
        torch.func.vmap(family.crps, in_dims=(None, 0, None))(loc, scale[:, None].expand(5, 5), y),
        family.crps(loc.expand(5, 5), scale[:, None].expand(5, 5), y.expand(5, 5)),
    )
    for position in range(3):
        for transform in (torch.func.jacrev, torch.func.jacfwd):
            jacobian = transform(family.crps, position)(loc, scale, y)
            torch.testing.assert_close(jacobian, torch.diag(gradients[position]))
    each = torch.func.vmap(torch.func.grad(family.crps, argnums=1))(loc, scale, y)
    torch.testing.assert_close(each, gradients[1])
    hessian = torch.func.hessian(lambda s: family.crps(loc, s, y).sum())(scale)
    reverse = torch.autograd.functional.hessian(lambda s: family.crps(loc, s, y).sum(), scale)
    torch.testing.assert_close(hessian, reverse)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("family", [NORMAL, LAPLACE, student_t(3.0)], ids=label)
def test_compiled(family):
    loc, scale, y = (t.requires_grad_() for t in triple(20))
    compiled = torch.compile(lambda *t: (family.crps(*t) + family.cdf(t[0])).sum(), fullgraph=True)
    expected = torch.autograd.grad((family.crps(loc, scale, y) + family.cdf(loc)).sum(), (loc, scale, y))
    for result, exact in zip(torch.autograd.grad(compiled(loc, scale, y), (loc, scale, y)), expected):
        torch.testing.assert_close(result, exact)


@each_family
@pytest.mark.parametrize("independent", [False, True])
def test_draws_follow_the_law(family, independent):
    family = family.independent() if independent else family
    generator = torch.Generator().manual_seed(7)
    draws = family.sample((200, 100), 2, torch.float64, "cpu", generator)
    assert draws.shape == (200, 100, 2)
    law = SCIPY[family.name](family)
    first = draws[..., 0].flatten().numpy()
    assert scipy.stats.kstest(first, law.cdf).pvalue > 1e-3
    if getattr(family, "df", 9.0) > 4:  # else the sample variance itself has no variance
        assert draws.var().item() == pytest.approx(family.unit_variance, rel=0.08)
    again = family.sample((200, 100), 2, torch.float64, "cpu", torch.Generator().manual_seed(7))
    assert torch.equal(draws, again)
    x, y = draws.flatten(0, 1).clamp(-6, 6).T.numpy()
    assert abs(np.corrcoef(x, y)[0, 1]) < 0.03
    dependence = np.corrcoef(np.abs(x), np.abs(y))[0, 1]
    shared = family.exact and family != NORMAL
    assert dependence > 0.1 if shared else abs(dependence) < 0.03


def test_draws_leave_the_global_generator_alone():
    for family in FAMILIES:
        state = torch.random.get_rng_state()
        family.sample((3,), 2, generator=torch.Generator().manual_seed(0))
        assert torch.equal(state, torch.random.get_rng_state()), family


def test_float32_draws_are_finite():
    for family in FAMILIES:
        draws = family.sample((1000,), 1000, torch.float32, generator=torch.Generator().manual_seed(1))
        assert draws.dtype == torch.float32
        assert draws.isfinite().all()


def test_families_are_values():
    assert student_t(5) == T5
    assert hash(student_t(5.0)) == hash(T5)
    assert student_t(6.0) != T5
    assert LAPLACE.independent() != LAPLACE
    assert LAPLACE.independent() == LAPLACE.independent()
    assert T5.independent() not in {T5, LAPLACE}
    assert NORMAL.independent() is NORMAL
    assert NORMAL != LAPLACE
    assert [f.exact for f in (NORMAL, LAPLACE, T5, LOGISTIC, UNIFORM)] == [True, True, True, False, False]
    df = torch.tensor([3.0, 4.0])
    assert student_t(df) == student_t(df)
    assert student_t(df) != student_t(df.clone())


def test_degrees_of_freedom_as_a_tensor():
    df = torch.tensor([2.5, 5.0, 300.0]).double()
    family = student_t(df).independent()
    loc, scale, y = (t.reshape(4, 3) for t in triple(12))
    value = family.crps(loc, scale, y)
    for k, each in enumerate(df.tolist()):
        alone = student_t(each).crps(loc[:, k], scale[:, k], y[:, k])
        torch.testing.assert_close(value[:, k], alone, rtol=1e-12, atol=1e-14)
    assert family.crps(loc[0, :1], scale[0, :1], y[0, :1]).shape == (3,)
    torch.testing.assert_close(family.unit_variance, df / (df - 2))
    draws = family.sample((20000,), 3, torch.float64, generator=torch.Generator().manual_seed(3))
    assert scipy.stats.kstest(draws[:, 2].numpy(), scipy.stats.t(300).cdf).pvalue > 1e-3
    with pytest.raises(ShapeError, match="independent"):
        student_t(df).sample((4,), 3, torch.float64)
    assert student_t(df[:, None]).sample((3,), 6, torch.float64).shape == (3, 6)


@pytest.mark.parametrize("df", [2.0, 1.0, -3.0, math.nan, math.inf, torch.tensor([3.0, 2.0])])
def test_a_variance_must_exist(df):
    with pytest.raises(ParameterError, match="variance does not exist"):
        student_t(df)


def test_degrees_of_freedom_are_constant():
    with pytest.raises(ParameterError, match="gradient"):
        student_t(torch.tensor([3.0], requires_grad=True))
