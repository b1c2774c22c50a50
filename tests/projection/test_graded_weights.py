"""Curved sets under weights that span many decades, and under weights that couple few variables."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch

import probhard as ph
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.laws.covariance import Diagonal
from probhard.solvers import sqp
from probhard.solvers.linearised import Linearised

A = torch.tensor([[1.0, 2.0, -0.5], [0.25, 1.0, 3.0]], dtype=torch.float64)
W = torch.tensor([1e-12, 1.0, 2e-12], dtype=torch.float64)


def _exact(r: list[Fraction]) -> np.ndarray:
    """``W A^T (A W A^T)^-1 r`` in fractions."""
    rows = [[Fraction(float(x)) for x in row] for row in A]
    weight = [Fraction(float(x)) for x in W]
    gram = [[sum(a * w * b for a, w, b in zip(one, weight, two)) for two in rows] for one in rows]
    (p, q), (_, s) = gram
    first, second = r
    determinant = p * s - q * q
    multiplier = (s * first - q * second) / determinant, (p * second - q * first) / determinant
    return np.array([float(w * sum(row[i] * m for row, m in zip(rows, multiplier))) for i, w in enumerate(weight)])


def test_products_keep_digits_where_one_weight_dominates() -> None:
    constraint = NonlinearEquality(lambda u: u @ A.mT)
    near = Linearised.at(constraint, torch.zeros(1, 3, dtype=torch.float64), Diagonal(W))
    move, pull = near.images(torch.tensor([[1.0, -0.5]], dtype=torch.float64))
    expected = _exact([Fraction(1), Fraction(-1, 2)])
    np.testing.assert_allclose(move[0].numpy(), expected, rtol=1e-8)  # rounding times 1e6, not 1e12
    np.testing.assert_allclose(pull[0].numpy(), expected / W.numpy(), rtol=1e-8)
    direction = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
    pushed = [sum(Fraction(a) * Fraction(w) * Fraction(v) for a, w, v in zip(row, W.tolist(), direction[0].tolist()))
              for row in A.tolist()]  # fmt: skip
    tangential = direction[0].numpy() - _exact([Fraction(x) for x in pushed]) / W.numpy()
    np.testing.assert_allclose(near.dual(direction)[0].numpy(), tangential, rtol=1e-5, atol=1e-8)


def test_vertex_of_two_curves_under_uneven_weights() -> None:
    def curves(u: torch.Tensor) -> torch.Tensor:
        return torch.stack([u.square().sum(-1) - 1, u[..., 0].exp() + u[..., 1] - 1.5], -1)

    z = torch.tensor([[0.5, 0.9], [0.3, 0.7]], dtype=torch.float64)
    weight = Diagonal(torch.tensor([1e-12, 1.0], dtype=torch.float64))
    iterates = sqp.solve(NonlinearEquality(curves), z, weight, hessian=True)
    assert bool(iterates.converged.all())
    assert float(curves(iterates.u).abs().max()) < 1e-13


def test_sphere_under_coupled_weights() -> None:
    """All points are found, the conditions hold, and exact gradients equal finite differences."""
    source = torch.Generator().manual_seed(3)
    n, count = 6, 40
    factor = torch.randn(n, 2, generator=source, dtype=torch.float64) * 10
    variance = 10.0 ** torch.linspace(-3, 2, n, dtype=torch.float64)
    loc = 2 * torch.randn(count, n, generator=source, dtype=torch.float64)
    law = ph.LocationScale(loc, ph.LowRank(factor, variance))
    sphere = ph.NonlinearEquality(lambda u: u.square().sum(-1, keepdim=True) - 1)
    layer = ph.DPPL("oblique", on_failure="flag", curvature="exact")
    points = layer.project(loc, sphere, law)
    assert bool(points.stats.converged.all())
    pull = torch.linalg.solve(torch.diag(variance) + factor @ factor.mT, (points.value - loc).mT).mT
    along = (pull * points.value).sum(-1, keepdim=True) * points.value  # pull is normal to the sphere
    assert float(((pull - along).norm(dim=-1) / pull.norm(dim=-1)).max()) < 1e-6
    some = loc[:3].clone().requires_grad_()

    def total(z: torch.Tensor) -> torch.Tensor:
        solution = layer.project(z, sphere, ph.LocationScale(z, law.cov))
        return (solution.value * torch.arange(1.0, n + 1, dtype=z.dtype)).sum(-1)

    (gradient,) = torch.autograd.grad(total(some).sum(), some)
    step = 1e-6
    for i in range(n):
        shift = torch.zeros(n, dtype=torch.float64)
        shift[i] = step
        with torch.no_grad():
            slope = (total(loc[:3] + shift) - total(loc[:3] - shift)) / (2 * step)
        np.testing.assert_allclose(gradient[:, i].numpy(), slope.numpy(), rtol=1e-3, atol=1e-4)
