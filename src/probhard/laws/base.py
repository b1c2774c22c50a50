"""The abstract covariance C of a location-scale law ``Z = loc + R e``, ``C = R R^T``.

It is used only through its diagonal, the products ``C x``, ``R e`` and ``R^T x``, and the rescaling
``diag(s) C diag(s)``; it is never formed. Vectors lie along the last dimension, so leading sample and batch dimensions
broadcast as in torch.

A linear functional ``f . Z`` has the scale ``sqrt(f^T C f) = |R^T f|``. ``functional_variance`` computes its square for
the rows of a sparse matrix F.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

CHUNK = 4_000_000  # numbers in the images of functionals at a time


class LinearMap(Protocol):
    """A constant matrix F (k, n) by its products, such as ``rows.maps.SparseMap``."""

    row_count: int  # k
    variables: int  # n

    def apply(self, x: Tensor) -> Tensor:
        """``F x``, (..., k), for x (..., n)."""

    def squared(self, x: Tensor) -> Tensor:
        """``(F * F) x``, (..., k), for x (..., n)."""

    def transpose(self, y: Tensor) -> Tensor:
        """``F^T y``, (..., n), for y (..., k)."""

    def at(self, like: Tensor) -> Self:
        """The same map in the dtype and on the device of ``like``."""


@dataclass(frozen=True, eq=False)
class Covariance(ABC):
    """A batch of symmetric positive semi-definite n x n matrices, known by their products."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """``(*batch, n)``."""

    @property
    @abstractmethod
    def root_size(self) -> int:
        """Number of columns of the root R."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Diagonal, (*batch, n)."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """Multiply vectors by the matrix.

        Args:
            x: (*samples, *batch, n).

        Returns:
            ``C x``, (*samples, *batch, n).
        """

    @abstractmethod
    def root(self, noise: Tensor) -> Tensor:
        """Correlate unit noise.

        Args:
            noise: e, (*samples, *batch, root_size).

        Returns:
            ``R e``, (*samples, *batch, n).
        """

    @abstractmethod
    def root_transpose(self, x: Tensor) -> Tensor:
        """Multiply by the transposed root.

        Args:
            x: (*samples, *batch, n).

        Returns:
            ``R^T x``, (*samples, *batch, root_size).
        """

    @abstractmethod
    def scaled(self, scale: Tensor) -> Self:
        """Rescale the variables.

        Args:
            scale: s, broadcasting with (*batch, n).

        Returns:
            ``diag(s) C diag(s)``.
        """

    @abstractmethod
    def to(self, *args: object, **kwargs: object) -> Self:
        """A copy on another device or in another dtype; arguments as of ``Tensor.to``."""

    @abstractmethod
    def validate(self) -> None:
        """Check the entries.

        Raises:
            ParameterError: If entries are NaN, infinite or negative where they must not be.
        """

    def form(self, x: Tensor) -> Tensor:
        """``x^T C x = |R^T x|^2``, (*samples, *batch), for x (*samples, *batch, n): a sum of squares."""
        return self.root_transpose(x).square().sum(-1)

    def functional_variance(self, rows: LinearMap) -> Tensor:
        """``diag(F C F^T)``, the squared scales of linear functionals.

        Args:
            rows: F, (k, n).

        Returns:
            (*batch, k), not negative.
        """
        return in_chunks(rows, self.diagonal(), self.form)

    def solve(self, x: Tensor) -> Tensor:
        """``C^-1 x`` for a regular C, by a Cholesky factor of the dense matrix.

        Args:
            x: (*samples, *batch, n).

        Returns:
            (*samples, *batch, n).
        """
        factor = torch.linalg.cholesky(self.dense())
        return torch.cholesky_solve(x.unsqueeze(-1), factor).squeeze(-1)

    def quadratic(self, x: Tensor) -> Tensor:
        """``x^T C^-1 x``, (*samples, *batch), for x (*samples, *batch, n) and a regular C."""
        return (x * self.solve(x)).sum(-1)

    def log_determinant(self) -> Tensor:
        """``log det C``, (*batch,)."""
        return 2 * torch.linalg.cholesky(self.dense()).diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def matmul(self, rhs: Tensor) -> Tensor:
        """``C X`` as ``torch.matmul``, for X (*batch, n, k) or (n,); the result has the shape of X."""
        return self._columns(self.apply, rhs)

    def root_matrix(self) -> Tensor:
        """R itself, (*batch, n, root_size)."""
        eye = torch.eye(self.root_size, dtype=self.dtype, device=self.device)
        return self.root(eye.reshape(-1, *[1] * (len(self.shape) - 1), self.root_size)).movedim(0, -1)

    def root_matmul(self, rhs: Tensor) -> Tensor:
        """``R X`` as ``torch.matmul``, (*batch, n, k) or (n,), for X (*batch, root_size, k) or (root_size,)."""
        return self._columns(self.root, rhs)

    def dense(self) -> Tensor:
        """The full matrix, (*batch, n, n), for tests and small n."""
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


def in_chunks(rows: LinearMap, like: Tensor, form: Callable[[Tensor], Tensor]) -> Tensor:
    """A quadratic form of every row of F, few rows at a time.

    Args:
        rows: F, (k, n).
        like: (*batch, n), for its batch, dtype and device.
        form: Maps points (chunk, *batch, n) to (chunk, *batch).

    Returns:
        (*batch, k).
    """
    rows, dims = rows.at(like), like.dim() - 1
    size = max(1, CHUNK // max(1, like.numel()))
    parts = []
    for first in range(0, rows.row_count, size):
        index = torch.arange(first, min(first + size, rows.row_count), device=like.device)
        unit = like.new_zeros(len(index), rows.row_count).scatter(1, index.unsqueeze(1), 1.0)
        points = rows.transpose(unit)  # (chunk, n)
        parts.append(form(points.reshape(len(index), *[1] * dims, rows.variables)))
    return torch.cat(parts).movedim(0, -1) if parts else like[..., :0]
