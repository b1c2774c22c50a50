"""Covariances by structure: diagonal, unit, low rank plus diagonal, and dense by its Cholesky factor.

| class            | matrix C                                              | products cost per vector |
|------------------|-------------------------------------------------------|--------------------------|
| Diagonal         | diag(variance)                                        | n                        |
| Identity         | I                                                     | n                        |
| LowRank          | diag(d) + G G^T                                       | n rank                   |
| Spectral         | diag(d) + diag(s) T^T diag(p) T diag(s)               | n log n                  |
| HierarchyFactors | diag(d) + (S B) (S B)^T, one column per aggregate     | n depth                  |
| Dense            | L L^T, lower triangular                               | n^2                      |

``Spectral`` and ``HierarchyFactors`` are in files of their own; with ``LowRank`` they share ``Factored``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.tensors import broadcast, check_finite, checking, matvec, safe_sqrt
from probhard.errors import ParameterError, ShapeError
from probhard.laws.base import Covariance, LinearMap
from probhard.laws.factored import Factored

__all__ = [
    "Covariance",
    "Dense",
    "Diagonal",
    "Factored",
    "Identity",
    "LowRank",
    "check_finite",
    "matvec",
    "safe_sqrt",
]


@dataclass(frozen=True, eq=False)
class Diagonal(Covariance):
    """``C = diag(variance)``.

    Args:
        variance: (*batch, n).
        known_stddev: Roots of the variances, (*batch, n), where they are known; else they are computed.
    """

    variance: Tensor  # (*batch, n)
    known_stddev: Tensor | None = None

    @classmethod
    def from_stddev(cls, stddev: Tensor) -> Diagonal:
        """The covariance with these standard deviations, (*batch, n); those that are 0 keep their gradient."""
        return cls(stddev.square(), stddev)

    @property
    def stddev(self) -> Tensor:
        """Standard deviations, (*batch, n)."""
        return safe_sqrt(self.variance) if self.known_stddev is None else self.known_stddev

    @property
    def shape(self) -> torch.Size:
        return self.variance.shape

    @property
    def root_size(self) -> int:
        return self.variance.shape[-1]

    def diagonal(self) -> Tensor:
        return self.variance

    def apply(self, x: Tensor) -> Tensor:
        return self.variance * x

    def root(self, noise: Tensor) -> Tensor:
        return self.stddev * noise

    def root_transpose(self, x: Tensor) -> Tensor:
        return self.stddev * x

    def functional_variance(self, rows: LinearMap) -> Tensor:
        return rows.at(self.variance).squared(self.variance)

    def scaled(self, scale: Tensor) -> Diagonal:
        root = None if self.known_stddev is None else self.known_stddev * scale.abs()
        return Diagonal(self.variance * scale.square(), root)

    def to(self, *args: object, **kwargs: object) -> Diagonal:
        root = None if self.known_stddev is None else self.known_stddev.to(*args, **kwargs)  # type: ignore[call-overload]
        return Diagonal(self.variance.to(*args, **kwargs), root)  # type: ignore[call-overload]

    def solve(self, x: Tensor) -> Tensor:
        return x / self.variance

    def log_determinant(self) -> Tensor:
        return self.variance.log().sum(-1)

    def validate(self) -> None:
        if self.known_stddev is None:
            check_finite("The variance", self.variance, minimum=0.0)
        else:
            check_finite("The standard deviation", self.known_stddev, minimum=0.0)


@dataclass(frozen=True, eq=False)
class Identity(Diagonal):
    """``C = I``, the weight of the orthogonal metric; solvers factor it once for all batches."""

    @classmethod
    def like(cls, x: Tensor) -> Identity:
        """The unit covariance of the variables of x (*batch, n), in its dtype and on its device."""
        return cls(torch.ones(x.shape[-1], dtype=x.dtype, device=x.device))


@dataclass(frozen=True, eq=False)
class LowRank(Factored):
    """``C = F F^T + diag(d)`` with a factor F of few columns.

    Args:
        factor: F, (*batch, n, rank).
        diagonal_part: d, (*batch, n), >= 0.

    Raises:
        ShapeError: If the factor and the diagonal have different n.
    """

    factor: Tensor  # (*batch, n, rank)
    diagonal_part: Tensor  # (*batch, n)

    def __post_init__(self) -> None:
        if self.factor.dim() < 2 or self.factor.shape[-2] != self.diagonal_part.shape[-1]:
            raise ShapeError(
                f"LowRank got a factor {tuple(self.factor.shape)} and a diagonal {tuple(self.diagonal_part.shape)}.",
                "The factor is (*batch, n, rank) and the diagonal (*batch, n), with the same n.",
                "Transpose the factor, or check the size of the last layer.",
            )

    @property
    def shape(self) -> torch.Size:
        return broadcast(self.factor.shape[:-1], self.diagonal_part.shape)

    @property
    def factor_size(self) -> int:
        return self.factor.shape[-1]

    def factor_apply(self, e: Tensor) -> Tensor:
        return matvec(self.factor, e)

    def factor_transpose(self, x: Tensor) -> Tensor:
        return matvec(self.factor.mT, x)

    def factor_diagonal(self) -> Tensor:
        return self.factor.square().sum(-1)

    def factor_norms(self, weight: Tensor) -> Tensor:
        return (self.factor.square() * weight.unsqueeze(-1)).sum(-2)

    def functional_variance(self, rows: LinearMap) -> Tensor:
        rows = rows.at(self.factor)
        return rows.squared(self.diagonal_part) + rows.apply(self.factor.mT).square().sum(-2)

    def solve(self, x: Tensor) -> Tensor:
        scaled = self.factor / self.diagonal_part.unsqueeze(-1)
        eye = torch.eye(self.factor_size, dtype=x.dtype, device=x.device)
        lower = torch.linalg.cholesky(eye + self.factor.mT @ scaled)
        inner = torch.cholesky_solve(matvec(scaled.mT, x).unsqueeze(-1), lower).squeeze(-1)
        return x / self.diagonal_part - matvec(scaled, inner)

    def log_determinant(self) -> Tensor:
        eye = torch.eye(self.factor_size, dtype=self.factor.dtype, device=self.factor.device)
        inner = eye + self.factor.mT @ (self.factor / self.diagonal_part.unsqueeze(-1))
        return torch.logdet(inner) + self.diagonal_part.log().sum(-1)

    def scaled(self, scale: Tensor) -> LowRank:
        return LowRank(self.factor * scale.unsqueeze(-1), self.diagonal_part * scale.square())

    def weighted(self, own: Tensor | float, shared: Tensor | float) -> LowRank:
        return LowRank(_per_row(shared, self.factor) * self.factor, _squared(own) * self.diagonal_part)

    def to(self, *args: object, **kwargs: object) -> LowRank:
        return LowRank(self.factor.to(*args, **kwargs), self.diagonal_part.to(*args, **kwargs))  # type: ignore[call-overload]

    def validate(self) -> None:
        check_finite("The low-rank factor", self.factor)
        check_finite("The diagonal of the low-rank covariance", self.diagonal_part, minimum=0.0)


def _squared(number: Tensor | float) -> Tensor | float:
    return number**2


def _per_row(number: Tensor | float, factor: Tensor) -> Tensor | float:
    """A multiplier of scales (..., 1 or n) as one of the rows of a factor (*batch, n, rank)."""
    return number.unsqueeze(-1).to(factor) if isinstance(number, Tensor) and number.dim() else number


@dataclass(frozen=True, eq=False)
class Dense(Covariance):
    """``C = L L^T`` with a lower triangular L, as in ``torch.distributions.MultivariateNormal``.

    Args:
        scale_tril: L, (*batch, n, n).

    Raises:
        ShapeError: If ``scale_tril`` is not square.
    """

    scale_tril: Tensor  # (*batch, n, n)

    def __post_init__(self) -> None:
        if self.scale_tril.dim() < 2 or self.scale_tril.shape[-1] != self.scale_tril.shape[-2]:
            raise ShapeError(
                f"Dense got a scale_tril of shape {tuple(self.scale_tril.shape)}.",
                "It is the lower Cholesky factor, (*batch, n, n).",
                "Use LowRank for a factor with fewer columns.",
            )

    @property
    def shape(self) -> torch.Size:
        return self.scale_tril.shape[:-1]

    @property
    def root_size(self) -> int:
        return self.scale_tril.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.scale_tril.dtype

    @property
    def device(self) -> torch.device:
        return self.scale_tril.device

    def diagonal(self) -> Tensor:
        return self.scale_tril.square().sum(-1)

    def apply(self, x: Tensor) -> Tensor:
        return matvec(self.scale_tril, matvec(self.scale_tril.mT, x))

    def root(self, noise: Tensor) -> Tensor:
        return matvec(self.scale_tril, noise)

    def root_transpose(self, x: Tensor) -> Tensor:
        return matvec(self.scale_tril.mT, x)

    def functional_variance(self, rows: LinearMap) -> Tensor:
        return rows.at(self.scale_tril).apply(self.scale_tril.mT).square().sum(-2)

    def solve(self, x: Tensor) -> Tensor:
        return torch.cholesky_solve(x.unsqueeze(-1), self.scale_tril).squeeze(-1)

    def log_determinant(self) -> Tensor:
        return 2 * self.scale_tril.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)

    def root_matrix(self) -> Tensor:
        return self.scale_tril

    def scaled(self, scale: Tensor) -> Dense:
        return Dense(self.scale_tril * scale.unsqueeze(-1))

    def to(self, *args: object, **kwargs: object) -> Dense:
        return Dense(self.scale_tril.to(*args, **kwargs))  # type: ignore[call-overload]

    def validate(self) -> None:
        check_finite("The Cholesky factor", self.scale_tril)
        if checking() and bool((self.scale_tril.triu(1) != 0).any()):
            raise ParameterError(
                "The Cholesky factor of Dense has entries above its diagonal.",
                "L must be lower triangular.",
                "Pass torch.linalg.cholesky(covariance), not the covariance itself.",
            )
