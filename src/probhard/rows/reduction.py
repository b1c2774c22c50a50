"""Equalities eliminated from a projection on rows ``A u = b, l <= C u <= h`` under a weight W.

    u0 = z - E (A z - b),     E = W A^T (A W A^T)^-1,     P = I - E A,     S = P W,     K = C S C^T.

The nearest point is ``u0 - S C^T y`` with multipliers y of the rows C alone, so a problem of their number is left.

| weight                  | class             | how                                                                  |
|-------------------------|-------------------|----------------------------------------------------------------------|
| one constant W = R R^T  | SharedReduction   | null space N of A R once: S = R N (R N)^T without cancellation       |
| diagonal, per element   | BatchedReduction  | Cholesky of A W A^T and one Schur complement for each element        |

Rows C are divided by their size ``sqrt(diag(C W C^T))``, so that K is at most 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from functools import cached_property

import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard.rows.dense import cholesky_solve, determined

REGULAR = 1e-8  # smallest pivot of A R, relative to the largest, with which rows count as independent
PAIRS = 10_000_000  # numbers in the products of all pairs of rows, up to which ``F W G^T`` is one product


class Reduction(ABC):
    """The maps of a projection with its equalities eliminated.

    Attributes:
        scale: What rows C are multiplied by, (*batch, m), without gradients.
        batch: Batch dimensions of the weight.
    """

    scale: Tensor

    def __init__(self, equal: Tensor, rows: Tensor, batch: torch.Size) -> None:
        self.equal, self.rows, self.batch = equal, rows, batch  # A (q, n), C (m, n) before it is scaled

    def numbers(self, lead: torch.Size) -> Tensor:
        """The flat numbers of the batch elements that elements of leading dimensions belong to, (L,)."""
        number = torch.arange(self.batch.numel(), device=self.equal.device).reshape(self.batch)
        return number.expand(lead).reshape(-1)

    @abstractmethod
    def gram(self, elements: Tensor) -> Tensor:
        """K of some batch elements (k,), by their flat numbers: (k, m, m)."""

    @abstractmethod
    def select(self, elements: Tensor) -> Reduction:
        """The reductions of some batch elements (k,), by their flat numbers."""

    @abstractmethod
    def among(self, index: Tensor) -> Tensor:
        """K among some rows, (*batch, k, k), for their numbers (*batch, k)."""

    @property
    @abstractmethod
    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """``P``, (*batch, n, n), ``C P`` and ``C S``, (*batch, m, n)."""

    @cached_property
    def determined(self) -> Tensor:
        """Variables that the equalities alone fix, (n,) bool."""
        return determined(self.equal)

    @abstractmethod
    def lift(self, r: Tensor) -> Tensor:
        """``E r``, (..., n), for residuals r (..., q)."""

    @abstractmethod
    def lift_transpose(self, x: Tensor) -> Tensor:
        """``E^T x``, (..., q), for x (..., n)."""

    @abstractmethod
    def push(self, y: Tensor) -> Tensor:
        """``S C^T y``, (..., n), for y (..., m)."""

    @abstractmethod
    def pull(self, x: Tensor) -> Tensor:
        """``C S x``, (..., m), for x (..., n)."""

    def nearest(self, z: Tensor, b: Tensor) -> Tensor:
        """u0 of points z (..., n) and right-hand sides b (..., q), with one step of refinement."""
        if not len(self.equal):
            return z
        u = z - self.lift(z @ self.equal.mT - b)
        return u - self.lift((u @ self.equal.mT - b).detach())

    def image(self, x: Tensor) -> Tensor:
        """``C x``, (..., m), for x (..., n)."""
        return self.scale * (x @ self.rows.mT)

    def image_transpose(self, y: Tensor) -> Tensor:
        """``C^T y``, (..., n), for y (..., m)."""
        return (self.scale * y) @ self.rows

    def project(self, x: Tensor) -> Tensor:
        """``P x``, (..., n)."""
        return x - self.lift(x @ self.equal.mT) if len(self.equal) else x

    def project_transpose(self, x: Tensor) -> Tensor:
        """``P^T x``, (..., n)."""
        return x - self.lift_transpose(x) @ self.equal if len(self.equal) else x


class SharedReduction(Reduction):
    """One constant weight for all elements.

    Args:
        equal: A, (q, n), of rank q.
        rows: C, (m, n).
        root: R with ``W = R R^T``, (n, r).
    """

    def __init__(self, equal: Tensor, rows: Tensor, root: Tensor) -> None:
        super().__init__(equal, rows, torch.Size())
        q = len(equal)
        basis, triangle = torch.linalg.qr((equal @ root).mT, mode="complete")
        free = root @ basis[:, q:]  # S = free free^T
        self.gain = torch.linalg.solve_triangular(triangle[:q].mT, (root @ basis[:, :q]), upper=False, left=False)
        self.scale = 1 / (rows @ root).norm(dim=-1).clamp(min=TINY)
        half = self.scale.unsqueeze(-1) * (rows @ free)
        self.square = half @ half.mT  # K
        self.columns = free @ half.mT  # S C^T, (n, m)
        pivots = triangle.diagonal().abs()
        self.regular = not q or bool(pivots.amin() > REGULAR * pivots.amax())

    @cached_property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        eye = torch.eye(self.equal.shape[-1], dtype=self.gain.dtype, device=self.gain.device)
        projection = eye - self.gain @ self.equal
        return projection, self.scale.unsqueeze(-1) * (self.rows @ projection), self.columns.mT.contiguous()

    def gram(self, elements: Tensor) -> Tensor:
        return self.square.expand(len(elements), -1, -1)

    def select(self, elements: Tensor) -> Reduction:
        return self

    def among(self, index: Tensor) -> Tensor:
        return self.square[index.unsqueeze(-1), index.unsqueeze(-2)]

    def lift(self, r: Tensor) -> Tensor:
        return r @ self.gain.mT

    def lift_transpose(self, x: Tensor) -> Tensor:
        return x @ self.gain

    def push(self, y: Tensor) -> Tensor:
        return y @ self.columns.mT

    def pull(self, x: Tensor) -> Tensor:
        return x @ self.columns


class BatchedReduction(Reduction):
    """Diagonal weights, one for each element, or with gradients.

    Args:
        equal: A, (q, n), of rank q.
        rows: C, (m, n), the last of them unit rows.
        units: The variables of the unit rows, (k,).
        weight: The diagonal of W, (*batch, n), positive.
    """

    def __init__(self, equal: Tensor, rows: Tensor, units: Tensor, weight: Tensor) -> None:
        super().__init__(equal, rows, weight.shape[:-1])
        self.weight, self.units, self.dense = weight, units, rows[: len(rows) - len(units)]
        with torch.no_grad():
            size = torch.cat([weight @ self.dense.square().mT, weight.index_select(-1, units)], -1)
            self.scale = size.clamp(min=TINY).rsqrt()
        if len(equal):
            self.lower = _factor(_weighted(equal, equal, weight))

    def gram(self, elements: Tensor) -> Tensor:
        weight, units, dense = self.weight.reshape(-1, self.weight.shape[-1]), self.units, self.dense
        scale = self.scale.reshape(-1, len(self.rows)).index_select(0, elements)
        weight = weight.index_select(0, elements)
        own = weight.index_select(-1, units)
        gram = _weighted(dense, dense, weight)
        if len(units):
            crossed = dense.index_select(-1, units) * own.unsqueeze(-2)
            below = torch.cat([crossed.mT, torch.diag_embed(own)], -1)
            gram = torch.cat([torch.cat([gram, crossed], -1), below], -2)
        if len(self.equal):
            images = _weighted(self.equal, dense, weight)  # A W C^T
            if len(units):
                images = torch.cat([images, self.equal.index_select(-1, units) * own.unsqueeze(-2)], -1)
            lower = self.lower.reshape(-1, *self.lower.shape[-2:]).index_select(0, elements)
            half = torch.linalg.solve_triangular(lower, images, upper=False)
            gram = gram - half.mT @ half
        return gram * (scale.unsqueeze(-1) * scale.unsqueeze(-2))

    def select(self, elements: Tensor) -> BatchedReduction:
        part = copy(self)
        part.__dict__.pop("matrices", None)
        part.weight = self.weight.reshape(-1, self.weight.shape[-1]).index_select(0, elements)
        part.scale = self.scale.reshape(-1, len(self.rows)).index_select(0, elements)
        part.batch = part.weight.shape[:-1]
        if len(self.equal):
            part.lower = self.lower.reshape(-1, *self.lower.shape[-2:]).index_select(0, elements)
        return part

    def among(self, index: Tensor) -> Tensor:
        rows = self.rows.index_select(0, index.flatten()).reshape(*index.shape, self.rows.shape[-1])
        rows = self.scale.gather(-1, index).unsqueeze(-1) * rows
        weighted = rows * self.weight.unsqueeze(-2)
        gram = weighted @ rows.mT
        if len(self.equal):
            half = torch.linalg.solve_triangular(self.lower, (weighted @ self.equal.mT).mT, upper=False)
            gram = gram - half.mT @ half
        return gram

    @cached_property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        eye = torch.eye(self.weight.shape[-1], dtype=self.weight.dtype, device=self.weight.device)
        rows, weight = self.scale.unsqueeze(-1) * self.rows, self.weight.unsqueeze(-2)
        if not len(self.equal):
            return eye, rows, rows * weight
        gain = torch.cholesky_solve(self.equal * weight, self.lower)  # E^T
        projection = eye - gain.mT @ self.equal
        rows = rows - (rows @ gain.mT) @ self.equal
        return projection, rows, rows * weight

    def solve(self, r: Tensor) -> Tensor:
        """``(A W A^T)^-1 r``, (..., q), for r (..., q)."""
        if not len(self.equal):
            return r
        if r.shape != self.lower.shape[:-1]:
            return cholesky_solve(self.lower, r)
        half = torch.linalg.solve_triangular(self.lower, r.unsqueeze(-1), upper=False)  # does not copy the factor
        return torch.linalg.solve_triangular(self.lower.mT, half, upper=True).squeeze(-1)

    def lift(self, r: Tensor) -> Tensor:
        return self.weight * (self.solve(r) @ self.equal)

    def lift_transpose(self, x: Tensor) -> Tensor:
        return self.solve((self.weight * x) @ self.equal.mT)

    def push(self, y: Tensor) -> Tensor:
        return self.project(self.weight * self.image_transpose(y))

    def pull(self, x: Tensor) -> Tensor:
        return self.image(self.project(self.weight * x))


def _factor(gram: Tensor) -> Tensor:
    """Cholesky factor of symmetric matrices, (*batch, q, q), in their place if they need no gradients."""
    if gram.requires_grad:
        return torch.linalg.cholesky_ex(gram).L
    columns = gram.mT  # the order in which LAPACK works
    info = torch.empty(gram.shape[:-2], dtype=torch.int32, device=gram.device)
    return torch.linalg.cholesky_ex(columns, out=(columns, info)).L


def _weighted(first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
    """``F diag(w) G^T``, (*batch, i, j), for rows F (i, n), G (j, n) and weights (*batch, n)."""
    shape = len(first), len(second)
    if weight.dim() == 1 or shape[0] * shape[1] * weight.shape[-1] > PAIRS:
        return (first * weight.unsqueeze(-2)) @ second.mT
    pairs = (first.unsqueeze(1) * second).reshape(-1, weight.shape[-1])  # one product for all elements
    return (weight @ pairs.mT).unflatten(-1, shape)
