"""Convex programs, and cvxpy and closed forms as their oracles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from probhard.laws.covariance import Covariance, Diagonal
from probhard.projection.base import Options
from probhard.projection.convex_program import ProgramProjector
from probhard.projection.parts import parts_of

cp = pytest.importorskip("cvxpy", reason="cvxpy is not installed; convex programs need probhard[cvx]")
pytest.importorskip("cvxpylayers.torch", reason="cvxpylayers is not installed; convex programs need probhard[cvx]")


N = 6
PINNED = torch.tensor([0.3, 0, 0, 0, 0, 0], dtype=torch.float64)
FREE = torch.tensor([0, 9, 9, 9, 9, 0], dtype=torch.float64)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1


def around(u, c):
    return [cp.norm(u - c, 2) <= 1]


def unit(u):
    return [cp.norm(u, 2) <= 1]


def sparse(u):
    return [cp.norm(u, 1) <= 1]


def matrix(u):
    """The symmetric 3 x 3 matrix of six numbers."""
    return cp.bmat([[u[0], u[1], u[2]], [u[1], u[3], u[4]], [u[2], u[4], u[5]]])


def semidefinite(u):
    return [matrix(u) >> 0]


def smooth_maximum(u, level):
    return [cp.log_sum_exp(u) <= level]


def entropic(u):
    return [cp.sum(cp.entr(u)) >= 1.0, cp.sum(u) == 1]


def projector(constraint, weight: Covariance | Tensor, n: int = N) -> ProgramProjector:
    weight = Diagonal(weight) if isinstance(weight, Tensor) else weight
    return ProgramProjector(parts_of(constraint, n), weight, Options())


def by_cvxpy(describe, z: Tensor, root: Tensor) -> Tensor:
    """One point by cvxpy itself."""
    u, factor = cp.Variable(len(z)), root.numpy()
    scale = 1 / np.linalg.norm(factor @ z.numpy())
    cost = cp.sum_squares(scale * factor @ u - scale * factor @ z.numpy())
    tight = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-11)
    cp.Problem(cp.Minimize(cost), describe(u)).solve(solver=cp.CLARABEL, **tight)
    return torch.from_numpy(u.value)


def on_ball(z: Tensor, weight: Tensor) -> Tensor:
    """The nearest point of the unit ball under a diagonal weight, by bisection for its multiplier."""
    low, high = torch.full_like(z[..., :1], -30.0), torch.full_like(z[..., :1], 60.0)
    for _ in range(200):
        middle = (low + high) / 2
        outside = (z / (1 + middle.exp() * weight)).norm(dim=-1, keepdim=True) > 1
        low, high = torch.where(outside, middle, low), torch.where(outside, high, middle)
    return torch.where(z.norm(dim=-1, keepdim=True) > 1, z / (1 + high.exp() * weight), z)


def difference(function, inputs: list[Tensor], directions: list[Tensor], step: float = 1e-5) -> Tensor:
    with torch.no_grad():
        ahead, behind = (
            function(*(x + s * step * d for x, d in zip(inputs, directions, strict=True))) for s in (1, -1)
        )
    return (ahead - behind) / (2 * step)
