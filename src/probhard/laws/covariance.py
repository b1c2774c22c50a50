"""Covariances by structure: diagonal, unit, low rank plus diagonal, and dense by its Cholesky factor.

| class    | matrix C                | products cost per vector |
|----------|-------------------------|--------------------------|
| Diagonal | diag(variance)          | n                        |
| Identity | I                       | n                        |
| LowRank  | F F^T + diag(d)         | n rank                   |
| Dense    | L L^T, lower triangular | n^2                      |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probhard._util.tensors import broadcast, check_finite, checking, matvec, safe_sqrt
from probhard.errors import ParameterError, ShapeError
from probhard.laws.base import Covariance

__all__ = [
    "Covariance",
    "Dense",
    "Diagonal",
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

    def scaled(self, scale: Tensor) -> Diagonal:
        root = None if self.known_stddev is None else self.known_stddev * scale.abs()
        return Diagonal(self.variance * scale.square(), root)

    def to(self, *args: object, **kwargs: object) -> Diagonal:
        root = None if self.known_stddev is None else self.known_stddev.to(*args, **kwargs)  # type: ignore[call-overload]
        return Diagonal(self.variance.to(*args, **kwargs), root)  # type: ignore[call-overload]

    def quadratic(self, x: Tensor) -> Tensor:
        return (x.square() / self.variance).sum(-1)

    def log_determinant(self) -> Tensor:
        return self.variance.log().sum(-1)

    def functional_variance(self, rows: Any) -> Tensor:
        return rows.at(self.variance).squared(self.variance)

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
class LowRank(Covariance):
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
    def root_size(self) -> int:
        return self.diagonal_part.shape[-1] + self.factor.shape[-1]

    def diagonal(self) -> Tensor:
        return self.factor.square().sum(-1) + self.diagonal_part

    def apply(self, x: Tensor) -> Tensor:
        return matvec(self.factor, matvec(self.factor.mT, x)) + self.diagonal_part * x

    def root(self, noise: Tensor) -> Tensor:
        n = self.diagonal_part.shape[-1]
        return matvec(self.factor, noise[..., n:]) + safe_sqrt(self.diagonal_part) * noise[..., :n]

    def functional_variance(self, rows: Any) -> Tensor:
        rows = rows.at(self.factor)
        return rows.squared(self.diagonal_part) + rows.apply(self.factor.movedim(-1, 0)).square().sum(0)

    def scaled(self, scale: Tensor) -> LowRank:
        return LowRank(self.factor * scale.unsqueeze(-1), self.diagonal_part * scale.square())

    def to(self, *args: object, **kwargs: object) -> LowRank:
        return LowRank(self.factor.to(*args, **kwargs), self.diagonal_part.to(*args, **kwargs))  # type: ignore[call-overload]

    def validate(self) -> None:
        check_finite("The low-rank factor", self.factor)
        check_finite("The diagonal of the low-rank covariance", self.diagonal_part, minimum=0.0)


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

    def diagonal(self) -> Tensor:
        return self.scale_tril.square().sum(-1)

    def apply(self, x: Tensor) -> Tensor:
        return matvec(self.scale_tril, matvec(self.scale_tril.mT, x))

    def root(self, noise: Tensor) -> Tensor:
        return matvec(self.scale_tril, noise)

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
