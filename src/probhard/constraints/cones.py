"""Symmetric cones: ``M u + m`` in a second-order cone or in the cone of positive semidefinite matrices.

Both cones are their own duals, and a point of each has eigenvalues: it is in the cone if none is negative, and its
nearest point has the negative ones set to 0. Solvers use this alone; see ``solvers.symmetric_cones``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from probhard.constraints.base import Constraint, immutable
from probhard.constraints.shapes import Term
from probhard.errors import ShapeError


@immutable
class Cone(Constraint):
    """``M u + m`` in a symmetric cone.

    Attributes:
        kind: ``"semidefinite"`` or ``"second-order"``: the cone.
    """

    role: ClassVar[str] = "cones"
    kind: ClassVar[str] = ""

    @property
    @abstractmethod
    def standard(self) -> bool:
        """Whether M is the identity and m is 0."""

    @abstractmethod
    def affine(self, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """M (*batch, k, n) and m (*batch, k) for n variables, in the dtype of ``like``."""

    @abstractmethod
    def term(self, n: int, like: Tensor) -> Term:
        """The cone as part of a cvxpy problem in n variables."""


def vectorise(matrix: Tensor) -> Tensor:
    """The lower triangle of symmetric matrices, row by row, with entries off the diagonal times the root of 2.

    The Euclidean norm of the vector is the Frobenius norm of the matrix.

    Args:
        matrix: (*batch, p, p); the mean of the matrix and its transpose is used.

    Returns:
        Vectors, (*batch, p (p + 1) / 2).

    Raises:
        ShapeError: The matrices are not square.
    """
    if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ShapeError(
            f"vectorise got shape {tuple(matrix.shape)}.",
            "The last two dimensions hold a symmetric matrix.",
            "Pass (*batch, p, p).",
        )
    row, column = torch.tril_indices(matrix.shape[-1], matrix.shape[-1], device=matrix.device)
    entries = 0.5 * (matrix[..., row, column] + matrix[..., column, row])
    return torch.where(row == column, entries, 2**0.5 * entries)


def matrix_of(vector: Tensor) -> Tensor:
    """The symmetric matrices of vectors, inverse to ``vectorise``.

    Args:
        vector: (*batch, p (p + 1) / 2).

    Returns:
        Matrices, (*batch, p, p).

    Raises:
        ShapeError: The length is not a triangular number.
    """
    size = matrix_size(vector.shape[-1] if vector.dim() else 0)
    row, column = torch.tril_indices(size, size, device=vector.device)
    entries = torch.where(row == column, vector, vector * 0.5**0.5)
    place = torch.zeros(size, size, dtype=torch.int64, device=vector.device)
    order = torch.arange(len(row), device=vector.device)
    place[row, column] = order
    place[column, row] = order
    return entries[..., place]


def matrix_size(n: int) -> int:
    """The size p of the symmetric matrices with n = p (p + 1) / 2 entries.

    Raises:
        ShapeError: There is none.
    """
    size = round(((8 * n + 1) ** 0.5 - 1) / 2)
    if size < 1 or size * (size + 1) // 2 != n:
        raise ShapeError(
            f"{n} variables are not the triangle of a symmetric matrix.",
            "A p x p matrix has p (p + 1) / 2 entries on and below the diagonal.",
            "Use vectorise on the matrices.",
        )
    return size
