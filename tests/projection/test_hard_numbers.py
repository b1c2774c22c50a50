"""Numbers at the edge of precision: means stay feasible, gradients finite, empty batches empty."""

from __future__ import annotations

import pytest
import torch

import probhard as ph


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e4, 1e8])
@pytest.mark.parametrize("n", [1, 6])
def test_means_keep_their_mass_when_digits_cancel(dtype, size, n):
    generator = torch.Generator().manual_seed(n)
    weights = torch.rand(n, generator=generator, dtype=torch.float64) + 0.1
    loc = size * (1 + torch.rand(5, n, generator=generator, dtype=torch.float64)).to(dtype)
    for mass in (1e-8, 1.0):
        law = ph.DPPL("oblique")((loc, torch.ones_like(loc)), ph.Conservation(weights, mass))
        terms = weights * law.mean.double()
        bound = {torch.float32: 1e-5, torch.float64: 1e-10}[dtype] * (terms.abs().sum(-1) + mass)
        assert ((terms.sum(-1) - mass).abs() <= bound).all()
        assert law.stats.converged.all()


def test_the_mean_of_one_far_variable():
    law = ph.DPPL("oblique")((torch.tensor([1e8]), torch.tensor([1.0])), ph.Conservation([0.6], 1.0))
    assert 0.6 * law.mean.item() == pytest.approx(1.0, rel=1e-6)  # was -3


def _disc(u: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (u / scale).square().sum(-1, keepdim=True) - 1


@pytest.mark.parametrize("scale", [1e-11, 1e-5, 1e9])
@pytest.mark.parametrize("kind", [ph.NonlinearInequality, ph.NonlinearEquality])
def test_functions_of_very_small_or_large_numbers(kind, scale):
    """The same problem in other units has the same answer and gradients."""
    generator = torch.Generator().manual_seed(1)
    z, stddev = 2 * torch.randn(6, 3, generator=generator), torch.rand(6, 3, generator=generator) + 0.1

    def projected(unit: float) -> tuple[torch.Tensor, torch.Tensor]:
        rows = ph.LinearInequality(torch.ones(1, 3), torch.tensor([0.2 * unit]))
        constraint = kind(_disc, (torch.tensor(unit, dtype=torch.float64),)) & rows & ph.Box(-0.8 * unit, None)
        loc = (unit * z.double()).requires_grad_()
        law = ph.LocationScale(loc, ph.Diagonal((unit * stddev.double()).square()))
        solution = ph.DPPL().project(loc, constraint, law)
        assert bool(solution.stats.converged.all())
        (gradient,) = torch.autograd.grad(solution.value[..., 0].sum(), loc)
        return solution.value.detach() / unit, gradient

    (first, slope), (second, other) = projected(1.0), projected(scale)
    assert torch.allclose(first, second, atol=1e-8)
    assert torch.allclose(slope, other, atol=1e-6)
