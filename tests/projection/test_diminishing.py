"""Projection on fields of diminishing variation: feasibility, gradients and moments."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from probhard.laws.covariance import Diagonal, LowRank
from probhard.projection.diminishing import DiminishingProjector
from projection.profile_cases import NX, oracle, variation


def field(seed, batch=(), times=5):
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch, times, NX)
    z = torch.randn(shape, generator=generator) * torch.tensor([0.6, 1.5, 0.15, 1.0, 2.0]).unsqueeze(-1)[:times]
    return z.flatten(-2), torch.exp(0.5 * torch.randn(shape, generator=generator)).flatten(-2)


@pytest.mark.parametrize("bounds", [None, (-0.6, 0.9)])
def test_variation_diminishes(bounds):
    z, weight = field(0, batch=(200,))
    lower, upper = (None, None) if bounds is None else (torch.tensor(b) for b in bounds)
    solution = DiminishingProjector((5, NX), lower, upper, Diagonal(weight)).solve(z)
    u = solution.value.unflatten(-1, (5, NX))
    assert bool((variation(u)[:, 1:] <= variation(u)[:, :-1] * (1 + 1e-12)).all())
    first = z[:, :NX] if bounds is None else z[:, :NX].clamp(*bounds)
    assert torch.equal(u[:, 0], first)
    assert bool(solution.stats.converged.all())
    for i, t in itertools.product(range(2), range(1, 5)):
        parts = (x[i].unflatten(0, (5, NX))[t].numpy() for x in (z, weight))
        expected = oracle("tv-bound", *parts, variation(u[i, t - 1]), lower, upper, None, None)
        np.testing.assert_allclose(u[i, t].numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bounds", [None, (-0.6, 0.9)])
def test_gradients_and_moments_of_diminishing_fields(bounds):
    z, weight = field(1, batch=(1,), times=4)
    lower, upper = (None, None) if bounds is None else (torch.tensor(b) for b in bounds)

    def value(z, weight, *ends):
        low, high = ends if ends else (lower, upper)
        return DiminishingProjector((4, NX), low, high, Diagonal(weight)).solve(z).value

    ends = [] if bounds is None else [x.clone().requires_grad_() for x in (lower, upper)]
    assert torch.autograd.gradcheck(value, [z.requires_grad_(), weight.requires_grad_(), *ends], eps=1e-7, atol=1e-6)
    z, weight = z.detach(), weight.detach()
    projector = DiminishingProjector((4, NX), lower, upper, Diagonal(weight))
    tangent, eye, step = projector.solve(z).tangent, torch.eye(4 * NX).unsqueeze(1), 1e-6
    dense = tangent.apply(eye).movedim(0, -1)
    differences = (projector.solve(z + step * eye).value - projector.solve(z - step * eye).value) / (2 * step)
    torch.testing.assert_close(dense, differences.movedim(0, -1), rtol=0, atol=1e-8)
    torch.testing.assert_close(tangent.transpose(eye).movedim(0, -1), dense.mT, rtol=0, atol=1e-13)
    depends = [bool((dense[0, t * NX :, (t - 1) * NX : t * NX] != 0).any()) for t in (1, 3)]
    assert depends == [True, True]  # the third slice has room of its own and sets the amount of the fourth
    assert bool((dense[0, 2 * NX : 3 * NX, : 2 * NX] == 0).all())
    for cov in (Diagonal(torch.rand(4 * NX)), LowRank(torch.randn(4 * NX, 3), torch.rand(4 * NX))):
        expected = (dense @ cov.dense() @ dense.mT).diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(tangent.variance(cov), expected, rtol=1e-10, atol=1e-12)
    _, mean, scale, _ = projector.moments(z, Diagonal(weight))
    assert mean.shape == scale.shape == z.shape


def test_diminishing_fields_of_one_value_stay_so():
    z, weight = field(2)
    z[:NX] = 0.5
    u = DiminishingProjector((5, NX), None, None, Diagonal(weight)).solve(z).value.unflatten(-1, (5, NX))
    assert float(variation(u).max()) == 0
    low = DiminishingProjector((5, NX), torch.tensor(-0.1), torch.tensor(0.1), Diagonal(weight.float())).solve(
        z.float()
    )
    assert low.value.dtype == torch.float32
    assert bool((low.value.abs() <= torch.tensor(0.1)).all())
