"""A nonlinear equality linearised at a point, and linear systems on its tangent space.

With ``J = dh/du`` and the weight ``W = Q^-1``, the tangent space ``J x = 0`` has the projection

    P = I - W J^T M^-1 J,     M = J W J^T.

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
from probhard.rows.system import LinearSystem
from probhard.tangent import Tangent, tangent_of

CONJUGATE = 30  # steps of conjugate gradients
INEXACT, EXACT = 1e-4, 1e-10  # their relative accuracy: of a step on the way, of derivatives
SINGULAR = 1e-7  # smallest pivot of M relative to the largest, at which J counts as rank deficient
FLAT = 1e-10  # curvature along a direction, relative to its length, that counts as none


@dataclass(frozen=True)
class Linearised:
    """The residual of a constraint at u and the tangent of its rows under the weight."""

    h: Tensor  # (*lead, q)
    tangent: Tangent
    weight: Covariance
    regular: Tensor  # (*lead,) bool

    @classmethod
    def at(cls, constraint: NonlinearEquality, u: Tensor, weight: Covariance) -> Linearised:
        """Evaluate the constraint at u (*lead, n) and factor M."""
        h, rows = constraint.linearised(u)
        tangent = tangent_of(LinearSystem.of_structure(rows), weight)
        pivots = tangent.pivots().expand(*h.shape[:-1], -1)
        regular = (pivots.amin(-1) > SINGULAR * pivots.amax(-1)) & torch.isfinite(h).all(-1)
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

    def relative(self, u: Tensor) -> Tensor:
        """Largest residual relative to the terms that should cancel, (*lead,)."""
        size = self.tangent.core.magnitude(u.abs() + 1e-8)
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
        for _ in range(min(CONJUGATE, p.shape[-1] - self.h.shape[-1] + 2)):
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
