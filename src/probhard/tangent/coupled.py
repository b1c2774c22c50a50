"""Tangents under weights that couple variables.

| weight                                     | tangent           | how                                         |
|--------------------------------------------|-------------------|---------------------------------------------|
| factors along the hierarchy that is solved | CoherentTangent   | that of the diagonal part                   |
| low rank plus diagonal                     | LowRankTangent    | Woodbury on the structure's factor          |
| any other                                  | DenseTangent      | Cholesky of the q x q matrix ``A W A^T``    |
| the same with very many rows               | IterativeTangent  | conjugate gradients (``iterative``)         |
"""

from __future__ import annotations

import torch
from torch import Tensor

from probhard._util.tensors import checking, matvec, safe_sqrt
from probhard.laws.base import LinearMap
from probhard.laws.covariance import Covariance, Diagonal, Factored, LowRank
from probhard.laws.hierarchy_factors import HierarchyFactors
from probhard.rows.dense import cholesky_solve
from probhard.rows.redundant import RedundantRows
from probhard.rows.system import LinearSystem
from probhard.tangent.few_rows import FEW_ROWS, ROUNDING, factor_variance, few_rows_variance
from probhard.tangent.functionals import own_variance, same_values
from probhard.tangent.linear import DiagonalTangent, Tangent


class CoherentTangent(DiagonalTangent):
    """``W = D + G G^T`` with ``A G = 0``: the shared noise obeys the rows, so only the noise D is projected.

    Args:
        system: The rows.
        weight: W, with ``A G = 0``.
    """

    def __init__(self, system: LinearSystem, weight: HierarchyFactors) -> None:
        super().__init__(system, Diagonal(weight.diagonal_part))
        self.shared = weight

    @property
    def shape(self) -> torch.Size:
        return self.shared.shape

    def moments(self, z: Tensor, b: Tensor, cov: Covariance | None = None) -> tuple[Tensor, Tensor]:
        mean, scale = super().moments(z, b, cov)
        if cov is not None:
            return mean, scale
        return mean, safe_sqrt(scale.square() + self.shared.factor_diagonal().to(scale.dtype))

    def _variance(self, cov: Covariance | None) -> Tensor:
        own = super()._variance(cov)
        return own + self.shared.factor_diagonal().to(own.dtype) if cov is None else own


class LowRankTangent(Tangent):
    """``W = D + F F^T`` by Woodbury's identity on the structure's factor for D.

    With ``G = A F``, ``Y = M_D^-1 G`` and ``C = I + G^T Y``, the multiplier is ``M_D^-1 (r - G e)`` with
    ``e = C^-1 Y^T r``. The oblique covariance is ``P_D D P_D^T + U C^-1 U^T`` with ``U = P_D F``: sums of squares.

    Args:
        system: The rows.
        weight: W, with positive D.
    """

    def __init__(self, system: LinearSystem, weight: LowRank) -> None:
        self.given = weight
        held = LowRank(*_held(system, weight))
        like = held.diagonal_part.new_empty(0, dtype=torch.float64)
        self.system = system.coupled.at(like)
        self.known = None if system.pins is None else system.pins.at(like)
        assert self.system.core is not None
        self.core = self.system.core
        self.weight = held.to(torch.float64)
        self.factor = self.core.factor(held.diagonal_part.to(torch.float64))
        columns = self._columns(held.factor)  # (rank, *batch, n)
        images = self.core.apply(columns)  # G^T, (rank, *batch, q)
        solved = self.factor.solve(images)  # Y^T
        pushed = self.factor.weight * self.core.transpose(solved)
        self.image, self.solved = images.movedim(0, -1), solved.movedim(0, -1)  # (*batch, q, rank)
        self.moved = (columns - pushed).movedim(0, -1)  # U, (*batch, n, rank)
        identity = torch.eye(len(columns), dtype=torch.float64, device=like.device)
        self.lower = torch.linalg.cholesky_ex(identity + self.image.mT @ self.solved).L

    def multiplier(self, r: Tensor) -> Tensor:
        noise = cholesky_solve(self.lower, matvec(self.solved.mT, r))
        return self.factor.solve(r) - matvec(self.solved, noise)

    def pivots(self) -> Tensor:
        return self.factor.pivots()

    def _variance(self, cov: Covariance | None) -> Tensor:
        if cov is None and self.system.held is None:
            half = torch.linalg.solve_triangular(self.lower, self.moved.mT, upper=False)
            return self.factor.variance() + half.square().sum(-2)
        cov = self.given if cov is None else cov
        if isinstance(cov, Diagonal):
            return self._diagonal_variance(cov.variance.to(self.dtype))
        if isinstance(cov, LowRank):
            spread = self.apply(self._columns(cov.factor)).square().sum(0)
            return self._diagonal_variance(cov.diagonal_part.to(self.dtype)) + spread
        if isinstance(cov, Factored):
            return self._diagonal_variance(cov.diagonal_part.to(self.dtype)) + factor_variance(self, cov)
        return self._root_variance(cov)

    def functional_variance(self, rows: LinearMap, cov: Covariance) -> Tensor:
        oblique = checking() and self.known is None and self.system.held is None and same_values(cov, self.given)
        own = own_variance(self.factor, rows, self.factor.weight) if oblique else None
        if own is None:
            return super().functional_variance(rows, cov)
        images = rows.at(own).apply(self.moved.movedim(-1, 0)).movedim(0, -2)  # (F U)^T, (*batch, rank, k)
        shared = torch.linalg.solve_triangular(self.lower, images, upper=False).square().sum(-2)
        return torch.where(own > 0, own + shared, 0.0).to(cov.dtype)

    def _diagonal_variance(self, s: Tensor) -> Tensor:
        """``diag(P S P^T)`` with ``P = P_D - U V^T``, ``V = A^T Y C^-1``."""
        pulled = self.core.transpose(self.solved.movedim(-1, 0)).movedim(0, -1)  # A^T Y, (*batch, n, rank)
        v = torch.cholesky_solve(pulled.mT, self.lower).mT
        spread = s.unsqueeze(-1) * v
        columns = spread.movedim(-1, 0)
        crossed = columns - self.factor.weight * self.core.transpose(self.factor.solve(self.core.apply(columns)))
        inner = self.moved @ (v.mT @ spread)
        variance = self.factor.variance(s) + ((inner - 2 * crossed.movedim(0, -1)) * self.moved).sum(-1)
        return variance.clamp(min=0)


