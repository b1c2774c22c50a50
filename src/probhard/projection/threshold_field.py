"""Moments of a law projected on an L1 ball, bounds and at most one row, or on bounds and one row.

The rule of ``laws.soft_threshold``, in O(n): turnover limits, shares, budgets. Weights are diagonal, and so is the law,
which is normal. Where the fixed point is not found, marginals are those of the delta method.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.jit import AVAILABLE
from probhard._util.numerics import floored
from probhard._util.tensors import broadcast, checking
from probhard.constraints.l1_ball import L1Ball
from probhard.errors import ConvergenceError
from probhard.laws.covariance import Covariance, Diagonal
from probhard.laws.distribution import LocationScale
from probhard.laws.family import NORMAL
from probhard.laws.marginals import CensoredMarginals, Marginals
from probhard.laws.soft_threshold import Sides, Thresholds, soft_threshold
from probhard.laws.split_marginals import SplitMarginals
from probhard.projection.base import Projector
from probhard.projection.lifting import shared
from probhard.projection.parts import Parts

FEWEST = 3  # variables of a row; with fewer, one fixes the other


@dataclass(frozen=True)
class ThresholdField:
    """The rule for one constraint and one weight.

    Args:
        parts: The parts of the constraint.
        weight: W, over (*batch, n).
        projector: Projects elements whose fixed point is not found.
    """

    parts: Parts
    weight: Covariance
    projector: Projector

    cheap = True  # "auto" takes the rule

    @property
    def served(self) -> bool:
        """Whether the set has the rule."""
        parts, linear = self.parts, self.parts.linear
        if not AVAILABLE or not checking() or not isinstance(self.weight, Diagonal):
            return False
        if not parts.polyhedral or parts.semicontinuous or parts.inequalities or not shared(parts):
            return False
        balls = [shape for shape in parts.shapes if isinstance(shape, L1Ball)]
        if len(balls) != len(parts.shapes) or len(balls) > 1:
            return False
        if linear is None:
            return bool(balls)
        if linear.system.held is not None or linear.system.map.row_count != 1 or not (balls or parts.box is not None):
            return False
        return int(torch.count_nonzero(self._row())) >= FEWEST

    def fits(self, base: LocationScale) -> bool:
        """Whether the variables of the law are independent and normal."""
        return base.family.name == NORMAL.name and isinstance(base.cov, Diagonal)

    def laws(self, base: LocationScale) -> Marginals:
        """The marginals of the projected law, batch (*batch, n)."""
        assert isinstance(base.cov, Diagonal)
        assert isinstance(self.weight, Diagonal)
        problem, center, shape = self._problem(base.loc, base.cov.variance, self.weight.variance)
        sides = soft_threshold(problem)
        full = (len(sides.loc), *shape)
        loc, scale, lower, upper = (x.reshape(full) for x in (sides.loc, sides.scale, sides.lower, sides.upper))
        loc = loc + center
        if not bool(sides.settled.all()):
            loc, scale = self._first_order(base, sides, loc, scale, shape)
        loc, scale, lower, upper = (x.to(base.loc.dtype) for x in (loc, scale, center + lower, center + upper))
        if len(loc) == 2:
            pieces = CensoredMarginals(loc, scale, base.family, lower, upper, validate_args=False)
            return SplitMarginals(pieces, center.to(loc).expand(shape))
        return CensoredMarginals(loc[0], scale[0], base.family, lower[0], upper[0], validate_args=False)

    def _row(self) -> Tensor:
        """The coefficients of the row, (n,), cached with the plan if the data are constant."""
        linear, kept = self.parts.linear, self.parts.kept
        if linear is None:
            return torch.zeros(self.parts.variables, dtype=torch.float64)
        known: Tensor | None = (kept or {}).get(type(self))
        if known is None:
            known = linear.system.map.at(torch.empty(0, dtype=torch.float64)).dense()[0].detach()
            if kept is not None:
                kept[type(self)] = known
        return known

    def _problem(self, loc: Tensor, variance: Tensor, weight: Tensor) -> tuple[Thresholds, Tensor, torch.Size]:
        """The laws and the set relative to the centre, the centre, and the shape (*batch, n)."""
        loc = loc.to(torch.float64)
        variance, weight = variance.to(loc), floored(weight.to(loc))
        n, linear = self.parts.variables, self.parts.linear
        row = self._row().to(loc.device)
        right = loc.new_zeros(()) if linear is None else linear.b.to(loc).squeeze(-1)
        lower, upper = self.parts.bounds(loc)
        center, radius = loc.new_zeros(n), None
        for ball in self.parts.shapes:
            assert isinstance(ball, L1Ball)
            center, radius = ball._centers(n, loc), ball.radius.to(loc)
        vectors = (loc - center, variance, weight, lower - center, upper - center)
        numbers = (right - (row * center).sum(-1), right if radius is None else radius)
        batch = broadcast(*(x.shape[:-1] for x in vectors), *(x.shape for x in numbers))
        total = batch.numel()
        flat = [x.expand(*batch, n).reshape(total, n) for x in vectors]
        ends = [x.expand(batch).reshape(total) for x in numbers]
        radius = None if radius is None else ends[1]
        return Thresholds(*flat, row, ends[0], radius), center, torch.Size((*batch, n))

    def _first_order(
        self, base: LocationScale, sides: Sides, loc: Tensor, scale: Tensor, shape: torch.Size
    ) -> tuple[Tensor, Tensor]:
        """Locations and scales (sides, *batch, n), those of the delta method where there is no fixed point.

        Raises:
            ConvergenceError: The projection of such a mean failed as well.
        """
        solution, mean, stddev, _ = self.projector.moments(base.loc, base.cov)
        found = sides.settled.reshape(shape[:-1])
        if solution is not None and not bool((found | solution.stats.converged).all()):
            lost = int((~found & ~solution.stats.converged).sum())
            raise ConvergenceError(
                f"The moments of {lost} of {found.numel()} laws were not found, nor the projection of their means.",
                "Their weights or variances may be zero, or not finite.",
                "Set a floor on the variances, or use another metric.",
            )
        found = found.unsqueeze(-1)
        return torch.where(found, loc, mean.to(loc)), torch.where(found, scale, stddev.to(scale))
