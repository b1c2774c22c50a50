"""Derivatives of the reduced projection.

On the face of its active rows a the projection is linear in z, with the tangent

    du*/dz = (I - S C_a^T K_aa^-1 C_a) P.

Gradients to a diagonal weight w need no derivative of a factor. With ``N = (A, C_a)`` and ``M = N W N^T`` the point is
``u = z - w p``, ``p = N^T x``, ``M x = N z - t``. The gradient of x to w is ``-(N^T M^-1 g) p`` for a gradient g of x.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from probhard.laws.covariance import Covariance, Dense, Diagonal, LowRank
from probhard.projection.near_rows import FEW
from probhard.rows.dense import cholesky_solve
from probhard.rows.reduction import BatchedReduction, Reduction
from probhard.solvers.pivoting import RIDGE, ActiveRows
from probhard.tangent.base import Differential

INDEPENDENT = 1e-5  # pivots of K_aa from which rows count as independent


class ReducedTangent(Differential):
    """``(I - S C_a^T K_aa^-1 C_a) P``, factored on demand.

    Args:
        reduce: Makes the reduction.
        side: Sides of the rows, (*lead, m).
        fixed: Variables at a bound or fixed by the equalities, (*lead, n) bool.
        elements: Batch elements of the weight that have active rows, by their flat numbers, (k,).
        owner: Which of them each element has, flattened, (L,).
        gram: Their K, (k, m, m); None if it is not known.
    """

    def __init__(
        self,
        reduce: Callable[[], Reduction],
        side: Tensor,
        fixed: Tensor,
        elements: Tensor,
        owner: Tensor,
        gram: Tensor | None = None,
    ) -> None:
        self.reduce, self.side, self.fixed, self.elements, self.owner = reduce, side, fixed, elements, owner
        self.known = gram

    @property
    def shape(self) -> torch.Size:
        return self.fixed.shape

    @cached_property
    def reduction(self) -> Reduction:
        """The equalities, eliminated under the weight."""
        return self.reduce()

    @cached_property
    def active(self) -> ActiveRows:
        """The rows at their sides."""
        return ActiveRows.of(self.side)

    @cached_property
    def lower(self) -> Tensor:
        """Cholesky factor of K_aa, (*lead, k, k)."""
        active, count = self.active, self.active.used.numel()
        if self.known is None and count <= FEW * len(self.elements) * self.side.shape[-1]:
            lead = self.side.shape[:-1]
            part = self.reduction.select(self.reduction.numbers(lead))
            among = part.among(active.index.reshape(lead.numel(), active.index.shape[-1]))
            return active.factored(among.reshape(*lead, *among.shape[-2:]))[0]
        gram = self.reduction.gram(self.elements) if self.known is None else self.known
        return active.factor(active.rows(gram, self.owner))[0]

    def solve(self, r: Tensor) -> Tensor:
        """``K_aa^-1 r_a`` among all rows, (..., *lead, m), for r (..., *lead, m)."""
        y = cholesky_solve(self.lower, self.active.gather(r))
        y = y + RIDGE * cholesky_solve(self.lower, y)  # what the ridge left
        return self.active.spread(y, r.shape[-1])

    def apply(self, x: Tensor) -> Tensor:
        moved = self.reduction.project(x.to(torch.float64))
        moved = moved - self.reduction.push(self.solve(self.reduction.image(moved)))
        return torch.where(self.fixed, 0.0, moved).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        moved = torch.where(self.fixed, 0.0, x.to(torch.float64))
        moved = moved - self.reduction.image_transpose(self.solve(self.reduction.pull(moved)))
        return self.reduction.project_transpose(moved).to(x.dtype)

    @cached_property
    def matrix(self) -> Tensor:
        """The tangent as a matrix, (*lead, n, n); exactly 0 at a vertex."""
        reduction = self.reduction
        whole, first, second = reduction.matrices
        number = reduction.numbers(self.side.shape[:-1])
        first, second = (self.active.rows(x.reshape(-1, *x.shape[-2:]), number) for x in (first, second))
        used = self.active.used.unsqueeze(-1)
        first, second = torch.where(used, first, 0.0), torch.where(used, second, 0.0)
        solved = torch.cholesky_solve(first, self.lower)
        solved = solved + RIDGE * torch.cholesky_solve(solved, self.lower)
        matrix = whole - second.mT @ solved
        pivots = self.lower.detach().diagonal(dim1=-2, dim2=-1)
        rank = (self.active.used & (pivots > INDEPENDENT)).sum(-1, keepdim=True)
        vertex = rank >= self.shape[-1] - len(reduction.equal)
        return torch.where((self.fixed | vertex).unsqueeze(-1), 0.0, matrix)

    def variance(self, cov: Covariance) -> Tensor:
        if not isinstance(cov, Diagonal | LowRank | Dense):
            return super().variance(cov)
        wide = cov.to(torch.float64)
        if isinstance(wide, Diagonal):
            return (self.matrix.square() @ wide.variance.unsqueeze(-1)).squeeze(-1).to(cov.dtype)
        return (self.matrix @ wide.root_matrix()).square().sum(-1).to(cov.dtype)


def on_face(weight: Tensor, z: Tensor, right: Tensor, bound: Tensor, face: ReducedTangent) -> Tensor:
    """The projection on a face, with gradients to everything, also to the weight.

    Args:
        weight: The diagonal of W, (*batch, n).
        z: Points, (*lead, n).
        right: b, (*batch, q).
        bound: Sides that the rows attain, (*lead, m); scaled like the rows.
        face: The tangent, for weights without gradients.

    Returns:
        The points, (*lead, n).
    """
    reduction = face.reduction
    y_equal, y = _FaceSolve.apply(weight, z @ reduction.equal.mT - right, reduction.image(z) - bound, face)
    return z - weight * _pull(reduction, y_equal, y)


def _pull(reduction: Reduction, y_equal: Tensor, y: Tensor) -> Tensor:
    """``N^T x``, (*lead, n)."""
    return y_equal @ reduction.equal + reduction.image_transpose(y)


class _FaceSolve(torch.autograd.Function):
    """``(N W N^T)^-1 r`` for residuals of equalities (*lead, q) and rows (*lead, m); 0 for rows that are not active."""

    @staticmethod
    def forward(weight: Tensor, r_equal: Tensor, r: Tensor, face: ReducedTangent) -> tuple[Tensor, Tensor]:
        reduction = face.reduction
        assert isinstance(reduction, BatchedReduction)
        first = reduction.solve(r_equal)
        y = face.solve(r - reduction.image(reduction.weight * (first @ reduction.equal)))
        pushed = reduction.weight * reduction.image_transpose(y)
        return first - reduction.solve(pushed @ reduction.equal.mT), y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, ReducedTangent], output: Any) -> None:
        ctx.face = inputs[3]
        ctx.save_for_backward(inputs[0], *output)
        ctx.save_for_forward(inputs[0], *output)

    @staticmethod
    def backward(ctx: Any, g_equal: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        weight, y_equal, y = ctx.saved_tensors
        h_equal, h = _FaceSolve.apply(weight, g_equal, g, ctx.face)
        reduction = ctx.face.reduction
        slope = -_pull(reduction, h_equal, h) * _pull(reduction, y_equal, y)
        return slope.sum_to_size(weight.shape), h_equal, h, None

    @staticmethod
    def jvp(ctx: Any, t_weight: Tensor, t_equal: Tensor, t: Tensor, _: None) -> tuple[Tensor, Tensor]:
        weight, y_equal, y = ctx.saved_tensors
        reduction = ctx.face.reduction
        moved = t_weight * _pull(reduction, y_equal, y)
        found: tuple[Tensor, Tensor] = _FaceSolve.apply(
            weight, t_equal - moved @ reduction.equal.mT, t - reduction.image(moved), ctx.face
        )
        return found
