"""Draws of a Gaussian process on 500 points that keep its integral, by gpytorch and by dense torch algebra.

The projected covariance ``P Sigma P^T`` is singular. gpytorch and torch must factor it, with jitter that lets every
draw leave the constraint; probhard projects draws of the law that was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import gpytorch
import torch
from linear_operator import to_linear_operator
from torch import Tensor

import probhard as ph
from benchmarks.timing import Comparison, measured, worst

POINTS, DRAWS, MASS = 500, 200, 0.3
COUPLED = (
    "Ours also makes the marginal variances with the law, from all columns of its root, and projects and checks every "
    "draw. The peer factors a singular covariance with jitter, and its draws keep the integral only up to that."
)


def run(quick: bool = False) -> Iterator[Comparison]:
    """Compare the projected law with 200 draws, float64."""
    x = torch.linspace(0, 1, POINTS, dtype=torch.float64)
    weights = ph.trapezoid_weights(x)
    with torch.no_grad():
        kernel = gpytorch.kernels.MaternKernel(nu=2.5)
        kernel.lengthscale = 0.1
        cov = kernel.double()(x).to_dense() + 1e-8 * torch.eye(POINTS, dtype=torch.float64)
    mean, constraint = torch.sin(6 * x), ph.Conservation(weights, MASS)
    given = gpytorch.distributions.MultivariateNormal(mean, cov)
    layer = ph.DPPL("oblique")

    def conditioned() -> tuple[Tensor, Tensor]:
        gain = cov @ weights / (weights @ cov @ weights)
        moved = mean + gain * (MASS - weights @ mean)
        return moved, cov - torch.outer(gain, weights @ cov)

    def peer() -> Tensor:
        moved, left = conditioned()
        law = gpytorch.distributions.MultivariateNormal(moved, to_linear_operator(left))
        return law.sample(torch.Size((DRAWS,)))

    def dense() -> Tensor:
        moved, left = conditioned()
        jitter = 1e-8 * torch.eye(POINTS, dtype=torch.float64)
        factor = torch.linalg.cholesky(left + jitter)
        return moved + torch.randn(DRAWS, POINTS, dtype=torch.float64) @ factor.mT

    def ours() -> Tensor:
        return layer(given, constraint).sample((DRAWS,))

    judge = partial(worst, constraint)
    theirs, plain, projected = measured(peer, dense, ours)
    case = f"{DRAWS} draws of a process on {POINTS} points"
    yield Comparison.of(case, "gpytorch", theirs, projected, judge, explanation=COUPLED)
    yield Comparison.of(case, "torch Cholesky + 1e-8", plain, projected, judge, explanation=COUPLED)
