"""Moments to second order: against draws, finite differences of exact projections, and first order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import probhard as ph
from projection.curves import METRICS, SPHERE, close, curved, everywhere, quadratics
from registry import covariance, rand, randn

pytestmark = pytest.mark.usefixtures("same_data_in_any_order")

SECOND = ph.DPPL(covariance="second-order", curvature="exact")


def on_sphere(z: Tensor) -> Tensor:
    return z / z.norm(dim=-1, keepdim=True)


def distances(law: ph.Projected, draws: Tensor) -> tuple[float, float]:
    """Distances of the marginals' means and variances from those of draws, relative to the spread."""
    spread = draws.var(0).mean()
    laws = law.marginals
    mean = (laws.mean - draws.mean(0)).square().mean().sqrt() / spread.sqrt()
    return float(mean), float((laws.variance - draws.var(0)).square().mean().sqrt() / spread)


@pytest.mark.parametrize("n", [3, 10, 40])  # fewer variables than directions, and more
@pytest.mark.parametrize("radius", [1.0, 1.4])
def test_spheres_against_draws(n, radius):
    mean = radius * on_sphere(randn(n))
    stddev = torch.full((n,), 0.5 / n**0.5)
    draws = on_sphere(mean + stddev * randn(20_000, n))
    first = ph.DPPL(curvature="exact")((mean, stddev), SPHERE)
    second = SECOND((mean, stddev), SPHERE)
    assert 4 * distances(second, draws)[0] < distances(first, draws)[0]
    assert distances(second, draws)[1] < max(0.1, distances(first, draws)[1] / 2)
    assert ph.crps(second, draws).mean() < ph.crps(first, draws).mean()


@everywhere
def test_means_against_differences_of_exact_projections(metric, kind):
    constraint, step = curved(0.3), 1e-3
    cov = covariance(kind, 5)
    mean = ph.DPPL("orthogonal").project(randn(5), constraint).value
    small = ph.LocationScale(mean, cov.scaled(torch.full((5,), step)))
    columns = small.cov.root_matrix().mT
    there = ph.DPPL(metric).project(torch.cat([mean + columns, mean - columns]), constraint, small).value
    bent = there.sum(0) - len(there) * mean  # the sum of second differences
    layer = ph.DPPL(metric, covariance="second-order")
    ours = layer(small, constraint).marginals.mean - mean
    assert (ours - bent / 2).norm() < 2e-3 * (bent / 2).norm()


@pytest.mark.parametrize("metric", METRICS)
def test_linear_rows_are_kept(metric):
    n, fixed = 6, torch.tensor([0.1, -0.2])
    picks = ph.LinearEquality(torch.eye(n)[:2], fixed)
    for rows in (picks, ph.LinearEquality(torch.ones(1, n), torch.tensor([0.5]))):
        constraint = rows & SPHERE
        mean = ph.DPPL("orthogonal").project(randn(n), constraint).value
        stddev = 0.1 + 0.1 * rand(n)
        first, second = (ph.DPPL(metric, rule)((mean, stddev), constraint) for rule in ("delta", "second-order"))
        draws = first.sample((20_000,), torch.Generator().manual_seed(0))
        assert rows.violation(second.marginals.mean) < 1e-10
        assert 3 * distances(second, draws)[0] < distances(first, draws)[0]


def test_the_mean_is_feasible_and_the_marginals_are_nearer():
    mean, stddev = on_sphere(randn(4, 5)), 0.2 * torch.ones(5)
    for layer in (SECOND, ph.DPPL(covariance="monte-carlo", draws=1000)):
        law = layer((mean, stddev), SPHERE)
        assert SPHERE.violation(law.mean).max() < 1e-10
        exact = on_sphere(mean + stddev * randn(20_000, 4, 5)).mean(0)
        inner, outer = (x - exact for x in (law.marginals.mean, law.mean))
        assert (5 * inner.norm(dim=-1) < outer.norm(dim=-1)).all()
        wide = law.expand((2, 4))
        close(wide.marginals.mean[1], law.marginals.mean)
        close(wide.variance[1], law.variance)
        close(wide.mean[0], law.mean)


def test_linear_equalities_are_exact_in_first_order():
    constraint, law = ph.LinearEquality(torch.ones(1, 4), torch.ones(1)), (randn(4), rand(4))
    first, second = ph.DPPL()(law, constraint), SECOND(law, constraint)
    close(second.mean, first.mean)
    close(second.variance, first.variance)
    assert second.exact


@pytest.mark.parametrize("constraint", [ph.NonNegative(), ph.Simplex(), SPHERE & ph.NonNegative()])
def test_inequalities_are_rejected(constraint):
    with pytest.raises(ph.ParameterError, match=r"(?s)second-order.*kinks.*'auto'"):
        SECOND((torch.full((3,), 0.5), torch.ones(3)), constraint)


def test_wide_laws_stay_bounded():
    for n in (2, 10):
        mean, stddev = on_sphere(randn(n)), torch.full((n,), 30.0)
        law = SECOND((mean, stddev), SPHERE)
        assert law.marginals.mean.norm() < 1.5
        assert law.variance.max() < 1
        assert SPHERE.violation(law.mean) < 1e-10


@pytest.mark.parametrize("metric", METRICS)
def test_gradients_against_finite_differences(metric):
    fn, c = quadratics(0.2, 1, 3)
    layer = ph.DPPL(metric, covariance="second-order", curvature="exact")
    inputs = [x.clone().requires_grad_() for x in (randn(3), 0.1 + 0.2 * rand(3), c)]

    def moments(mean: Tensor, stddev: Tensor, data: Tensor) -> tuple[Tensor, Tensor]:
        laws = layer((mean, stddev), ph.NonlinearEquality(fn, (data,))).marginals
        return laws.mean, laws.variance

    assert torch.autograd.gradcheck(moments, inputs, eps=1e-4, atol=1e-5, rtol=1e-4)


def test_gradients_are_finite_where_variables_are_known():
    mean = (0.9 * on_sphere(randn(3, 5))).requires_grad_()
    stddev = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4], requires_grad=True)
    for curvature in ("gauss-newton", "exact"):
        law = ph.DPPL(covariance="second-order", curvature=curvature)((mean, stddev), SPHERE)
        gradients = torch.autograd.grad(ph.crps(law, on_sphere(randn(3, 5))).sum(), (mean, stddev))
        assert all(torch.isfinite(x).all() for x in gradients)
        close(law.marginals.mean[:, 0], mean[:, 0])
        assert (law.variance[:, 0] == 0).all()


def test_families_and_single_precision():
    mean, scale = on_sphere(randn(6)), torch.full((6,), 0.1)
    normal = SECOND((mean, 2**0.5 * scale), SPHERE)
    laplace = SECOND(ph.LocationScale(mean, ph.Diagonal.from_stddev(scale), ph.LAPLACE), SPHERE)
    close(laplace.marginals.mean, normal.marginals.mean)  # of equal variances
    close(laplace.variance, normal.variance)
    single = SECOND((mean.float(), scale.float()), SPHERE)
    assert single.marginals.mean.dtype == single.variance.dtype == torch.float32
    double = SECOND((mean.float().double(), scale.float().double()), SPHERE)
    close(single.marginals.mean.double(), double.marginals.mean, 1e-6)
