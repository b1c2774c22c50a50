"""Base class of tangents: the products of ``du*/dz`` at a solution."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from probhard._util.tensors import broadcast
from probhard.laws.base import LinearMap, in_chunks
from probhard.laws.covariance import Covariance


class Differential(ABC):
    """``P = du*/dz`` at a solution, by its products."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """``(*batch, n)`` of P; points may have more batch dimensions if P does not depend on them."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """``P x`` for x (*samples, *batch, n): forward mode."""

    @abstractmethod
    def transpose(self, x: Tensor) -> Tensor:
        """``P^T x`` for x (*samples, *batch, n): reverse mode."""

    def variance(self, cov: Covariance) -> Tensor:
        """``diag(P C P^T)``, (*batch, n).

        The default applies P to each column of the root of C; subclasses may know a faster way.

        Args:
            cov: The covariance C of the points.
        """
        eye = torch.eye(cov.root_size, dtype=cov.dtype, device=cov.device)
        columns = cov.root(eye.reshape(-1, *[1] * (len(self.shape) - 1), cov.root_size))
        return self.apply(columns.expand(-1, *self.shape)).square().sum(0)

    def functional_variance(self, rows: LinearMap, cov: Covariance) -> Tensor:
        """``diag(F P C P^T F^T)``, (*batch, k).

        The default applies ``P^T`` to every row of F; subclasses may know a faster way.

        Args:
            rows: F, (k, n).
            cov: The covariance C of the points.
        """
        like = cov.diagonal()
        like = like.expand(broadcast(like.shape, self.shape))
        return in_chunks(rows, like, lambda f: cov.form(self.transpose(f.expand(-1, *like.shape))))
