"""Tangents that are known as a matrix, and choices between two tangents, element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from probhard._util.tensors import matvec
from probhard.laws.covariance import Covariance
from probhard.tangent.base import Differential


class MatrixTangent(Differential):
    """A tangent that is known as a matrix P, (*batch, n, n)."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    @property
    def shape(self) -> torch.Size:
        return self.matrix.shape[:-1]

    def apply(self, x: Tensor) -> Tensor:
        return matvec(self.matrix, x.to(torch.float64)).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        return matvec(self.matrix.mT, x.to(torch.float64)).to(x.dtype)


class ChosenTangent(Differential):
    """The tangent ``first`` for chosen elements (*lead,), ``second`` for the others."""

    def __init__(self, chosen: Tensor, first: Differential, second: Differential) -> None:
        self.chosen, self.first, self.second = chosen, first, second

    @property
    def shape(self) -> torch.Size:
        return self.second.shape

    def apply(self, x: Tensor) -> Tensor:
        return self._choice(self.first.apply(x), self.second.apply(x))

    def transpose(self, x: Tensor) -> Tensor:
        return self._choice(self.first.transpose(x), self.second.transpose(x))

    def variance(self, cov: Covariance) -> Tensor:
        return self._choice(self.first.variance(cov), self.second.variance(cov))

    def _choice(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.where(self.chosen.unsqueeze(-1), first, second)
