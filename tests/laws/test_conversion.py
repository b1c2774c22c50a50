"""Conversion of torch's and gpytorch's distributions to location-scale laws."""

from __future__ import annotations

import pytest
import torch
from torch import distributions as td

from law_cases import (
    DOUBLE,
    N,
    normal,
    same,
)
from probhard import (
    DPPL,
    LAPLACE,
    NORMAL,
    Diagonal,
    LinearEquality,
    LocationScale,
    ParameterError,
    ShapeError,
    as_location_scale,
    marginals,
    student_t,
)

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
