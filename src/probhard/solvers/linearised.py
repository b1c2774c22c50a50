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
from probhard.rows.dense import DenseRows, DenseRowsFactor
from probhard.rows.redundant import DEPENDENT, GradedRowsFactor, RedundantRows, filling, independent
from probhard.rows.system import LinearSystem
from probhard.tangent import Tangent, tangent_of
from probhard.tangent.linear import DiagonalTangent

CONJUGATE = 30  # steps of conjugate gradients
INEXACT, EXACT = 1e-4, 1e-10  # their relative accuracy: of a step on the way, of derivatives
SINGULAR = 1e-7  # smallest pivot of M relative to the largest, at which J counts as rank deficient
FINE = 1e-3  # sine of the angle between rows of J W^1/2, below which M loses digits that J and the weights have
GRADED = 128  # largest number of variables for which these are kept
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
        matrix = rows.map.matrix.detach()
        sound, graded = _regular(tangent) if dependent <= DEPENDENT else torch.zeros((), dtype=torch.bool), None
        coarse = _coarse(tangent) if dependent <= DEPENDENT else None
        if coarse is not None and bool(coarse.any()):
            found = coarse & independent(matrix, weight.diagonal().detach())
            graded = found if bool(found.any()) else None  # rows of full rank, which have a triangle
            sound = sound | found
        if bool(sound.all()) and graded is None:
            return tangent
        images = weight.apply(matrix.movedim(-2, 0)).movedim(0, -1)  # W J^T, (*lead, n, q)
        extra = torch.where(sound[..., None, None], 0.0, filling(matrix @ images.to(matrix), dependent))
    return tangent_of(LinearSystem.of_structure(RedundantRows(rows.map.matrix, extra, graded)), weight)


def _regular(tangent: Tangent) -> Tensor:
    """Where M has a factor without tiny pivots, (*lead,) bool; dense rows each have a unit of their own."""
    factor = getattr(tangent, "factor", None)
    pivots = (factor.sines if isinstance(factor, DenseRowsFactor) else tangent.pivots()).detach()
    return pivots.amin(-1) > SINGULAR * pivots.amax(-1)


def _coarse(tangent: Tangent) -> Tensor | None:
    """Where M loses digits that J and a diagonal weight have, (*lead,) bool; None if that is not looked for."""
    factor = getattr(tangent, "factor", None)
    if not isinstance(tangent, DiagonalTangent) or not isinstance(factor, DenseRowsFactor):
        return None
    if factor.structure.variables > GRADED or factor.lower.shape[-1] == 1:
        return None
    return ~(factor.sines.amin(-1) > FINE)


@dataclass(frozen=True)
class Linearised:
    """The residual of a constraint at u and the tangent of its rows under the weight."""

    h: Tensor  # (*lead, q)
    tangent: Tangent
    weight: Covariance
    regular: Tensor  # (*lead,) bool
    share: Tensor | None = None  # of the distance's curvature in that of the step, (*lead, n); 1 if None

    @classmethod
    def at(
        cls,
        constraint: NonlinearEquality,
        u: Tensor,
        weight: Covariance,
        dependent: float = DEPENDENT,
        share: Tensor | None = None,
    ) -> Linearised:
        """Evaluate the constraint at u (*lead, n) and factor M; ``dependent`` as in ``revealed``."""
        h, rows = constraint.linearised(u)
        tangent = revealed(rows, weight, dependent)
        regular = _regular(tangent).expand(h.shape[:-1]) & torch.isfinite(h).all(-1)
        return cls(h, tangent, weight, regular, share)

    def distance(self, x: Tensor) -> Tensor:
        """``W Q x`` (*lead, n) with the metric Q of the distance, whose inverse W is only without curvature."""
        return x if self.share is None else self.share * x

    def push(self, x: Tensor) -> Tensor:
        """``J x``, (*lead, q)."""
        return self.tangent.core.apply(x)

    def multiplier(self, r: Tensor) -> Tensor:
        """``M^-1 r``, (*lead, q); 0 where M is singular."""
        return torch.where(self.regular.unsqueeze(-1), self.tangent.multiplier(r), 0.0)

    def images(self, r: Tensor, multiplier: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``W J^T l`` and ``Q W J^T l``, (*lead, n), for the multiplier l of r (*lead, q), computed if None."""
        pull = self.pull(self.multiplier(r) if multiplier is None else multiplier)
        move, factor = self.weight.apply(pull), self._graded
        if factor is None:
            return move, self.distance(pull)
        other, at = factor.images(r), self._at(factor)
        return torch.where(at, other[0], move), self.distance(torch.where(at, other[1], pull))

    @property
    def _graded(self) -> GradedRowsFactor | None:
        """The factor of rows that keep the digits of very different weights, if there is one."""
        factor = getattr(self.tangent, "factor", None)
        return factor if isinstance(factor, GradedRowsFactor) else None

    def _at(self, factor: GradedRowsFactor) -> Tensor:
        """Where its products are used, (*lead, n) bool: in graded elements, for variables with a weight."""
        return (factor.graded & self.regular).unsqueeze(-1) & (factor.root > 0)

    def pull(self, multiplier: Tensor) -> Tensor:
        """``J^T l``, (*lead, n)."""
        return self.tangent.core.transpose(multiplier)

    def dual(self, v: Tensor) -> Tensor:
        """``P^T v``, the tangential part of a dual vector (*lead, n)."""
        tangential, factor = v - self.pull(self.multiplier(self.push(self.weight.apply(v)))), self._graded
        if factor is None:
            return tangential
        return torch.where(self._at(factor), factor.dual(v), tangential)

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
