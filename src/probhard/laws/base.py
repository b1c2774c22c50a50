"""The abstract covariance C of a location-scale law ``Z = loc + R e``, ``C = R R^T``.

It is used only through its diagonal, the products ``C x`` and ``R e``, and the rescaling ``diag(s) C diag(s)``; it is
never formed. Vectors lie along the last dimension, so leading sample and batch dimensions broadcast as in torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


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

    def quadratic(self, x: Tensor) -> Tensor:
        """``x^T C^-1 x``, by a Cholesky factor of the dense matrix.

        Args:
            x: (*samples, *batch, n).

        Returns:
            (*samples, *batch).
        """
        factor = torch.linalg.cholesky(self.dense())
        return torch.linalg.solve_triangular(factor, x.unsqueeze(-1), upper=False).square().sum((-2, -1))

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

    def functional_variance(self, rows: Any) -> Tensor:
        """``diag(F C F^T)``, (*batch, k), for a linear map F (k, n)."""
        eye = torch.eye(self.root_size, dtype=self.dtype, device=self.device)
        columns = self.root(eye.reshape(-1, *[1] * (len(self.shape) - 1), self.root_size))
        return rows.at(columns).apply(columns).square().sum(0)

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
