"""Covariances against their dense twins, and location-scale laws against torch, scipy and their own draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import distributions as td

from probhard import (
    DPPL,
    LAPLACE,
    LOGISTIC,
    NORMAL,
    UNIFORM,
    Dense,
    Diagonal,
    LinearEquality,
    LocationScale,
    LowRank,
    Marginals,
    ParameterError,
    ProjectedCovariance,
    ShapeError,
    as_location_scale,
    marginals,
    student_t,
)
from probhard.laws.covariance import matvec, safe_sqrt

DOUBLE = torch.float64
N = 4
FAMILIES = {
    "normal": NORMAL,
    "laplace": LAPLACE,
    "logistic": LOGISTIC,
    "uniform": UNIFORM,
    "t": student_t(7.0),
    "independent t": student_t(7.0).independent(),
    "independent laplace": LAPLACE.independent(),
}
UNIT_VARIANCE = {
    "normal": 1.0,
    "laplace": 2.0,
    "logistic": math.pi**2 / 3,
    "uniform": 1 / 3,
    "t": 7 / 5,
    "independent t": 7 / 5,
    "independent laplace": 2.0,
}
SCIPY = {
    "normal": scipy.stats.norm,
    "laplace": scipy.stats.laplace,
    "logistic": scipy.stats.logistic,
    "uniform": lambda loc, scale: scipy.stats.uniform(loc - scale, 2 * scale),
    "t": lambda loc, scale: scipy.stats.t(7, loc, scale),
    "independent t": lambda loc, scale: scipy.stats.t(7, loc, scale),
    "independent laplace": scipy.stats.laplace,
}
KINDS = ["diagonal", "stddev", "low rank", "dense", "projected"]
each_kind = pytest.mark.parametrize("kind", KINDS)
each_family = pytest.mark.parametrize("name", FAMILIES)
each_batch = pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def covariance(kind: str, batch: tuple[int, ...] = (), n: int = N, seed: int = 0):
    """A covariance and the dense matrix it stands for, computed here."""
    positive = normal(*batch, n, seed=seed).abs() + 0.3
    if kind == "diagonal":
        return Diagonal(positive), torch.diag_embed(positive)
    if kind == "stddev":
        return Diagonal.from_stddev(positive), torch.diag_embed(positive**2)
    if kind == "low rank":
        factor = normal(*batch, n, 2, seed=seed + 1)
        return LowRank(factor, positive), factor @ factor.mT + torch.diag_embed(positive)
    root = normal(*batch, n, n, seed=seed + 2).tril(-1) + torch.diag_embed(positive)
    if kind == "dense":
        return Dense(root), root @ root.mT
    rows = normal(2, n, seed=seed + 3)
    base = Dense(root)
    projected = DPPL("orthogonal")(LocationScale(normal(*batch, n), base), LinearEquality(rows)).cov
    assert isinstance(projected, ProjectedCovariance)
    P = torch.eye(n, dtype=DOUBLE) - torch.linalg.pinv(rows) @ rows
    return projected, P @ (root @ root.mT) @ P.mT


def same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-11) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------------------------- covariances


@each_kind
@each_batch
def test_products_are_those_of_the_dense_matrix(kind, batch):
    cov, dense = covariance(kind, batch)
    assert cov.shape == (*batch, N)
    assert (cov.dtype, cov.device.type) == (DOUBLE, "cpu")
    same(cov.dense(), dense)
    same(cov.diagonal(), dense.diagonal(dim1=-2, dim2=-1))
    cov.validate()
    for leading in [(), (5,), (5, 2)]:
        x = normal(*leading, *batch, N, seed=9)
        same(cov.apply(x), (dense @ x.unsqueeze(-1)).squeeze(-1))
    columns = normal(*batch, N, 3, seed=10)
    same(cov.matmul(columns), dense @ columns)
    vector = normal(N, seed=11)
    same(cov.matmul(vector), dense @ vector)


@each_kind
@each_batch
def test_root_times_its_transpose_is_the_matrix(kind, batch):
    cov, dense = covariance(kind, batch)
    eye = torch.eye(cov.root_size, dtype=DOUBLE).expand(*batch, -1, -1)
    root = cov.root_matmul(eye)  # (*batch, n, root)
    assert root.shape == (*batch, N, cov.root_size)
    same(root @ root.mT, dense)
    noise = normal(6, *batch, cov.root_size, seed=12)
    same(cov.root(noise), (root @ noise.unsqueeze(-1)).squeeze(-1))


@each_kind
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_matmul_broadcasts_as_torch_does(kind, columns):
    cov, dense = covariance(kind, (3,))
    shared = normal(N, columns, seed=13)  # one right-hand side for the whole batch
    same(cov.matmul(shared), dense @ shared)
    eye = torch.eye(cov.root_size, dtype=DOUBLE)
    root = cov.root_matmul(eye)
    same(root @ root.mT, dense)


@each_kind
@each_batch
def test_scaling_both_sides(kind, batch):
    cov, dense = covariance(kind, batch)
    for scale in (normal(N, seed=14), normal(*batch, N, seed=15)):
        assert (scale < 0).any()
        twice = cov.scaled(scale).scaled(scale)
        same(cov.scaled(scale).dense(), scale.unsqueeze(-1) * dense * scale.unsqueeze(-2))
        same(cov.scaled(scale).diagonal(), scale**2 * dense.diagonal(dim1=-2, dim2=-1))
        same(twice.dense(), scale.unsqueeze(-1) ** 2 * dense * scale.unsqueeze(-2) ** 2)


@pytest.mark.parametrize("kind", KINDS[:-1])
@each_batch
def test_quadratic_and_log_determinant(kind, batch):
    cov, dense = covariance(kind, batch)
    same(cov.log_determinant(), torch.logdet(dense))
    for leading in [(), (5,)]:
        x = normal(*leading, *batch, N, seed=16)
        same(cov.quadratic(x), (x * torch.linalg.solve(dense, x.unsqueeze(-1)).squeeze(-1)).sum(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_to_changes_the_dtype_only(kind):
    cov, dense = covariance(kind, (2,))
    single = cov.to(torch.float32)
    assert type(single) is type(cov)
    assert single.dtype == single.dense().dtype == torch.float32
    torch.testing.assert_close(single.dense(), dense.float(), rtol=1e-5, atol=1e-5)


def test_low_rank_broadcasts_its_parts():
    factor, diagonal = normal(N, 2), normal(3, N, seed=1).abs() + 0.1
    cov = LowRank(factor, diagonal)
    dense = factor @ factor.mT + torch.diag_embed(diagonal)
    assert cov.shape == (3, N)
    same(cov.dense(), dense)
    same(cov.diagonal(), dense.diagonal(dim1=-2, dim2=-1))


def test_matvec_for_every_pair_of_batches():
    for batch in [(), (3,), (2, 3)]:
        matrix = normal(*batch, 2, N)
        for shape in [(N,), (*batch, N), (5, *batch, N), (6, 5, *batch, N)]:
            x = normal(*shape, seed=1)
            same(matvec(matrix, x), (matrix @ x.unsqueeze(-1)).squeeze(-1))


def test_safe_sqrt_has_no_infinite_gradient():
    x = torch.tensor([4.0, 0.25, 0.0, -1.0], dtype=DOUBLE, requires_grad=True)
    root = safe_sqrt(x)
    root.sum().backward()
    assert root.tolist() == [2.0, 0.5, 0.0, 0.0]
    assert x.grad.tolist() == [0.25, 1.0, 0.0, 0.0]


def test_a_zero_stddev_keeps_its_gradient():
    stddev = torch.tensor([0.0, 1.0], dtype=DOUBLE, requires_grad=True)
    Diagonal.from_stddev(stddev).root(torch.tensor([3.0, 5.0], dtype=DOUBLE)).sum().backward()
    assert stddev.grad.tolist() == [3.0, 5.0]


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
    found = LocationScale(loc, cov, student_t(df)).log_prob(y)
    expected = [
        scipy.stats.multivariate_t(loc[i].numpy(), dense[i].numpy(), df=float(df[i])).logpdf(y[i].numpy())
        for i in range(3)
    ]
    assert found.shape == (3,)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("name", ["independent t", "independent laplace", "logistic", "uniform"])
def test_density_of_a_product_is_the_sum_of_its_marginals(name):
    cov, dense = covariance("diagonal", (2,))
    loc = normal(2, N, seed=38)
    y = loc + 0.3 * dense.diagonal(dim1=-2, dim2=-1).sqrt()
    oracle = SCIPY[name](loc.numpy(), dense.diagonal(dim1=-2, dim2=-1).sqrt().numpy())
    found = LocationScale(loc, cov, FAMILIES[name]).log_prob(y)
    np.testing.assert_allclose(found, oracle.logpdf(y.numpy()).sum(-1), rtol=1e-9)


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


# ------------------------------------------------------------------------------------------ reading other laws

LOC, SCALE = normal(3, N, seed=40), normal(3, N, seed=41).abs() + 0.2
ROOT = normal(3, N, N, seed=42).tril(-1) + torch.diag_embed(SCALE)
READ = {  # a law, its family's name, whether it is exact
    "normal": (td.Normal(LOC, SCALE), "normal", True),
    "independent normal": (td.Independent(td.Normal(LOC, SCALE), 1), "normal", True),
    "mvn": (td.MultivariateNormal(LOC, scale_tril=ROOT), "normal", True),
    "mvn by covariance": (td.MultivariateNormal(LOC, ROOT @ ROOT.mT), "normal", True),
    "mvn by precision": (td.MultivariateNormal(LOC, precision_matrix=ROOT @ ROOT.mT), "normal", True),
    "low-rank mvn": (td.LowRankMultivariateNormal(LOC, ROOT[..., :2], SCALE), "normal", True),
    "student": (td.StudentT(5.0, LOC, SCALE), "student-t", False),
    "student by tensor": (td.StudentT(torch.full((3, N), 5.0, dtype=DOUBLE), LOC, SCALE), "student-t", False),
    "students": (td.StudentT(SCALE + 2.5, LOC, SCALE), "student-t", False),
    "independent student": (td.Independent(td.StudentT(4.0, LOC, SCALE), 1), "student-t", False),
    "laplace": (td.Laplace(LOC, SCALE), "laplace", False),
    "uniform": (td.Uniform(LOC, LOC + SCALE), "uniform", False),
    "independent uniform": (td.Independent(td.Uniform(LOC, LOC + SCALE), 1), "uniform", False),
}


@pytest.mark.parametrize("name", READ)
def test_reading_torch_distributions(name):
    dist, family, exact = READ[name]
    law = as_location_scale(dist)
    assert (law.batch_shape, law.event_shape) == ((3,), (N,))
    assert (law.family.name, law.exact) == (family, exact)
    same(law.mean, dist.mean)
    same(law.variance, dist.variance)
    y = dist.mean + 0.1 * dist.stddev
    density = dist.log_prob(y)
    same(law.log_prob(y), density if density.shape == (3,) else density.sum(-1))
    if not hasattr(dist, "covariance_matrix"):
        plain = dist.base_dist if isinstance(dist, td.Independent) else dist
        same(law.marginals.log_prob(y), plain.log_prob(y))
        if isinstance(plain, td.Normal | td.Laplace | td.Uniform):
            same(law.marginals.cdf(y), plain.cdf(y))
    else:
        same(law.cov.dense(), dist.covariance_matrix)


def test_reading_a_pair():
    law = as_location_scale((LOC, SCALE))
    assert law.family == NORMAL
    same(law.mean, LOC)
    same(law.stddev, SCALE)
    assert law.cov.stddev is SCALE
    same(as_location_scale([LOC, SCALE]).variance, SCALE**2)
    same(as_location_scale((LOC, SCALE[0])).log_prob(LOC), td.Normal(LOC, SCALE[0]).log_prob(LOC).sum(-1))


def test_reading_itself_and_a_projected_law():
    law = LocationScale(LOC, Diagonal(SCALE), LAPLACE)
    assert as_location_scale(law) is law
    projected = DPPL()(law, LinearEquality(torch.ones(1, N, dtype=DOUBLE), 1.0))
    read = as_location_scale(projected)
    assert read.family == LAPLACE
    assert read.exact is projected.exact is True
    same(read.mean, projected.mean)
    same(read.variance, projected.variance)
    same(marginals(read).cdf(LOC), marginals(projected).cdf(LOC))
    assert DPPL()(td.Laplace(LOC, SCALE), LinearEquality(torch.ones(1, N, dtype=DOUBLE))).exact is False


def test_a_constant_df_becomes_a_number():
    assert as_location_scale(td.StudentT(5.0, LOC, SCALE)).family == student_t(5.0).independent()
    varied = as_location_scale(td.StudentT(SCALE + 2.5, LOC, SCALE)).family
    same(varied.df, SCALE + 2.5)


@pytest.mark.parametrize("shape", [(), (3, N)], ids=str)
def test_a_trained_df_is_refused_however_it_is_shaped(shape):
    df = torch.full(shape, 5.0, dtype=DOUBLE, requires_grad=True)
    with pytest.raises(ParameterError, match="gradient"):
        as_location_scale(td.StudentT(df, LOC, SCALE))


def test_reading_gpytorch():
    gpytorch = pytest.importorskip("gpytorch")

    class Curve(gpytorch.models.ExactGP):
        def __init__(self, x, y, likelihood):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    x = torch.linspace(0, 1, 8, dtype=DOUBLE)
    y = torch.sin(6 * x)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = Curve(x, y, likelihood).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.2)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    for _ in range(20):
        optimizer.zero_grad()
        (-objective(model(x), y)).backward()
        optimizer.step()
    model.eval(), likelihood.eval()
    with torch.no_grad():
        posterior = likelihood(model(torch.linspace(0.05, 0.95, 5, dtype=DOUBLE)))
    law = as_location_scale(posterior)
    assert (law.family, law.exact) == (NORMAL, True)
    same(law.mean, posterior.mean)
    same(law.cov.dense(), posterior.covariance_matrix, 1e-8)
    row = torch.ones(1, 5, dtype=DOUBLE)
    projected = DPPL()(posterior, LinearEquality(row, 2.0))
    sigma = posterior.covariance_matrix
    gain = sigma @ row.mT / (row @ sigma @ row.mT)
    same(projected.mean, posterior.mean - gain[:, 0] * (posterior.mean.sum() - 2.0), 1e-8)
    same(projected.cov.dense(), sigma - gain @ row @ sigma, 1e-8)


def test_several_tasks_of_gpytorch_are_refused():
    gpytorch = pytest.importorskip("gpytorch")
    tasks = gpytorch.distributions.MultitaskMultivariateNormal(
        torch.zeros(3, 2, dtype=DOUBLE), torch.eye(6, dtype=DOUBLE)
    )
    with pytest.raises(ShapeError, match=r"\(3, 2\)"):
        as_location_scale(tasks)


# ------------------------------------------------------------------------------------ projected covariances


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("name", ["normal", "t"])
def test_projected_covariance_is_the_dense_one(kind, metric, name):
    cov, dense = covariance(kind, (2,), n=6)
    rows, right = normal(2, 6, seed=50), normal(2, 2, seed=51)
    law = LocationScale(normal(2, 6, seed=52), cov, FAMILIES[name])
    projected = DPPL(metric)(law, LinearEquality(rows, right))
    W = dense if metric == "oblique" else torch.eye(6, dtype=DOUBLE)
    gain = W @ rows.mT @ torch.linalg.inv(rows @ W @ rows.mT)
    P = torch.eye(6, dtype=DOUBLE) - gain @ rows
    truth = P @ dense @ P.mT
    found = projected.cov
    assert isinstance(found, ProjectedCovariance)
    same(projected.mean, law.mean - (gain @ (rows @ law.mean.unsqueeze(-1) - right.unsqueeze(-1))).squeeze(-1))
    same(found.dense(), truth)
    same(found.diagonal(), truth.diagonal(dim1=-2, dim2=-1))
    same(projected.variance, truth.diagonal(dim1=-2, dim2=-1) * UNIT_VARIANCE[name])
    x = normal(4, 2, 6, seed=53)
    same(found.apply(x), (truth @ x.unsqueeze(-1)).squeeze(-1))
    same(rows @ found.dense(), torch.zeros(2, 2, 6, dtype=DOUBLE))
    rescaled = projected.as_location_scale().affine(-2.0, 1.0)
    same(rescaled.cov.dense(), 4 * truth)
    same(rescaled.mean, 1 - 2 * projected.mean)
    eye = torch.eye(found.root_size, dtype=DOUBLE).expand(2, -1, -1)
    root = found.root_matmul(eye)
    same(root @ root.mT, truth)
