"""Positive semidefinite and correlation matrices, ``X >= 0`` and ``X >= 0, X_ii = 1``.

A symmetric matrix is the vector of its lower triangle, with entries off the diagonal times the root of 2. Distances of
vectors are Frobenius distances of matrices; ``vectorise`` and ``matrix_of`` convert.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, ClassVar, Self

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard.constraints.base import Constraint, immutable
from probhard.constraints.cones import Cone, matrix_of
from probhard.constraints.equality import LinearEquality
from probhard.constraints.shapes import Term
from probhard.errors import ParameterError, optional


@immutable
class PositiveSemidefinite(Cone):
    """Symmetric matrices without negative eigenvalues, as vectors (*batch, size (size + 1) / 2).

    Args:
        size: Number of rows and columns.

    Raises:
        ParameterError: The size is no whole number of at least 1.
    """

    kind: ClassVar[str] = "semidefinite"
    size: int

    def __init__(self, size: int) -> None:
        if not isinstance(size, Integral) or size < 1:
            raise ParameterError(
                f"{type(self).__name__} got size={size!r}.",
                "A matrix has a whole number of rows, at least one.",
                "Pass it.",
            )
        self._set(size=int(size))

    @property
    def variables(self) -> int:
        return self.size * (self.size + 1) // 2

    @property
    def algorithm(self) -> str:
        return "eigenvalues; under other metrics augmented Lagrangians"

    @property
    def standard(self) -> bool:
        return True

    def excess(self, u: Tensor) -> Tensor:
        self.check_event(u, "The point")
        return -torch.linalg.eigvalsh(matrix_of(u))

    def excess_scale(self, u: Tensor) -> Tensor:
        return u.norm(dim=-1, keepdim=True).expand(*u.shape[:-1], self.size)

    def affine(self, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
        return torch.eye(n).to(like), like.new_zeros(n)

    def term(self, n: int, like: Tensor) -> Term:
        cp, size = optional("cvxpy", "cvx", "ConvexProgram"), self.size
        whole = sp.csr_array(matrix_of(torch.eye(n, dtype=torch.float64)).reshape(n, -1).T.numpy())
        return Term(("semidefinite", size), lambda u: [cp.reshape(whole @ u, (size, size), order="C") >> 0])

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size})"


@immutable
class Correlation(PositiveSemidefinite):
    """Correlation matrices: positive semidefinite with a diagonal of ones, as vectors (*batch, size (size + 1) / 2).

    Args:
        size: Number of rows and columns.

    Raises:
        ParameterError: The size is less than 1.
    """

    role: ClassVar[str] = ""

    @property
    def algorithm(self) -> str:
        return "augmented Lagrangians with semismooth Newton steps"

    @property
    def diagonal(self) -> Tensor:
        """Where the diagonal is in the vector, (size,)."""
        return torch.arange(1, self.size + 1).cumsum(0) - 1

    def residual(self, u: Tensor) -> Tensor:
        self.check_event(u, "The point")
        return u[..., self.diagonal.to(u.device)] - 1

    def scale(self, u: Tensor) -> Tensor:
        return u[..., self.diagonal.to(u.device)].abs() + 1

    def resolve(self, n: int) -> Constraint:
        """The cone and the rows ``X_ii = 1``."""
        rows = sp.csr_array((np.ones(self.size), (np.arange(self.size), self.diagonal.numpy())), (self.size, n))
        both: Constraint = LinearEquality(rows, torch.ones(self.size, dtype=torch.float64)) & PositiveSemidefinite(
            self.size
        )
        return both
