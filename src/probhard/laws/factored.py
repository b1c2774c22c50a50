"""Covariances ``C = diag(d) + G G^T``: independent noise of every variable and noise that variables share.

G is known by its products. With the root ``R = [diag(d)^1/2, G]`` the inverse is Woodbury's

    C^-1 = D^-1 - D^-1 G (I + G^T D^-1 G)^-1 G^T D^-1,

solved by conjugate gradients where G has many columns.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

import torch
from torch import Tensor

from probhard._util.conjugate_gradients import conjugate_gradients, implicit_solve
from probhard._util.tensors import safe_sqrt
from probhard.laws.base import Covariance, LinearMap, in_chunks


class Factored(Covariance):
    """``C = diag(d) + G G^T``; subclasses are frozen dataclasses and implement the products with G."""

    diagonal_part: Tensor  # d, (*batch, n), a field of every subclass

    @property
    @abstractmethod
    def factor_size(self) -> int:
        """Number of columns of G."""

    @abstractmethod
    def factor_apply(self, e: Tensor) -> Tensor:
        """``G e``, (*samples, *batch, n), for e (*samples, *batch, factor_size)."""

    @abstractmethod
    def factor_transpose(self, x: Tensor) -> Tensor:
        """``G^T x``, (*samples, *batch, factor_size), for x (*samples, *batch, n)."""

    @abstractmethod
    def factor_diagonal(self) -> Tensor:
        """``diag(G G^T)``, (*batch, n)."""

    @abstractmethod
    def factor_norms(self, weight: Tensor) -> Tensor:
        """``diag(G^T diag(w) G)`` or close to it, (*batch, factor_size), for w (*batch, n): a preconditioner."""

    @abstractmethod
    def weighted(self, own: Tensor | float, shared: Tensor | float) -> Self:
        """Rescale the two parts.

        Args:
            own: Multiplies the scale of the independent noise; a number, or broadcasting with (*batch, n).
            shared: Multiplies the scale of the shared noise, likewise.

        Returns:
            ``own^2 d`` and ``diag(shared) G G^T diag(shared)``.
        """

    @property
    def root_size(self) -> int:
        return self.shape[-1] + self.factor_size

    @property
    def dtype(self) -> torch.dtype:
        return self.diagonal_part.dtype

    @property
    def device(self) -> torch.device:
        return self.diagonal_part.device

    def diagonal(self) -> Tensor:
        return self.factor_diagonal() + self.diagonal_part

    def apply(self, x: Tensor) -> Tensor:
        return self.factor_apply(self.factor_transpose(x)) + self.diagonal_part * x

    def root(self, noise: Tensor) -> Tensor:
        n = self.shape[-1]
        return self.factor_apply(noise[..., n:]) + safe_sqrt(self.diagonal_part) * noise[..., :n]

    def root_transpose(self, x: Tensor) -> Tensor:
        own, shared = safe_sqrt(self.diagonal_part) * x, self.factor_transpose(x)
        return torch.cat([own.expand(*shared.shape[:-1], -1), shared], -1)

    def functional_variance(self, rows: LinearMap) -> Tensor:
        own = rows.at(self.diagonal_part).squared(self.diagonal_part)
        return own + in_chunks(rows, self.diagonal(), lambda x: self.factor_transpose(x).square().sum(-1))

    def solve(self, x: Tensor) -> Tensor:
        d = self.diagonal_part

        def inner(e: Tensor) -> Tensor:
            return e + self.factor_transpose(self.factor_apply(e) / d)

        right, size = self.factor_transpose(x / d), 1 + self.factor_norms(1 / d).detach()
        e = implicit_solve(inner, right, lambda r: conjugate_gradients(inner, r, lambda y: y / size))
        return (x - self.factor_apply(e)) / d
