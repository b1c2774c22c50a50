"""Covariances that are never formed: diagonal, low rank plus diagonal, dense by its root.

A covariance C (n x n) is used only through four products: its diagonal, ``C x``, ``R e`` with a root
``C = R R^T``, and rescaling ``diag(s) C diag(s)``. Vectors lie along the last dimension, so that leading
sample and batch dimensions broadcast as they do in torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor

from probhard._util.tensors import broadcast, checking
from probhard.errors import ParameterError, ShapeError


class _SafeSqrt(torch.autograd.Function):
    """Square root with gradient ``1 / (2 sqrt(x))``, and 0 at 0; few passes, since every training step runs it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp(min=0).sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        # root / root^2, which is 0 at 0; a third of the time of a masked quotient
        return gradient * (0.5 * root / (root.square() + torch.finfo(root.dtype).tiny))


class _DualSafeSqrt(_SafeSqrt):
    """The same with a forward mode, which torch.compile cannot trace."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return _SafeSqrt.backward(ctx, tangent)


def safe_sqrt(x: Tensor) -> Tensor:
    """Square root of ``max(x, 0)`` whose gradient is 0, not infinite, where ``x <= 0``."""
    function = _SafeSqrt if torch.compiler.is_compiling() else _DualSafeSqrt
    return cast(Tensor, function.apply(x))


def matvec(
    matrix: Tensor,  # (*batch, p, n)
    x: Tensor,  # (*samples, *batch, n)
) -> Tensor:  # (*samples, *batch, p)
    """Matrix times vector along the last dimension; sample dimensions become columns of one product."""
    if matrix.dim() == 2:
        return x @ matrix.mT
    extra = x.dim() - (matrix.dim() - 1)
    if extra <= 0:
        return (matrix @ x.unsqueeze(-1)).squeeze(-1)
    columns = x.flatten(0, extra - 1).movedim(0, -1)  # (*batch, n, samples)
    return (matrix @ columns).movedim(-1, 0).unflatten(0, x.shape[:extra])


def check_finite(name: str, x: Tensor, minimum: float | None = None) -> None:
    """Raise if ``x`` holds NaN, infinite or (with ``minimum``) too small entries; one pass over the data."""
    if x.numel() == 0:
        return
    low, high = (float(v) for v in torch.aminmax(x.detach()))
    if not (low > -torch.inf and high < torch.inf):
        bad = int((~torch.isfinite(x)).sum())
        raise ParameterError(
            f"{name} has {bad} NaN or infinite entries out of {x.numel()}.",
            "A projection would spread them over every coordinate that shares a constraint.",
            "Look for an exploding network or unscaled inputs before the projection.",
        )
    if minimum is not None and low < minimum:
        raise ParameterError(
            f"{name} has {int((x < minimum).sum())} entries below {minimum:g}; the smallest is {low:.4g}.",
            "It must not be negative.",
            "Map the raw network output through softplus or exp.",
        )


@dataclass(frozen=True, eq=False)
class Covariance(ABC):
    """A symmetric positive semi-definite n x n matrix, batched, known by its products."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """``(*batch, n)``."""

    @property
    @abstractmethod
    def root_size(self) -> int:
        """Number of columns of the root."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Diagonal, (*batch, n)."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """``C x`` for x (*samples, *batch, n)."""

    @abstractmethod
    def root(self, noise: Tensor) -> Tensor:
        """``R e`` for e (*samples, *batch, root_size)."""

    @abstractmethod
    def scaled(self, scale: Tensor) -> Self:
        """``diag(s) C diag(s)`` for s broadcasting with (*batch, n)."""

    @abstractmethod
    def to(self, *args: object, **kwargs: object) -> Self:
        """Copy on another device or in another dtype."""

    @abstractmethod
    def validate(self) -> None:
        """Raise ParameterError for NaN, infinite or negative entries."""

    def quadratic(self, x: Tensor) -> Tensor:
        """``x^T C^-1 x`` for x (*samples, *batch, n), by a Cholesky factor of the dense matrix."""
        factor = torch.linalg.cholesky(self.dense())
        return torch.linalg.solve_triangular(factor, x.unsqueeze(-1), upper=False).square().sum((-2, -1))

    def log_determinant(self) -> Tensor:
        """``log det C``, (*batch,)."""
        return 2 * torch.linalg.cholesky(self.dense()).diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def matmul(self, rhs: Tensor) -> Tensor:
        """``C X`` for X (*batch, n, k) or (n,), as ``torch.matmul``."""
        return self._columns(self.apply, rhs)

    def root_matrix(self) -> Tensor:
        """R itself, (*batch, n, root_size)."""
        eye = torch.eye(self.root_size, dtype=self.dtype, device=self.device)
        return self.root(eye.reshape(-1, *[1] * (len(self.shape) - 1), self.root_size)).movedim(0, -1)

    def root_matmul(self, rhs: Tensor) -> Tensor:
        """``R X`` for X (*batch, root_size, k) or (root_size,), as ``torch.matmul``."""
        return self._columns(self.root, rhs)

    def dense(self) -> Tensor:
        """The full matrix (*batch, n, n), for tests and small n."""
        identity = torch.eye(self.shape[-1], dtype=self.dtype, device=self.device)
        return self.apply(identity.reshape(-1, *[1] * (len(self.shape) - 1), self.shape[-1])).movedim(0, -1)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the entries."""
        return self.diagonal().dtype

    @property
    def device(self) -> torch.device:
        """Device of the entries."""
        return self.diagonal().device

    def _columns(self, product: Callable[[Tensor], Tensor], rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return product(rhs)
        columns = rhs.movedim(-1, 0)  # (k, *batch, n)
        missing = max(0, len(self.shape) - (rhs.dim() - 1))
        return product(columns.reshape(columns.shape[0], *[1] * missing, *columns.shape[1:])).movedim(0, -1)


@dataclass(frozen=True, eq=False)
class Diagonal(Covariance):
    """``C = diag(variance)``; ``known_stddev`` saves a root where it is known."""

    variance: Tensor  # (*batch, n)
    known_stddev: Tensor | None = None

    @classmethod
    def from_stddev(cls, stddev: Tensor) -> Diagonal:
        """From standard deviations, kept as the root so that a zero one keeps its gradient."""
        return cls(stddev.square(), stddev)

    @property
    def stddev(self) -> Tensor:
        """Root of the diagonal, (*batch, n)."""
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

    def validate(self) -> None:
        if self.known_stddev is None:
            check_finite("The variance", self.variance, minimum=0.0)
        else:
            check_finite("The standard deviation", self.known_stddev, minimum=0.0)


@dataclass(frozen=True, eq=False)
class LowRank(Covariance):
    """``C = F F^T + diag(d)`` with a factor F of few columns."""

    factor: Tensor  # (*batch, n, rank)
    diagonal_part: Tensor  # (*batch, n)

    def __post_init__(self) -> None:
        if self.factor.dim() < 2 or self.factor.shape[-2] != self.diagonal_part.shape[-1]:
            raise ShapeError(
                f"LowRank got a factor {tuple(self.factor.shape)} and a diagonal {tuple(self.diagonal_part.shape)}.",
                "The factor is (*batch, n, rank) and the diagonal (*batch, n), with one n.",
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

    def scaled(self, scale: Tensor) -> LowRank:
        return LowRank(self.factor * scale.unsqueeze(-1), self.diagonal_part * scale.square())

    def to(self, *args: object, **kwargs: object) -> LowRank:
        return LowRank(self.factor.to(*args, **kwargs), self.diagonal_part.to(*args, **kwargs))  # type: ignore[call-overload]

    def validate(self) -> None:
        check_finite("The low-rank factor", self.factor)
        check_finite("The diagonal of the low-rank covariance", self.diagonal_part, minimum=0.0)


@dataclass(frozen=True, eq=False)
class Dense(Covariance):
    """``C = L L^T`` with a lower triangular L, as in ``torch.distributions.MultivariateNormal``."""

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
                "It is taken as lower triangular.",
                "Pass torch.linalg.cholesky(covariance), not the covariance itself.",
            )
