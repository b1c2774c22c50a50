"""The tangent under a correlated weight with very many rows: conjugate gradients, and no matrix.

    (A W A^T) y = r,     preconditioned by the structure's factor of ``A diag(W) A^T``

One solve costs some dozens of products with A and W. Variances cost one solve per column of the root of C: they are
exact, but for large n prefer draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probhard._util.conjugate_gradients import conjugate_gradients, implicit_solve
from probhard._util.tensors import safe_sqrt
from probhard.laws.base import CHUNK
from probhard.laws.covariance import Covariance, Diagonal, Factored
from probhard.rows.system import LinearSystem
from probhard.tangent.coupled import JointTangent
from probhard.tangent.few_rows import factor_variance


class IterativeTangent(JointTangent):
    """Any ``W = D + G G^T`` by its products.

    Args:
        system: The rows.
        weight: W.
    """

    def __init__(self, system: LinearSystem, weight: Factored) -> None:
        super().__init__(system, weight)
        self.factor = self.core.factor(self.weight.diagonal().detach())

    def multiplier(self, r: Tensor) -> Tensor:
        def product(y: Tensor) -> Tensor:
            return self.core.apply(self.weight.apply(self.core.transpose(y)))

        return implicit_solve(product, r, lambda right: conjugate_gradients(product, right, self.factor.solve))

    def pivots(self) -> Tensor:
        return self.factor.pivots()

    def _variance(self, cov: Covariance | None) -> Tensor:
        cov = (self.weight if cov is None else cov).to(self.dtype)
        if isinstance(cov, Diagonal):
            return self._own_variance(cov.variance)
        assert isinstance(cov, Factored)
        return self._own_variance(cov.diagonal_part) + factor_variance(self, cov)

    def _own_variance(self, variance: Tensor) -> Tensor:
        """``diag(P diag(s) P^T)`` by P times scaled unit vectors, few at a time."""
        stddev, n = safe_sqrt(variance), variance.shape[-1]
        size, total = max(1, CHUNK // variance.numel()), torch.zeros_like(variance)
        for first in range(0, n, size):
            index = torch.arange(first, min(first + size, n), device=variance.device)
            unit = variance.new_zeros(len(index), n).scatter(1, index.unsqueeze(1), 1.0)
            total = total + self.apply(stddev * unit.reshape(len(index), *[1] * (variance.dim() - 1), n)).square().sum(
                0
            )
        return total
