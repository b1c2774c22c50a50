"""Nonlinear equalities, and helpers of their tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import probhard as ph

KINDS = ("diagonal", "low rank", "dense")
METRICS = ("oblique", "orthogonal")
everywhere = pytest.mark.parametrize(("metric", "kind"), [(m, k) for m in METRICS for k in KINDS])


def sphere(u: Tensor, radius: Tensor | float = 1.0) -> Tensor:
    return u.square().sum(-1, keepdim=True) - torch.as_tensor(radius) ** 2


SPHERE = ph.NonlinearEquality(sphere)

# one root, -2; to the right of -0.5 the function falls to 0 and never reaches it
STUCK = ph.NonlinearEquality(lambda u: torch.where(u < -0.5, u + 2, 1.5 * torch.exp(-0.5 - u.clamp(min=-0.5))))


def quadratics(scale: float, q: int = 2, n: int = 5, seed: int = 0) -> tuple[Callable[..., Tensor], Tensor]:
    """``scale u A u / 2 + B u - c`` with a feasible point, as a function of u and c, and that c."""
    source = torch.Generator().manual_seed(seed)
    bends, slopes = torch.randn(q, n, n, generator=source), torch.randn(q, n, generator=source)
    bends = bends + bends.mT

    def fn(u: Tensor, c: Tensor) -> Tensor:
        return 0.5 * scale * torch.einsum("...i,kij,...j->...k", u, bends, u) + u @ slopes.mT - c

    return fn, fn(torch.randn(n, generator=source), torch.zeros(q))


def curved(scale: float = 0.1, q: int = 2, n: int = 5, seed: int = 0) -> ph.NonlinearEquality:
    fn, c = quadratics(scale, q, n, seed)
    return ph.NonlinearEquality(fn, (c,))


def jacobian(constraint: ph.NonlinearEquality, u: Tensor) -> Tensor:
    """One point at a time, for functions whose data all points share."""
    flat = torch.func.vmap(torch.func.jacrev(constraint.residual))(u.reshape(-1, u.shape[-1]))
    return flat.reshape(*u.shape[:-1], *flat.shape[-2:])


def weight_of(metric: str, cov: ph.Covariance) -> ph.Covariance:
    return cov if metric == "oblique" else ph.Diagonal(torch.ones_like(cov.diagonal()))


def matvec(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
