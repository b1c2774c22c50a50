"""Dense rows that depend on each other: ``M = A W A^T`` is filled up along its null space.

With the rows scaled to a unit diagonal, ``M = S^-1 E L E^T S^-1``. The eigenvectors N of eigenvalues near 0 are added,

    M + S^-1 N N^T S^-1,

which has a Cholesky factor and, since ``A^T S N = 0``, the same products ``W A^T M^+ A`` as the pseudo-inverse. N is
constant in derivatives: rows that stay dependent change these products only in second order.

Rows that are independent by themselves may look dependent in M, whose condition number is the square of that of
``A W^1/2``, if one weight is far larger than all others. Their factor is the triangle of ``W^1/2 A^T = Q R``.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from probhard._util.numerics import TINY, WEIGHT_FLOOR
from probhard._util.tensors import divide, matvec, safe_sqrt
from probhard.rows.dense import DenseRows, DenseRowsFactor

DEPENDENT = 1e-13  # eigenvalues of the scaled M, relative to the largest, that count as 0
INDEPENDENT = 1e-6  # smallest sine of the angle between a row and those before it, at which rows are independent


class RedundantRows(DenseRows):
    """Dense rows with the filling of their null space.

    Args:
        matrix: A, (*batch, q, n).
        filling: What is added to ``A W A^T``, (*batch, q, q); 0 for elements with independent rows.
        graded: Elements whose factor is the triangle of ``W^1/2 A^T``, (*batch,) bool; none if None.
    """

    def __init__(self, matrix: Tensor, filling: Tensor, graded: Tensor | None = None) -> None:
        super().__init__(matrix)
        self.filling, self.graded = filling, graded

    def factor(self, weight: Tensor) -> DenseRowsFactor:
        if self.graded is None:
            return DenseRowsFactor(self, weight, self.filling)
        return GradedRowsFactor(self, weight, self.filling, self.graded)


class GradedRowsFactor(DenseRowsFactor):
    """``L = R^T`` with ``W^1/2 A^T = Q R`` for graded elements (*batch,); as without them for others.

    ``W A^T M^-1 r = W^1/2 Q R^-T r`` then loses no digits, however large the multiplier ``M^-1 r`` is.
    """

    def __init__(self, structure: DenseRows, weight: Tensor, filling: Tensor, graded: Tensor) -> None:
        super().__init__(structure, weight, filling)
        self.graded, self.root, at = graded, safe_sqrt(weight), graded[..., None, None]
        matrix = structure.map.matrix
        matrix = torch.where(at, matrix * self.root.unsqueeze(-2), torch.eye(*matrix.shape[-2:]).to(matrix))
        triangle, self.basis = _triangle(matrix)  # the basis is Q, (*batch, n, q)
        self.lower = torch.where(at, triangle, self.lower)
        self.info = torch.where(graded, 0, self.info)

    def images(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """``W A^T M^-1 r`` and ``A^T M^-1 r``, (*batch, n), of graded elements for r (*batch, q)."""
        half = torch.linalg.solve_triangular(self.lower, r.unsqueeze(-1), upper=False).squeeze(-1)
        along = matvec(self.basis, half)
        return self.root * along, divide(along, self.root)

    def dual(self, v: Tensor) -> Tensor:
        """``v - A^T M^-1 A W v``, (*batch, n), of graded elements."""
        along = matvec(self.basis, matvec(self.basis.mT, self.root * v))
        return v - divide(along, self.root)

    def pivots(self) -> Tensor:
        return torch.where(self.graded.unsqueeze(-1), 1.0, super().pivots())

    @cached_property
    def sines(self) -> Tensor:
        return torch.where(self.graded.unsqueeze(-1), 1.0, super().sines)


def _triangle(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """L (*batch, q, q) with a positive diagonal and Q (*batch, n, q) with ``B = L Q^T``, for B (*batch, q, n)."""
    basis, upper = torch.linalg.qr(matrix.mT)
    sign = torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return (sign.unsqueeze(-1) * upper).mT, basis * sign.unsqueeze(-2)


@torch.no_grad()
def independent(matrix: Tensor, weight: Tensor) -> Tensor:
    """Where the rows of A (*batch, q, n) are independent, apart from weights (*batch, n) that are not 0; bool.

    Weights below the floor are those of variables that are held.
    """
    if matrix.shape[-2] > matrix.shape[-1]:
        return torch.zeros(matrix.shape[:-2], dtype=torch.bool, device=matrix.device)
    free = weight > 0.5 * WEIGHT_FLOOR * weight.amax(-1, keepdim=True)
    matrix = torch.where(free.unsqueeze(-2), matrix, 0.0)
    size = matrix.norm(dim=-1, keepdim=True)
    sound = (torch.isfinite(size) & (size > 0)).all(-2).squeeze(-1)
    matrix = torch.where(sound[..., None, None], matrix / size, torch.eye(*matrix.shape[-2:]).to(matrix))
    return sound & (_triangle(matrix)[0].diagonal(dim1=-2, dim2=-1).amin(-1) > INDEPENDENT)


@torch.no_grad()
def filling(gram: Tensor, dependent: float = DEPENDENT) -> Tensor:
    """``S^-1 N N^T S^-1``, (*batch, q, q).

    Args:
        gram: ``A W A^T``, (*batch, q, q).
        dependent: Eigenvalues of the scaled matrix, relative to the largest, that count as 0.
    """
    finite = torch.isfinite(gram).all(-1).all(-1)[..., None, None]
    gram = torch.where(finite, gram, torch.eye(gram.shape[-1]).to(gram))
    size = gram.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    largest = size.amax(-1, keepdim=True)
    root = torch.where(size > TINY + 1e-30 * largest, size, torch.where(largest > 0, largest, 1.0)).sqrt()
    values, vectors = torch.linalg.eigh(gram / (root.unsqueeze(-1) * root.unsqueeze(-2)))
    null = values <= dependent * values.amax(-1, keepdim=True).clamp(min=TINY)
    basis = root.unsqueeze(-1) * torch.where(null.unsqueeze(-2), vectors, 0.0)
    return basis @ basis.mT
