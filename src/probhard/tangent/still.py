"""Rows under weights that a Cholesky factor does not bear: some are 0, or they span many decades.

With ``W = R R^T``, the factor is the triangle of ``B = A R = L Q^T``. It sees the range of R, not its square, and

    W A^T (A W A^T)^-1 r  =  R Q L^-1 r.

Where variables have weight 0, rows of B may vanish or depend on each other. A pivoted QR of its scaled rows finds as
few as possible. They get a column of their own in B, which R does not have. So the other rows are solved without them,
and they hold afterwards if they held before. Forests and disjoint rows leave such rows out by themselves.
"""

from __future__ import annotations

from math import prod

import scipy.linalg
import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard._util.tensors import matvec
from probhard.laws.covariance import Covariance
from probhard.rows.system import LinearSystem
from probhard.tangent.coupled import JointTangent
from probhard.tangent.linear import DiagonalTangent, Tangent

DEPENDENT = 1e-12  # distance of a scaled row from those before it that counts as none
LARGEST = 50_000_000  # numbers in the matrices of a factor; larger systems are not served


class StillTangent(JointTangent):
    """Any W, by a triangle of the rows that can move.

    Args:
        system: The rows.
        weight: W.
    """

    def __init__(self, system: LinearSystem, weight: Covariance) -> None:
        super().__init__(system, weight)
        self.root = self.weight.root_matrix()  # R, (*batch, n, r)
        rows = self.core.dense() @ self.root  # (*batch, q, r)
        self.left = self._left(rows.detach())
        length = rows.detach().norm(dim=-1)
        own = torch.diag_embed(torch.where(self.left, torch.where(length > 0, length, 1.0), 0.0))
        basis, upper = torch.linalg.qr(torch.cat([rows, own], -1).mT)
        self.lower, self.basis = upper.mT, basis[..., : rows.shape[-1], :]  # L (*batch, q, q), Q (*batch, r, q)

    def _left(self, rows: Tensor) -> Tensor:
        """Rows that are left out, (*batch, q) bool: none where no weight is 0."""
        at = (self.weight.diagonal() == 0).any(-1).expand(rows.shape[:-2])
        left = torch.zeros(rows.shape[:-1], dtype=torch.bool, device=rows.device)
        for index in at.nonzero().tolist():
            left[tuple(index)] = _dependent(rows[tuple(index)]).to(rows.device)
        return left

    @property
    def regular(self) -> bool:
        return not bool(self.left.any())

    @property
    def independent(self) -> bool:
        """Whether the rows that are not left out are independent beyond rounding."""
        rounding = max(self.lower.shape[-1], self.basis.shape[-2]) * torch.finfo(self.lower.dtype).eps
        return bool((self.lower.diagonal(dim1=-2, dim2=-1).abs() > rounding * self.lower.norm(dim=-1)).all())

    def pivots(self) -> Tensor:
        return torch.where(self.left, 0.0, self.lower.diagonal(dim1=-2, dim2=-1).abs())

    def multiplier(self, r: Tensor) -> Tensor:
        return self._solved(self.lower.mT, self._solved(self.lower, r, upper=False), upper=True)

    def gains(self, r: Tensor) -> Tensor:
        return matvec(self.root, matvec(self.basis, self._solved(self.lower, r, upper=False)))

    def _nearest(self, z: Tensor, b: Tensor) -> Tensor:
        return z - self.gains(self.core.apply(z) - b)

    def transpose(self, x: Tensor) -> Tensor:
        y = self._exact(x.to(self.dtype))
        pulled = matvec(self.basis.mT, matvec(self.root.mT, y))
        return self.system.free(y - self.core.transpose(self._solved(self.lower.mT, pulled, upper=True))).to(x.dtype)

    def _variance(self, cov: Covariance | None) -> Tensor:
        return self._root_variance((self.given if cov is None else cov).to(self.dtype))

    @staticmethod
    def _solved(triangle: Tensor, r: Tensor, upper: bool) -> Tensor:
        shape = (*torch.broadcast_shapes(triangle.shape[:-2], r.shape[:-1]), r.shape[-1], 1)
        return torch.linalg.solve_triangular(triangle, r.unsqueeze(-1).expand(shape), upper=upper).squeeze(-1)


def _dependent(rows: Tensor) -> Tensor:
    """Rows (q, r) that vanish or depend on the others, (q,) bool: as few as possible."""
    length = rows.norm(dim=-1, keepdim=True)
    scaled = (rows / length.clamp(min=TINY)).numpy(force=True)
    _, upper, order = scipy.linalg.qr(scaled.T, mode="economic", pivoting=True)
    left = torch.ones(len(rows), dtype=torch.bool)
    size = torch.from_numpy(upper).diagonal().abs()
    left[torch.from_numpy(order[: len(size)]).long()[size > DEPENDENT]] = False
    return left


def moving(tangent: Tangent, weight: Covariance) -> Tangent:
    """The tangent without rows that cannot move, of rows under a weight W.

    Raises:
        InfeasibleError: There are such rows, and too many to search.
    """
    if tangent.regular and not (tangent.conditioned and bool((weight.diagonal() == 0).any())):
        return tangent
    if isinstance(tangent, DiagonalTangent) and not tangent.conditioned:
        return tangent  # these sweeps divide by no pivot of 0
    still = sharper(tangent, weight)
    return tangent.check() if still is None else still


def sharper(tangent: Tangent, weight: Covariance) -> StillTangent | None:
    """The tangent of these rows by a triangle; None if they are too many, or depend on each other."""
    if not small(tangent):
        return None
    still = StillTangent(tangent.system, weight)
    return still if still.independent else None


def small(tangent: Tangent) -> bool:
    """Whether the rows are few enough for a factor of all their entries."""
    n = tangent.core.variables
    return max(1, prod(tangent.shape[:-1])) * n * max(n, tangent.core.row_count) <= LARGEST
