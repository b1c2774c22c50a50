"""Nonlinear equalities: curvature, gradients and variances against differences, unrolled iterations and draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import probhard as ph
from projection.curves import METRICS, SPHERE, close, curved, everywhere, quadratics, weight_of
from registry import covariance, rand, randn

pytestmark = pytest.mark.usefixtures("same_data_in_any_order")


def test_curvature_of_a_circle():
    for curvature, expected in (("gauss-newton", 1.0), ("exact", 0.2)):
        z = torch.tensor([5.0, 0.0], requires_grad=True)
        layer = ph.DPPL("orthogonal", curvature=curvature)
        layer.project(z, SPHERE).value[1].backward()
        close(z.grad, torch.tensor([0.0, expected]), 1e-8)
        variance = layer((z.detach(), torch.ones(2)), SPHERE).variance
        close(variance, torch.tensor([0.0, expected**2]), 1e-8)


@pytest.mark.parametrize("metric", METRICS)
def test_exact_gradients_against_finite_differences(metric):
    fn, c = quadratics(0.1, 1, 3)
    layer = ph.DPPL(metric, curvature="exact")
    inputs = [x.clone().requires_grad_() for x in (randn(3), rand(3), c)]

    def mean_of(mean: Tensor, stddev: Tensor, data: Tensor) -> Tensor:
        return layer((mean, stddev), ph.NonlinearEquality(fn, (data,))).mean

    assert torch.autograd.gradcheck(mean_of, inputs, eps=1e-4, atol=1e-5, rtol=1e-4)


def unrolled(constraint: ph.NonlinearEquality, z: Tensor, weight: Tensor) -> Tensor:
    """The paper's plain iteration for one point, every step of it differentiated."""
    u = z
    for _ in range(60):
        rows = torch.func.jacrev(constraint.residual)(u)
        u = z - weight @ rows.mT @ torch.linalg.solve(rows @ weight @ rows.mT, constraint.residual(u) + rows @ (z - u))
    return u


@everywhere
def test_exact_gradients_against_unrolled_iterations(metric, kind):
    fn, c = quadratics(0.05)
    cov, direction = covariance(kind, 5), randn(5)
    fields = {"diagonal": ("variance",), "low rank": ("factor", "diagonal_part"), "dense": ("scale_tril",)}[kind]
    parts = [getattr(cov, name).clone().requires_grad_() for name in fields]
    z, data = (0.5 * randn(5)).requires_grad_(), c.clone().requires_grad_()
    constraint, cov = ph.NonlinearEquality(fn, (data,)), type(cov)(*parts)
    inputs = [z, data, *(parts if metric == "oblique" else [])]
    ours = ph.DPPL(metric, curvature="exact").project(z, constraint, ph.LocationScale(z, cov)).value
    theirs = unrolled(constraint, z, weight_of(metric, cov).dense())
    close(ours, theirs, 1e-8)
    for a, b in zip(torch.autograd.grad(ours @ direction, inputs), torch.autograd.grad(theirs @ direction, inputs)):
        close(a, b, 1e-6)


def test_delta_variance_against_draws_where_curvature_is_mild_and_where_it_is_strong():
    source = torch.Generator().manual_seed(0)
    mild = (torch.tensor([0.605, 0.8]), torch.tensor([0.03, 0.02]))
    strong = (torch.tensor([5.0, 0.0]), torch.tensor([0.1, 0.1]))
    for metric in METRICS:
        projected = ph.DPPL(metric)(mild, SPHERE)
        torch.testing.assert_close(projected.sample((20_000,), source).var(0), projected.variance, rtol=0.05, atol=0)
    draws = ph.DPPL()(strong, SPHERE).sample((20_000,), source).var(0)[1]
    assert 23 < ph.DPPL()(strong, SPHERE).variance[1] / draws < 27  # Gauss-Newton: (1 / 0.2)^2
    assert abs(ph.DPPL(curvature="exact")(strong, SPHERE).variance[1] / draws - 1) < 0.05


def test_variance_gradients_against_finite_differences():
    # at a feasible mean the multipliers are 0, so that Gauss-Newton and exact projections move alike
    constraint = curved(0.2, 1, 3)
    mean = ph.DPPL("orthogonal").project(randn(3), constraint).value
    for metric in METRICS:
        inputs = mean.clone().requires_grad_(), rand(3).requires_grad_()
        layer = ph.DPPL(metric)
        gradients = torch.autograd.grad(layer(inputs, constraint).variance.sum(), inputs)
        assert all(g.isfinite().all() and g.abs().max() > 1e-3 for g in gradients)
        assert torch.autograd.gradcheck(lambda *d: layer(d, constraint).variance, inputs, eps=1e-4, atol=1e-5)  # noqa: B023


def test_variance_gradients_with_exact_curvature():
    constraint, layer = curved(0.1), ph.DPPL(curvature="exact")
    inputs = randn(5).requires_grad_(), rand(5).requires_grad_()
    assert torch.autograd.gradcheck(lambda *d: layer(d, constraint).variance, inputs, eps=1e-4, atol=1e-5)


def test_no_gradient_is_missing_after_backward():
    mean, raw = randn(4, 5).requires_grad_(), randn(4, 5).requires_grad_()
    projected = ph.DPPL()((mean, torch.nn.functional.softplus(raw)), curved(0.05))
    (ph.crps(projected, randn(4, 5)).sum() + projected.rsample((3,)).square().sum()).backward()
    assert all(leaf.grad.isfinite().all() and leaf.grad.abs().min() > 0 for leaf in (mean, raw))


def test_exact_variance_is_the_same_with_and_without_gradients():
    ball = ph.NonlinearEquality(lambda u: u.square().sum(-1, keepdim=True) - 1)
    mean = torch.tensor([2.0, 1.0, 0.5])
    for cov in (ph.Diagonal(rand(3)), ph.Dense(torch.eye(3) + 0.2 * torch.ones(3, 3).tril(-1))):
        dist, layer = ph.LocationScale(mean.clone().requires_grad_(), cov), ph.DPPL(curvature="exact")
        with torch.no_grad():
            quiet = layer(dist, ball).variance
        torch.testing.assert_close(layer(dist, ball).variance, quiet)
        jacobian = torch.stack([torch.autograd.grad(layer(dist, ball).mean[i], dist.loc)[0] for i in range(3)])
        if isinstance(cov, ph.Dense):  # W does not depend on the mean, so the Jacobian is the tangent
            expected = (jacobian @ cov.dense() @ jacobian.T).diagonal()
            torch.testing.assert_close(quiet, expected, rtol=1e-6, atol=1e-9)
