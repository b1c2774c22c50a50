"""Gradients of the layer over the registry: of means, variances, metrics and data, to second order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import probhard as ph
from registry import CONSTRAINTS, COVARIANCES, METRICS, rand, randn, triangle


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", COVARIANCES)
@pytest.mark.parametrize(
    "name", ["slices", "disjoint", "weighted tree", "tree", "dense", "complement", "pins and mass", "crossed small"]
)
def test_gradients(constraints, name, kind, metric):
    constraint = constraints[name]
    n = constraint.variables
    layer = ph.DPPL(METRICS[metric](n))
    build, parts = COVARIANCES[kind]

    def moments(loc, b, *parts):
        projected = layer(ph.LocationScale(loc, build(*parts)), constraint.replace(b))
        return projected.mean, projected.variance

    inputs = (randn(2, n), constraint.b.clone(), *parts(2, n))
    assert torch.autograd.gradcheck(moments, [x.requires_grad_() for x in inputs])


def test_gradients_of_the_sparse_factor():
    constraint = ph.Hierarchy(CONSTRAINTS["crossed sparse"]().summation)
    assert "sparse" in constraint.algorithm
    n = constraint.variables
    for metric in ("oblique", "orthogonal", ph.DiagonalMetric(rand(n))):
        layer = ph.DPPL(metric)

        def moments(loc, variance, layer=layer):
            projected = layer(ph.LocationScale(loc, ph.Diagonal(variance)), constraint)
            return projected.mean, projected.variance

        inputs = randn(n).requires_grad_(), rand(n).requires_grad_()
        assert torch.autograd.gradcheck(moments, inputs, fast_mode=True)


def test_gradients_of_learned_metrics(constraints):
    constraint = constraints["tree"]
    n = constraint.variables
    for metric in (
        ph.DiagonalMetric(rand(n), learn=True),
        ph.LowRankMetric(randn(n, 2), rand(n), learn=True),
        ph.DenseMetric(triangle(n), learn=True),
    ):
        layer = ph.DPPL(metric)
        ph.crps(layer((randn(3, n), rand(3, n)), constraint), randn(3, n)).sum().backward()
        for parameter in layer.parameters():
            assert parameter.grad is not None
            assert parameter.grad.abs().sum() > 0


def test_a_small_projected_network_fits_a_constrained_target():
    """Universal approximation: the projection does not stand in the way of a continuous feasible target."""
    weights = ph.trapezoid_weights(torch.linspace(0, 1, 16))
    grid, inputs = torch.linspace(0, 1, 16), torch.rand(128, 1)
    target = torch.sin(3 * grid + 4 * inputs) + inputs
    constraint = ph.Conservation(weights, target @ weights)
    network = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 500)
    layer = ph.DPPL("orthogonal")
    for _ in range(500):
        error = (layer.project(network(inputs), constraint).value - target).square().mean()
        optimiser.zero_grad()
        error.backward()
        optimiser.step()
        schedule.step()
    assert error < 1e-4  # the target's own variance is about 0.6


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
@pytest.mark.parametrize("name", ["conservation", "slices", "disjoint"])
def test_second_derivatives(constraints, name, metric, batch):
    constraint, layer = constraints[name], ph.DPPL(metric)
    n = constraint.variables

    def moments(mean, variance):
        projected = layer(ph.LocationScale(mean, ph.Diagonal(variance)), constraint)
        return projected.mean, projected.variance

    inputs = randn(*batch, n).requires_grad_(), rand(*batch, n).requires_grad_()
    assert torch.autograd.gradgradcheck(moments, inputs)


@pytest.mark.parametrize("metric", ["oblique", "orthogonal"])
def test_trained_conservation_weights_get_their_gradient(metric):
    mean, stddev, mass, layer = randn(3, 5), rand(3, 5), rand(3), ph.DPPL(metric)

    def moments(weights):
        projected = layer((mean, stddev), ph.Conservation(weights, mass))
        return projected.mean, projected.variance

    assert torch.autograd.gradcheck(moments, rand(5).requires_grad_())
