"""Projection on ``A u = b`` in closed form. One tangent gives values, moments and derivatives."""

from __future__ import annotations

import torch
from torch import Tensor

from probhard._util.numerics import TOLERANCE
from probhard._util.tensors import checking
from probhard.constraints.equality import LinearEquality
from probhard.laws.covariance import Covariance
from probhard.projection.base import Options, Projector, Solution, Stats
from probhard.tangent import DenseTangent, Differential, tangent_of

REFINEMENTS = 4  # each removes the digits that the one before has cancelled
CANCELLED = 16.0  # ratio of sizes before and after the projection above which means are checked


class LinearProjector(Projector):
    """Projects on ``A u = b`` in closed form.

    Args:
        constraint: The rows.
        weight: W, over (*batch, n).
        options: Options of the layer.

    Raises:
        InfeasibleError: W leaves a row no variable to move, and ``options.validate`` is set.
    """

    def __init__(self, constraint: LinearEquality, weight: Covariance, options: Options) -> None:
        self.constraint, self.validate, self.oblique = constraint, options.validate, options.oblique
        make = DenseTangent if options.dense else tangent_of
        self.tangent = make(constraint.system, weight)
        if options.validate and checking():
            self.tangent.check()

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        return self._finished(self.tangent.project(z, self.constraint.b))

    def moments(self, z: Tensor, cov: Covariance) -> tuple[Solution | None, Tensor, Tensor, Differential]:
        mean, scale = self.tangent.moments(z, self.constraint.b, None if self.oblique else cov)
        if not (self.validate and checking()) or not (self.tangent.conditioned or _cancels(z, mean)):
            return None, mean, scale, self.tangent  # the O(n) sweeps lose feasibility by cancellation only
        solution = self._finished(mean)
        return solution, solution.value, scale, self.tangent

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
