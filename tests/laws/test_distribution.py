"""Location-scale laws against torch, scipy and their own draws: moments, draws, densities, shapes."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from torch import distributions as td

from law_cases import (
    DOUBLE,
    FAMILIES,
    KINDS,
    SCIPY,
    UNIT_VARIANCE,
    N,
    covariance,
    each_batch,
    each_family,
    each_kind,
    normal,
    same,
)
from probhard import (
    Diagonal,
    LocationScale,
    LowRank,
    Marginals,
    ParameterError,
    student_t,
)

# ------------------------------------------------------------------------------------------------- moments


@each_kind
@each_family
def test_mean_variance_and_marginals(kind, name):
    cov, dense = covariance(kind, (2,))
    loc, family = normal(2, N, seed=20), FAMILIES[name]
    law = LocationScale(loc, cov, family)
    variance = dense.diagonal(dim1=-2, dim2=-1) * UNIT_VARIANCE[name]
    assert (law.batch_shape, law.event_shape) == ((2,), (N,))
    assert law.feasible is False
    same(law.mean, loc)
    same(law.variance, variance)
    same(law.stddev, variance.sqrt())
    own = law.marginals
    assert own.batch_shape == (2, N)
    same(own.mean, loc)
    same(own.variance, variance)
    oracle = SCIPY[name](loc.numpy(), dense.diagonal(dim1=-2, dim2=-1).sqrt().numpy())
    y = normal(2, N, seed=21)
    np.testing.assert_allclose(own.cdf(y), oracle.cdf(y), rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(own.log_prob(y), oracle.logpdf(y), rtol=1e-8)
    level = torch.linspace(0.1, 0.8, 2 * N, dtype=DOUBLE).reshape(2, N)
    np.testing.assert_allclose(own.icdf(level), oracle.ppf(level), rtol=1e-7, atol=1e-9)


@each_kind
@each_family
def test_moments_of_many_draws(kind, name):
    cov, dense = covariance(kind)
    loc = normal(N, seed=22)
    law = LocationScale(loc, cov, FAMILIES[name])
    draws = law.sample((200_000,), torch.Generator().manual_seed(3))
    spread = law.stddev
    assert ((draws.mean(0) - loc).abs() < 5 * spread / 200_000**0.5 + 1e-12).all()
    expected = dense * UNIT_VARIANCE[name]
    size = (spread.unsqueeze(-1) * spread).clamp(min=1e-12)
    assert (((torch.cov(draws.T) - expected) / size).abs() < 0.03).all()


@each_family
def test_elliptical_families_share_their_mixing(name):
    """Exact families are uncorrelated but dependent; products of coordinates are independent."""
    law = LocationScale(torch.zeros(2, dtype=DOUBLE), Diagonal(torch.ones(2, dtype=DOUBLE)), FAMILIES[name])
    draws = law.sample((200_000,), torch.Generator().manual_seed(4)).abs()
    together = float(torch.corrcoef(draws.T)[0, 1])
    assert law.exact == FAMILIES[name].exact == (name in ("normal", "laplace", "t"))
    if name in ("laplace", "t"):
        assert together > 0.1
    else:
        assert abs(together) < 0.01


@each_kind
@pytest.mark.parametrize("scale", [2.5, -1.5, "vector", "batch"])
def test_affine_maps_every_moment(kind, scale):
    cov, dense = covariance(kind, (3,))
    law = LocationScale(normal(3, N, seed=23), cov, student_t(6.0))
    factor = {"vector": normal(N, seed=24), "batch": normal(3, N, seed=25)}.get(scale, scale)
    shift = normal(3, N, seed=26)
    moved = law.affine(factor, shift)
    full = torch.as_tensor(factor, dtype=DOUBLE).expand(3, N)
    same(moved.mean, full * law.mean + shift)
    same(moved.cov.dense(), full.unsqueeze(-1) * dense * full.unsqueeze(-2))
    same(moved.variance, full**2 * law.variance)
    same(moved.stddev, full.abs() * law.stddev)
    assert moved.family == law.family
    assert (moved.marginals.scale >= 0).all()


def test_affine_of_draws_is_draws_of_affine():
    law = LocationScale(normal(N), covariance("low rank")[0])
    scale, shift = normal(N, seed=27).abs(), normal(N, seed=28)
    first = law.affine(scale, shift).sample((9,), torch.Generator().manual_seed(5))
    same(first, scale * law.sample((9,), torch.Generator().manual_seed(5)) + shift)


# --------------------------------------------------------------------------------------------------- draws


@each_kind
@each_family
def test_shape_and_generator_of_draws(kind, name):
    law = LocationScale(normal(2, N), covariance(kind, (2,))[0], FAMILIES[name])
    state = torch.get_rng_state()
    for shape in [(), (5,), (4, 3)]:
        first = law.rsample(shape, torch.Generator().manual_seed(6))
        assert first.shape == (*shape, 2, N)
        assert first.dtype == DOUBLE
        assert torch.equal(first, law.rsample(shape, torch.Generator().manual_seed(6)))
        assert torch.equal(first, law.sample(torch.Size(shape), torch.Generator().manual_seed(6)))
        assert not torch.equal(first, law.rsample(shape, torch.Generator().manual_seed(7)))
    assert torch.equal(state, torch.get_rng_state())


@each_family
def test_draws_carry_gradients(name):
    loc = normal(N).requires_grad_()
    factor = normal(N, 2, seed=1).requires_grad_()
    diagonal = (normal(N, seed=2).abs() + 0.2).requires_grad_()

    def draws(loc, factor, diagonal):
        law = LocationScale(loc, LowRank(factor, diagonal), FAMILIES[name])
        return law.rsample((3,), torch.Generator().manual_seed(8))

    assert torch.autograd.gradcheck(draws, (loc, factor, diagonal))
    assert not LocationScale(loc, LowRank(factor, diagonal), FAMILIES[name]).sample((3,)).requires_grad


def test_marginals_draw_independently():
    cov, dense = covariance("dense")
    draws = LocationScale(normal(N), cov).marginals.sample((100_000,))
    correlation = torch.corrcoef(draws.T) - torch.eye(N, dtype=DOUBLE)
    assert correlation.abs().max() < 0.02
    torch.testing.assert_close(draws.var(0), dense.diagonal(), rtol=0.03, atol=0)


def test_a_point_mass_among_the_marginals():
    own = Marginals(torch.tensor([1.0, 1.0], dtype=DOUBLE), torch.tensor([0.0, 2.0], dtype=DOUBLE))
    below, at = torch.tensor([0.5, 0.5], dtype=DOUBLE), torch.tensor([1.0, 1.0], dtype=DOUBLE)
    assert own.cdf(below)[0] == 0.0
    assert own.cdf(at).tolist() == [0.5, 0.5]
    assert own.icdf(torch.tensor(0.0, dtype=DOUBLE))[0] == 1.0
    assert own.crps(below)[0] == 0.5
    assert (own.sample((10,))[:, 0] == 1.0).all()


# ------------------------------------------------------------------------------------------------- densities


@pytest.mark.parametrize("kind", KINDS[:-1])
@each_batch
def test_normal_density_is_torchs(kind, batch):
    cov, dense = covariance(kind, batch)
    loc = normal(*batch, N, seed=30)
    law, oracle = LocationScale(loc, cov), td.MultivariateNormal(loc, dense)
    for leading in [(), (5,)]:
        y = normal(*leading, *batch, N, seed=31)
        same(law.log_prob(y), oracle.log_prob(y))


def test_low_rank_normal_density_is_torchs():
    cov, _ = covariance("low rank", (3,))
    loc, y = normal(3, N, seed=32), normal(6, 3, N, seed=33)
    oracle = td.LowRankMultivariateNormal(loc, cov.factor, cov.diagonal_part)
    same(LocationScale(loc, cov).log_prob(y), oracle.log_prob(y))


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("df", [2.5, 9.0])
def test_student_density_is_scipys(kind, df):
    cov, dense = covariance(kind)
    loc, y = normal(N, seed=34), normal(7, N, seed=35)
    oracle = scipy.stats.multivariate_t(loc.numpy(), dense.numpy(), df=df)
    np.testing.assert_allclose(LocationScale(loc, cov, student_t(df)).log_prob(y), oracle.logpdf(y.numpy()), rtol=1e-10)


def test_student_density_with_one_df_per_batch_element():
    cov, dense = covariance("dense", (3,))
    loc, y = normal(3, N, seed=36), normal(3, N, seed=37)
    df = torch.tensor([[3.0], [5.0], [20.0]], dtype=DOUBLE)
    density = LocationScale(loc, cov, student_t(df)).log_prob(y)
    expected = [
        scipy.stats.multivariate_t(loc[i].numpy(), dense[i].numpy(), df=float(df[i])).logpdf(y[i].numpy())
        for i in range(3)
    ]
    assert density.shape == (3,)
    np.testing.assert_allclose(density, expected, rtol=1e-10)


@pytest.mark.parametrize("name", ["independent t", "independent laplace", "logistic", "uniform"])
def test_density_of_a_product_is_the_sum_of_its_marginals(name):
    cov, dense = covariance("diagonal", (2,))
    loc = normal(2, N, seed=38)
    y = loc + 0.3 * dense.diagonal(dim1=-2, dim2=-1).sqrt()
    oracle = SCIPY[name](loc.numpy(), dense.diagonal(dim1=-2, dim2=-1).sqrt().numpy())
    density = LocationScale(loc, cov, FAMILIES[name]).log_prob(y)
    np.testing.assert_allclose(density, oracle.logpdf(y.numpy()).sum(-1), rtol=1e-9)


@pytest.mark.parametrize("name", ["laplace", "logistic", "uniform", "independent t", "independent laplace"])
def test_a_density_that_does_not_exist_is_refused(name):
    law = LocationScale(normal(N), covariance("dense")[0], FAMILIES[name])
    with pytest.raises(ParameterError, match=FAMILIES[name].name):
        law.log_prob(normal(N, seed=1))


# ------------------------------------------------------------------------------------------------------ expand


@pytest.mark.parametrize("kind", KINDS)
def test_expand_repeats_the_law(kind):
    cov, dense = covariance(kind)
    law = LocationScale(normal(N), cov, student_t(5.0)).expand((2, 3))
    assert (law.batch_shape, law.event_shape) == ((2, 3), (N,))
    same(law.mean, normal(N).expand(2, 3, N))
    draws = law.sample((4,), torch.Generator().manual_seed(0))
    assert draws.shape == (4, 2, 3, N)
    assert not torch.equal(draws[:, 0, 0], draws[:, 1, 2])
    if kind != "projected":
        oracle = scipy.stats.multivariate_t(normal(N).numpy(), dense.numpy(), df=5.0)
        np.testing.assert_allclose(law.log_prob(draws), oracle.logpdf(draws.numpy()), rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_have_the_shape_of_the_law(kind):
    """As in torch.distributions: mean, variance and stddev are (*batch, n), whatever was broadcast."""
    cov, dense = covariance(kind)
    expanded = LocationScale(normal(N), cov).expand((3,))
    for law in (expanded, LocationScale(normal(3, N), cov)):
        for moment in (law.mean, law.variance, law.stddev, law.marginals.mean, law.marginals.variance):
            assert moment.shape == (3, N)
        same(law.variance[2], dense.diagonal())
