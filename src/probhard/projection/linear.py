"""Projection on ``A u = b`` in closed form. One tangent gives values, moments and derivatives."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from probhard._util.numerics import TOLERANCE
from probhard._util.tensors import checking
from probhard.constraints.equality import LinearEquality
from probhard.errors import ProbhardError
from probhard.laws.covariance import Covariance
from probhard.projection.base import Options, Projector, Solution, Stats
from probhard.tangent import DenseTangent, Differential, Tangent, tangent_of
from probhard.tangent.linear import unmoved
from probhard.tangent.still import StillTangent, moving, sharper

REFINEMENTS = 4  # each removes the digits that the one before has cancelled
CANCELLED = 16.0  # ratio of sizes before and after the projection above which means are checked


class LinearProjector(Projector):
    """Projects on ``A u = b`` in closed form.

    Args:
        constraint: The rows.
        weight: W, over (*batch, n).
        options: Options of the layer.

    Raises:
        InfeasibleError: W leaves a row of a large system no variable to move, and ``options.validate`` is set.
    """

    def __init__(self, constraint: LinearEquality, weight: Covariance, options: Options) -> None:
        self.constraint, self.weight = constraint, weight
        self.validate, self.oblique = options.validate, options.oblique
        make = DenseTangent if options.dense else tangent_of
        self.tangent: Tangent = make(constraint.system, weight)
        self.still = False  # whether rows that cannot move are left out
        if options.validate and checking():
            self.tangent = moving(self.tangent, weight)
            self.still = not self.tangent.regular

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        solution = self._finished(self.tangent.project(z, self.constraint.b))
        again = self._again(solution)
        return solution if again is None else again.solve(z)

    def moments(self, z: Tensor, cov: Covariance) -> tuple[Solution | None, Tensor, Tensor, Differential]:
        mean, scale = self.tangent.moments(z, self.constraint.b, None if self.oblique else cov)
        checked = self.validate and checking()
        if not checked or not (self.still or self.tangent.conditioned or _cancels(z, mean)):
            return None, mean, scale, self.tangent  # the O(n) sweeps lose feasibility by cancellation only
        solution = self._finished(mean)
        again = self._again(solution)
        return (solution, solution.value, scale, self.tangent) if again is None else again.moments(z, cov)

    def _again(self, solution: Solution) -> LinearProjector | None:
        """The projector with a factor of twice the digits, if points failed under a factor of ``A W A^T``."""
        if not (self.validate and checking()) or bool(solution.stats.converged.all()):
            return None
        if isinstance(self.tangent, StillTangent) or not self.tangent.conditioned:
            return None
        again = copy.copy(self)
        tangent = sharper(self.tangent, self.weight)
        if tangent is None:
            return None
        again.tangent = tangent
        return again

    def explain(self, z: Tensor, stats: Stats) -> ProbhardError | None:
        if not self.still:
            return None
        at = tuple(int(i) for i in torch.nonzero(~stats.converged)[0])
        return unmoved(f" in batch element {at}" if at else "")

    def _finished(self, value: Tensor) -> Solution:
        """Points with their status; refined while a residual is above rounding."""
        residual = self.constraint.relative_violation(value)
        rounding = max(1e-2 * TOLERANCE[value.dtype], 8 * torch.finfo(value.dtype).eps)
        for _ in range(REFINEMENTS):
            if not checking() or not bool((residual > rounding).any()):
                break
            value = self.tangent.project(value, self.constraint.b)
            residual = self.constraint.relative_violation(value)
        steps = torch.ones_like(residual, dtype=torch.int64)
        return Solution(value, self.tangent, Stats(steps, residual, residual <= TOLERANCE[value.dtype]))


def _cancels(z: Tensor, mean: Tensor) -> bool:
    """Whether some projected point is far smaller than the point before, so that its digits were cancelled."""
    with torch.no_grad():
        return bool((z.abs().amax(-1) > CANCELLED * mean.abs().amax(-1)).any())
