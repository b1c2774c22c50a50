"""A nonlinear equality linearised at a point, and linear systems on its tangent space.

With ``J = dh/du`` and the weight ``W = Q^-1``, the tangent space ``J x = 0`` has the projection

    P = I - W J^T M^-1 J,     M = J W J^T.

Dense rows may depend on each other; M is then filled up along its null space (``rows.redundant``).
``tangential`` solves the reduced Newton system ``(I + P W C) x = P W t`` by projected conjugate gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.laws.covariance import Covariance
from probhard.rows.base import Structure
from probhard.rows.dense import DenseRows
from probhard.rows.redundant import DEPENDENT, RedundantRows, filling
from probhard.rows.system import LinearSystem
from probhard.tangent import Tangent, tangent_of

CONJUGATE = 30  # steps of conjugate gradients
INEXACT, EXACT = 1e-4, 1e-10  # their relative accuracy: of a step on the way, of derivatives
SINGULAR = 1e-7  # smallest pivot of M relative to the largest, at which J counts as rank deficient
ROUNDED = 1e-4  # smallest size of a variable, relative to the largest, in tests of feasibility
FLAT = 1e-10  # curvature along a direction, relative to its length, that counts as none


def revealed(rows: Structure, weight: Covariance, dependent: float = DEPENDENT) -> Tangent:
    """The tangent of rows under a weight; dense rows may depend on each other.

    Args:
        rows: The rows of J.
        weight: W.
        dependent: Eigenvalues of M, scaled to a unit diagonal, that count as 0; above the default they are sought for
            all points, not only for those whose factor fails.
    """
    tangent = tangent_of(LinearSystem.of_structure(rows), weight)
    if not isinstance(rows, DenseRows):
        return tangent
    with torch.no_grad():
        sound = _regular(tangent) if dependent <= DEPENDENT else torch.zeros((), dtype=torch.bool)
        if bool(sound.all()):
            return tangent
        matrix = rows.map.matrix.detach()
        images = weight.apply(matrix.movedim(-2, 0)).movedim(0, -1)  # W J^T, (*lead, n, q)
        extra = torch.where(sound[..., None, None], 0.0, filling(matrix @ images.to(matrix), dependent))
    return tangent_of(LinearSystem.of_structure(RedundantRows(rows.map.matrix, extra)), weight)


def _regular(tangent: Tangent) -> Tensor:
    """Where M has a factor without tiny pivots, (*lead,) bool."""
    pivots = tangent.pivots().detach()
    return pivots.amin(-1) > SINGULAR * pivots.amax(-1)


@dataclass(frozen=True)
class Linearised:
    """The residual of a constraint at u and the tangent of its rows under the weight."""

    h: Tensor  # (*lead, q)
    tangent: Tangent
    weight: Covariance
    regular: Tensor  # (*lead,) bool

    @classmethod
    def at(
        cls, constraint: NonlinearEquality, u: Tensor, weight: Covariance, dependent: float = DEPENDENT
    ) -> Linearised:
        """Evaluate the constraint at u (*lead, n) and factor M; ``dependent`` as in ``revealed``."""
        h, rows = constraint.linearised(u)
        tangent = revealed(rows, weight, dependent)
        regular = _regular(tangent).expand(h.shape[:-1]) & torch.isfinite(h).all(-1)
        return cls(h, tangent, weight, regular)

    def push(self, x: Tensor) -> Tensor:
        """``J x``, (*lead, q)."""
        return self.tangent.core.apply(x)

    def multiplier(self, r: Tensor) -> Tensor:
        """``M^-1 r``, (*lead, q); 0 where M is singular."""
        return torch.where(self.regular.unsqueeze(-1), self.tangent.multiplier(r), 0.0)

    def move(self, multiplier: Tensor) -> Tensor:
        """``W J^T l``, (*lead, n)."""
        return self.weight.apply(self.pull(multiplier))

    def pull(self, multiplier: Tensor) -> Tensor:
        """``J^T l``, (*lead, n)."""
        return self.tangent.core.transpose(multiplier)

    def dual(self, v: Tensor) -> Tensor:
        """``P^T v``, the tangential part of a dual vector (*lead, n)."""
        return v - self.pull(self.multiplier(self.push(self.weight.apply(v))))

    def relative(self, u: Tensor, z: Tensor) -> Tensor:
        """Largest residual at u relative to the terms that should cancel, (*lead,).

        Variables count as at least ``ROUNDED`` of the largest in u and z, from which u was computed.
        """
        largest = torch.maximum(u.abs().amax(-1, keepdim=True), z.abs().amax(-1, keepdim=True))
        size = self.tangent.core.magnitude(u.abs() + ROUNDED * largest)
        return (self.h.abs() / size.clamp(min=TINY)).amax(-1).nan_to_num(torch.inf)

    def tangential(
        self, bend: Callable[[Tensor], Tensor], target: Tensor, accuracy: float = EXACT
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Solve ``x + P W C x = P W t`` on the tangent space.

        Args:
            bend: The product with ``C = sum l_i hess(h_i)``.
            target: ``P^T t``, (*lead, n).
            accuracy: Relative residual to stop at.

        Returns:
            x and ``Q x``, (*lead, n), and where curvature stayed positive, (*lead,) bool.
        """
        residual_dual, residual = target, self.weight.apply(target)
        p_dual, p = residual_dual, residual
        x, image = torch.zeros_like(p), torch.zeros_like(p)
        size = (residual * residual_dual).sum(-1)
        first = size
        positive = torch.ones_like(size, dtype=torch.bool)
        count = 0 if isinstance(self.tangent.core, RedundantRows) else self.h.shape[-1]
        for _ in range(min(CONJUGATE, p.shape[-1] - count + 2)):
            curved = p_dual + bend(p)
            along = (p * curved).sum(-1)
            open_ = positive & (size > accuracy**2 * first) & (size > 0)
            positive = positive & ~(open_ & (along <= FLAT * (p * p_dual).sum(-1)))
            open_ = open_ & positive
            if not bool(open_.any()):
                break
            rate = torch.where(open_, size / torch.where(open_, along, 1.0), 0.0).unsqueeze(-1)
            x, image = x + rate * p, image + rate * p_dual
            residual_dual = self.dual(residual_dual - rate * curved)
            residual = self.weight.apply(residual_dual)
            fresh = (residual * residual_dual).sum(-1)
            turn = torch.where(open_, fresh / torch.where(size > 0, size, 1.0), 0.0).unsqueeze(-1)
            p, p_dual, size = residual + turn * p, residual_dual + turn * p_dual, torch.where(open_, fresh, size)
        return x, image, positive