class JointTangent(Tangent):
    """Any W: all rows are solved together in float64, those that pin a variable among them.

    Args:
        system: The rows.
        weight: W.
    """

    def __init__(self, system: LinearSystem, weight: Covariance) -> None:
        like = weight.diagonal().new_empty(0, dtype=torch.float64)
        self.given, self.system = weight, system.coupled.at(like)
        self.known = None if system.pins is None else system.pins.at(like)
        assert self.system.core is not None
        self.core = self.system.core
        self.weight = (weight if system.held is None else weight.scaled(_mask(system, weight))).to(torch.float64)


class DenseTangent(JointTangent):
    """Any W, by its products with the rows of A: Cholesky of the q x q matrix ``A W A^T``.

    Args:
        system: The rows.
        weight: W.
    """

    def __init__(self, system: LinearSystem, weight: Covariance) -> None:
        super().__init__(system, weight)
        matrix = self.core.dense()  # (*batch, q, n)
        rows = matrix.movedim(-2, 0)
        rows = rows.reshape(rows.shape[0], *[1] * (len(weight.shape) - rows.dim() + 1), *rows.shape[1:])
        self.pushed = self.weight.apply(rows).movedim(0, -1)  # W A^T, (*batch, n, q)
        gram = matrix @ self.pushed
        gram = gram + self.core.filling if isinstance(self.core, RedundantRows) else gram
        self.lower, self.info = torch.linalg.cholesky_ex(gram)

    def multiplier(self, r: Tensor) -> Tensor:
        return cholesky_solve(self.lower, r)

    def gains(self, r: Tensor) -> Tensor:
        return matvec(self.pushed, self.multiplier(r))

    def _nearest(self, z: Tensor, b: Tensor) -> Tensor:
        return z - self.gains(self.core.apply(z) - b)

    def transpose(self, x: Tensor) -> Tensor:
        y = self._exact(x.to(self.dtype))
        pull = self.core.transpose(self.multiplier(matvec(self.pushed.mT, y)))
        return self.system.free(y - pull).to(x.dtype)

    def pivots(self) -> Tensor:
        regular = (self.info == 0).unsqueeze(-1)
        return torch.where(regular, self.lower.diagonal(dim1=-2, dim2=-1), 0.0)

    def functional_variance(self, rows: LinearMap, cov: Covariance) -> Tensor:
        if self.system.held is None and self.core.row_count <= FEW_ROWS and checking() and same_values(cov, self.given):
            return self._conditional(rows).to(cov.dtype)
        return super().functional_variance(rows, cov)

    def _variance(self, cov: Covariance | None) -> Tensor:
        if cov is None and self.system.held is None and isinstance(self.given, Factored):
            return self._conditional()
        cov = self.given if cov is None else cov
        return few_rows_variance(self, cov) if isinstance(cov, Factored) else self._root_variance(cov.to(self.dtype))

    def _conditional(self, rows: LinearMap | None = None) -> Tensor:
        """``diag(F (W - W A^T M^-1 A W) F^T)``, the oblique case, (*batch, k); (*batch, n) without F."""
        images, total = self.pushed.mT, self.weight.diagonal()  # A W, (*batch, q, n)
        if rows is not None:
            images, total = rows.at(total).apply(images), self.weight.functional_variance(rows)
        removed = torch.linalg.solve_triangular(self.lower, images, upper=False).square().sum(-2)
        variance, floor = total - removed, ROUNDING[total.dtype] * (total + removed).detach()
        return torch.where(variance > floor, variance, 0.0)


def _mask(system: LinearSystem, weight: Covariance) -> Tensor:
    ones = torch.ones(system.variables, dtype=weight.dtype, device=weight.device)
    return ones if system.held is None else ones.index_fill(0, system.held.to(ones.device), 0.0)


def _held(system: LinearSystem, weight: LowRank) -> tuple[Tensor, Tensor]:
    if system.held is None:
        return weight.factor, weight.diagonal_part
    masked = weight.scaled(_mask(system, weight))
    return masked.factor, masked.diagonal_part
