"""What a tangent offers, and what all tangents of rows share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.errors import InfeasibleError
from probhard.laws.covariance import Covariance, safe_sqrt
from probhard.rows.base import Structure
from probhard.rows.presolve import Pins
from probhard.rows.system import LinearSystem


class Differential(ABC):
    """``du*/dz`` at a solution, by its products."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """``(*batch, n)`` of the points that it belongs to, as far as it depends on them."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """``P x``, forward mode."""

    @abstractmethod
    def transpose(self, x: Tensor) -> Tensor:
        """``P^T x``, reverse mode."""

    def variance(self, cov: Covariance) -> Tensor:
        """``diag(P C P^T)``, (*batch, n); column by column of the root unless there is a better way."""
        eye = torch.eye(cov.root_size, dtype=cov.dtype, device=cov.device)
        columns = cov.root(eye.reshape(-1, *[1] * (len(self.shape) - 1), cov.root_size))
        return self.apply(columns.expand(-1, *self.shape)).square().sum(0)


class Tangent(Differential):
    """``P`` for one system of rows and one weight; ``dtype`` is the precision of its solves."""

    system: LinearSystem
    core: Structure
    given: Covariance  # W as the metric gave it
    weight: Covariance  # ... in the working precision, 0 for variables that may not move
    known: Pins | None = None  # variables that rows pin outright, kept exact where all rows are solved together

    @abstractmethod
    def multiplier(self, r: Tensor) -> Tensor:
        """``(A W A^T)^-1 r`` for r (*samples, *batch, q)."""

    @abstractmethod
    def pivots(self) -> Tensor:
        """Positive exactly when ``A W A^T`` is regular."""

    @abstractmethod
    def _variance(self, cov: Covariance | None) -> Tensor:
        """``diag(P C P^T)`` in the working precision; None is the oblique case, C = W."""

    @property
    def conditioned(self) -> bool:
        """Whether a Cholesky factor is behind it, whose rounding grows with the range of the weights."""
        return True

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """Working precision."""
        return self.weight.dtype

    def project(self, z: Tensor, b: Tensor) -> Tensor:
        """The nearest point to z (*samples, *batch, n) with ``A u = b``."""
        b = b.to(z.device, self.dtype)
        point, right = self.system.substitute(z.to(self.dtype), b)
        value = self._nearest(point, right)
        if self.known is not None:
            values = self.known.values(b)
            value = value.index_copy(-1, self.known.variable, values.expand(*value.shape[:-1], -1))
        return value.to(z.dtype)

    def moments(self, z: Tensor, b: Tensor, cov: Covariance | None = None) -> tuple[Tensor, Tensor]:
        """The projected point and the root of ``diag(P C P^T)``; see ``variance``."""
        return self.project(z, b), safe_sqrt(self.variance(cov))

    def apply(self, x: Tensor) -> Tensor:
        free = self.system.free(x.to(self.dtype))
        return self._exact(self._nearest(free, free.new_zeros(self.core.row_count))).to(x.dtype)

    def _exact(self, x: Tensor) -> Tensor:
        """Set pinned variables of x (..., n) to 0."""
        return x if self.known is None else x.index_fill(-1, self.known.variable, 0.0)

    def _nearest(self, z: Tensor, b: Tensor) -> Tensor:
        """``z - W A^T (A W A^T)^-1 (A z - b)``."""
        return z - self.weight.apply(self.core.transpose(self.multiplier(self.core.apply(z) - b)))

    def transpose(self, x: Tensor) -> Tensor:
        y = self._exact(x.to(self.dtype))
        pushed = self.core.transpose(self.multiplier(self.core.apply(self.weight.apply(y))))
        return self.system.free(y - pushed).to(x.dtype)

    def variance(self, cov: Covariance | None = None) -> Tensor:
        """``diag(P C P^T)``, (*batch, n); None is the oblique case, C = W, which has shorter formulas."""
        return self._exact(self._variance(cov)).to(self.given.dtype if cov is None else cov.dtype)

    def _columns(self, matrix: Tensor) -> Tensor:
        """Columns of a matrix (*batch, n, k) as k points (k, *batch, n) that broadcast with the rows' batch."""
        columns = matrix.movedim(-1, 0).to(self.dtype)
        missing = max(0, self.core.batch_dims - (columns.dim() - 2))
        return columns.reshape(columns.shape[0], *[1] * missing, *columns.shape[1:])

    def _root_variance(self, cov: Covariance) -> Tensor:
        """``diag(P R (P R)^T)`` column by column of the root: a sum of squares, for dense covariances."""
        return self.apply(self._columns(cov.root_matrix())).square().sum(0)

    def check(self) -> Self:
        """Raise where the weight leaves a row nothing to move; eager mode only."""
        if checking():
            pivots = self.pivots().detach()
            low = pivots.amin() if pivots.numel() else torch.ones(())
            if not bool(low > 0):
                raise InfeasibleError(
                    f"The metric leaves a constraint row no variable to move (smallest pivot {float(low):.3g}).",
                    "All variables of that row have zero variance, are fixed, or depend on each other.",
                    "Give at least one of them a positive variance, or use the orthogonal metric.",
                )
        return self
