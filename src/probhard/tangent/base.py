"""What every tangent offers: the products of ``du*/dz`` at a solution."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from probhard.laws.covariance import Covariance


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
