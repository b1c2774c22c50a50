"""Bounds and shapes under weights D + G G^T: gradients, tangents, precisions, and agreement with dense weights."""

from __future__ import annotations

import pytest
import torch

import probhard as ph
from probhard.projection.coupled import CoupledProjector
from probhard.projection.factored import FORMED, FactoredProjector
from registry import covariance, rand, randn

SETS = {
    "box": lambda: ph.Box(-0.3, 0.4),
    "mass and bounds": lambda: ph.Conservation(torch.ones(8, dtype=torch.float64), 1.5) & ph.NonNegative(),
    "tree": lambda: ph.Hierarchy(torch.tensor([[1.0] * 7, *torch.eye(7).tolist()])) & ph.NonNegative(),
    "monotone": lambda: ph.Monotone("increasing"),
    "rows": lambda: ph.LinearInequality(randn(3, 8), rand(3)),
}
KINDS = ("low rank", "spectral", "along a hierarchy")


def dense(cov):
    return ph.Dense(torch.linalg.cholesky(cov.dense()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETS)
def test_points_and_tangents_are_those_of_the_dense_weight(name, kind):
    constraint, cov, z = SETS[name](), covariance(kind, 5, 8), randn(5, 8)
    found = ph.DPPL().project(z, constraint, ph.LocationScale(z, cov))
    truth = ph.DPPL().project(z, constraint, ph.LocationScale(z, dense(cov)))
    projector = ph.DPPL()(ph.LocationScale(z, cov), constraint).projector
    assert isinstance(projector, FactoredProjector)
    assert isinstance(ph.DPPL()(ph.LocationScale(z, dense(cov)), constraint).projector, CoupledProjector)
    torch.testing.assert_close(found.value, truth.value, rtol=1e-8, atol=1e-9)
    x, y = randn(5, 8), randn(5, 8)
    torch.testing.assert_close(found.tangent.apply(x), truth.tangent.apply(x), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close((found.tangent.transpose(y) * x).sum(-1), (y * found.tangent.apply(x)).sum(-1))


@pytest.mark.parametrize("name", SETS)
def test_gradients_to_points_and_weights(name):
    constraint = SETS[name]()
    inputs = [randn(2, 8), 0.5 * randn(2, 8, 2), rand(2, 8)]

    def value(z, factor, own):
        return ph.DPPL().project(z, constraint, ph.LocationScale(z, ph.LowRank(factor, own))).value

    assert torch.autograd.gradcheck(value, [x.requires_grad_() for x in inputs], atol=1e-6)


def test_many_columns_use_products_of_the_hessian():
    n = FORMED + 6
    cov = ph.Spectral((n,), 1 / (1 + torch.arange(n).double()) ** 2, rand(3, n) + 1, 0.1 * rand(3, n), "reflecting")
    z, constraint = randn(3, n), ph.NonNegative() & ph.Conservation(torch.ones(n, dtype=torch.float64), 4.0)
    found = ph.DPPL().project(z, constraint, ph.LocationScale(z, cov))
    truth = ph.DPPL().project(z, constraint, ph.LocationScale(z, dense(cov)))
    torch.testing.assert_close(found.value, truth.value, rtol=1e-7, atol=1e-8)
    assert found.stats.converged.all()


def test_single_precision_stays_within_bounds():
    law = ph.LocationScale(randn(20, 8).float(), covariance("low rank", 20, 8).to(torch.float32))
    projected = ph.DPPL()(law, ph.Hierarchy(torch.tensor([[1.0] * 7, *torch.eye(7).tolist()])) & ph.NonNegative())
    draws = projected.sample((50,))
    assert draws.dtype == torch.float32
    assert draws.min() >= 0
    assert (draws[..., 0] - draws[..., 1:].sum(-1)).abs().max() < 1e-5 * draws.abs().max()


def test_without_independent_noise_the_weight_is_solved_densely():
    own = torch.tensor([0.0, 1, 1, 1], dtype=torch.float64)
    projected = ph.DPPL()(ph.LocationScale(randn(4), ph.LowRank(randn(4, 2), own)), ph.NonNegative())
    assert isinstance(projected.projector, CoupledProjector)
    assert projected.sample((20,)).min() >= 0


def test_the_metric_may_be_that_of_another_law():
    constraint, cov, loc = SETS["mass and bounds"](), covariance("low rank", 8), randn(8)
    law, wider = (ph.LocationScale(loc, one) for one in (cov, cov.weighted(2.0, 3.0)))
    layer, equality = ph.DPPL("oblique", covariance="delta"), ph.Conservation(torch.ones(8, dtype=torch.float64), 1.5)
    for one in (constraint, equality):
        same = layer(wider, one, metric_from=law)
        assert torch.equal(same.mean, layer(law, one).mean)
        assert (same.mean - layer(wider, one).mean).abs().max() > 1e-3
        assert one.violation(same.sample((20,))).max() < 1e-12


@pytest.mark.parametrize("own", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("off", [1e-6, 1e-2, 0.3])
def test_factors_that_dominate_do_not_stall_on_rounding(off, own):
    """The gradient is a difference of terms that grow as the own part falls; its rounding is no progress."""
    sums = torch.tensor([[1.0] * 7, [1.0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1.0, 1, 1, 1]], dtype=torch.float64)
    S = torch.cat([sums, torch.eye(7, dtype=torch.float64)])
    z = (20 * rand(100, 7)) @ S.T * (1 + off * randn(100, 10))
    law = ph.LocationScale(z, ph.LowRank(S @ randn(7, 3), torch.full((10,), own, dtype=torch.float64)))
    constraint = ph.Hierarchy(S) & ph.NonNegative()
    found = ph.DPPL(on_failure="flag").project(z, constraint, law)
    assert found.stats.converged.all()
    truth = ph.DPPL().project(z, constraint, ph.LocationScale(z, dense(law.cov)))
    torch.testing.assert_close(found.value, truth.value, rtol=1e-7, atol=1e-6)
