"""Sides of a bounded quadratic problem by Mehrotra's primal-dual interior point method.

With multipliers y of the rows and x_l, x_u of the bounds, the central path of a ``QuadraticProblem`` satisfies

    (v - c) / w + l + B^T y - x_l + x_u = 0,     B v = b,     x_l (v - lower) = x_u (upper - v) = mu,

and ends at the solution as mu goes to 0. A Newton step on these equations eliminates x_l and x_u. It leaves the
diagonal ``Theta = 1 / w + x_l / (v - lower) + x_u / (upper - v)`` and one factorisation of ``B Theta^-1 B^T``. The
method returns ``Faces``: the side of its bounds where each variable ends. ``active_set`` then computes the point there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.numerics import TINY, equal_bounds
from probhard.rows.base import Factor
from probhard.solvers.quadratic import HELD, Faces, QuadraticProblem

STEPS = 40
CLOSED = 1e-14  # complementarity, relative to the start, at which sides are read off
FEASIBLE = 1e-9  # residual of the rows, relative to their terms, at which sides are read off
SHARE = 0.995  # of the way to the boundary
PATIENT_STEPS, PATIENT_SHARE, PATIENT_CENTRING = 160, 0.9, 0.3


def central(problem: QuadraticProblem, patient: bool = False) -> Faces:
    """Follow the central paths to their ends.

    Args:
        problem: The problems, one per element of the leading dimension L.
        patient: Take more and shorter steps close to the path, without a predictor.

    Returns:
        The sides at the ends of the paths; ``done`` where complementarity and rows are attained.
    """
    barrier = Barrier.of(problem)
    point, centre = barrier.start(), problem.centre
    done = torch.zeros(problem.count, dtype=torch.bool, device=centre.device)
    steps = torch.zeros(problem.count, dtype=torch.int64, device=centre.device)
    for _ in range(PATIENT_STEPS if patient else STEPS):
        gaps = barrier.gaps(point)
        primal = barrier.primal_residual(point.v)
        done = barrier.closed(point.v, gaps.mu, primal)
        if bool(done.all()):
            break
        steps = steps + (~done).to(torch.int64)
        system = NewtonSystem.at(barrier, point, centre, gaps, primal)
        direction = system.centred(PATIENT_CENTRING * gaps.mu) if patient else system.predicted_and_corrected()
        length = (PATIENT_SHARE if patient else SHARE) * system.longest(direction)
        point = point.moved(length, direction)
        if problem.costed is not None:  # the centres of auxiliary variables are the last iterate
            centre = problem.auxiliary(point.v, centre)
    return barrier.faces(point, centre, steps, done)


@dataclass(frozen=True)
class PrimalDual:
    """A point of the path, or a direction from it."""

    v: Tensor  # (L, N)
    y: Tensor  # multipliers of the rows, (L, q)
    x_lower: Tensor  # multipliers of the lower bounds, (L, N); 0 where there are none
    x_upper: Tensor  # multipliers of the upper bounds, (L, N)

    def moved(self, length: Tensor, direction: PrimalDual) -> PrimalDual:
        """``self + length direction``; points whose direction is not finite stay where they are."""
        finite = torch.isfinite(direction.v).all(-1, keepdim=True) & torch.isfinite(direction.y).all(-1, keepdim=True)
        length = torch.where(finite, length, 0.0)
        return PrimalDual(
            self.v + length * direction.v.nan_to_num(0.0),
            self.y + length * direction.y.nan_to_num(0.0),
            self.x_lower + length * direction.x_lower.nan_to_num(0.0),
            self.x_upper + length * direction.x_upper.nan_to_num(0.0),
        )


@dataclass(frozen=True)
class Gaps:
    """Distances to the bounds and the complementarity they give."""

    lower: Tensor  # v - lower, (L, N); 1 where there is no bound
    upper: Tensor  # upper - v, (L, N)
    mu: Tensor  # mean of the products with x_l and x_u, (L, 1)


@dataclass(frozen=True)
class Barrier:
    """A quadratic problem with everything that stays the same along its central path."""

    problem: QuadraticProblem
    fixed: Tensor  # (L, N) bool: without weight, or between equal bounds
    bounded_below: Tensor  # (L, N) bool: not fixed, with a finite lower bound
    bounded_above: Tensor  # (L, N) bool
    bound_count: Tensor  # (L, 1), at least 1
    unit: Tensor  # typical length, (L, 1)
    stiffness: Tensor  # typical gradient per length, (L, 1)
    curvature: Tensor  # 1 / w, (L, N); 1 where fixed
    linear: Tensor  # l, (L, N)

    @classmethod
    def of(cls, problem: QuadraticProblem) -> Barrier:
        """Classify the variables and measure typical lengths and gradients."""
        lower, upper, w = problem.lower, problem.upper, problem.weight
        fixed = (w <= 0) | equal_bounds(lower, upper)
        below, above = torch.isfinite(lower) & ~fixed, torch.isfinite(upper) & ~fixed
        count = (below | above).sum(-1, keepdim=True).clamp(min=1) + (below & above).sum(-1, keepdim=True)
        curvature = 1 / torch.where(fixed, 1.0, w)
        if problem.costed is None:
            stiffness = torch.where(fixed, 0.0, curvature).amax(-1, keepdim=True)
        else:
            stiffness = torch.where(problem.costed & (w > 0), 1 / w, 0.0).amax(-1, keepdim=True)
        linear = torch.zeros_like(problem.centre) if problem.linear is None else problem.linear
        return cls(problem, fixed, below, above, count, _unit(problem), stiffness, curvature, linear)

    def start(self) -> PrimalDual:
        """The centres moved strictly between their bounds, with multipliers of a typical size."""
        lower, upper, centre = self.problem.lower, self.problem.upper, self.problem.centre
        width = torch.where(self.bounded_below & self.bounded_above, upper - lower, torch.inf)
        margin = torch.minimum(self.unit, 0.25 * width)
        inside = torch.minimum(torch.maximum(centre, lower + margin), upper - margin)
        gradient = self.stiffness * self.unit
        return PrimalDual(
            torch.where(self.fixed, centre.clamp(lower, upper), inside),
            torch.zeros_like(self.problem.right),
            torch.where(self.bounded_below, gradient, 0.0),
            torch.where(self.bounded_above, gradient, 0.0),
        )

    def gaps(self, point: PrimalDual) -> Gaps:
        """``v - lower``, ``upper - v`` and ``mu``."""
        lower = torch.where(self.bounded_below, point.v - self.problem.lower, 1.0)
        upper = torch.where(self.bounded_above, self.problem.upper - point.v, 1.0)
        products = (point.x_lower * lower).sum(-1, keepdim=True) + (point.x_upper * upper).sum(-1, keepdim=True)
        return Gaps(lower, upper, products / self.bound_count)

    def primal_residual(self, v: Tensor) -> Tensor:
        """``b - B v``, (L, q)."""
        core, right = self.problem.core, self.problem.right
        return right if core is None else right - core.apply(v)

    def dual_residual(self, point: PrimalDual, centre: Tensor) -> Tensor:
        """``(v - c) / w + l + B^T y - x_l + x_u``, (L, N)."""
        core = self.problem.core
        gradient = self.curvature * (point.v - centre) + self.linear
        gradient = gradient if core is None else gradient + core.transpose(point.y)
        return gradient - point.x_lower + point.x_upper

    def closed(self, v: Tensor, mu: Tensor, primal: Tensor) -> Tensor:
        """Where complementarity and rows hold well enough to read off the sides, (L,) bool."""
        closed = (mu <= CLOSED * (self.stiffness * self.unit.square())).squeeze(-1)
        if self.problem.core is None:
            return closed
        size = self.problem.core.magnitude(v.abs() + self.unit) + self.problem.right.abs()
        return closed & (primal.abs().amax(-1) <= FEASIBLE * size.amax(-1) + TINY)

    def faces(self, point: PrimalDual, centre: Tensor, steps: Tensor, done: Tensor) -> Faces:
        """Sides: a bound is active where its multiplier, as a length, exceeds the gap that is left."""
        lower, upper, v, natural = self.problem.lower, self.problem.upper, point.v, self.problem.natural
        at_lower = self.bounded_below & (point.x_lower * natural > v - lower)
        at_upper = self.bounded_above & (point.x_upper * natural > upper - v)
        nearer = torch.where(upper - v < v - lower, 1, -1).to(torch.int8)
        side = torch.where(at_lower & at_upper, nearer, at_upper.to(torch.int8) - at_lower.to(torch.int8))
        side = torch.where(equal_bounds(lower, upper), torch.ones_like(side), side)
        outside = (centre > upper).to(torch.int8) - (centre < lower).to(torch.int8)
        side = torch.where(self.problem.weight <= 0, outside, side)
        value = torch.where(side == 0, v, torch.where(side < 0, lower, upper))
        return Faces(side, value, steps, done, point.y)


@dataclass(frozen=True)
class NewtonSystem:
    """The equations of the path linearised at a point, factored for several right-hand sides."""

    barrier: Barrier
    point: PrimalDual
    gaps: Gaps
    primal: Tensor  # b - B v, (L, q)
    dual: Tensor  # gradient of the Lagrangian, (L, N)
    inverse: Tensor  # Theta^-1, (L, N); 0 where fixed
    factor: Factor | None  # of B Theta^-1 B^T

    @classmethod
    def at(cls, barrier: Barrier, point: PrimalDual, centre: Tensor, gaps: Gaps, primal: Tensor) -> NewtonSystem:
        """Form Theta and factor ``B Theta^-1 B^T``."""
        problem = barrier.problem
        theta = barrier.curvature + point.x_lower / gaps.lower + point.x_upper / gaps.upper
        inverse = torch.where(barrier.fixed, 0.0, 1 / theta)
        # held variables keep a tiny weight, so that rows without a free variable stay regular
        regular = torch.maximum(inverse, HELD * problem.natural)
        factor = None if problem.core is None else problem.core.factor(regular)
        return cls(barrier, point, gaps, primal, barrier.dual_residual(point, centre), inverse, factor)

    def direction(self, target_lower: Tensor, target_upper: Tensor) -> PrimalDual:
        """The Newton direction towards target complementarity products (L, N).

        With ``r = -dual + target_l / gap_l - x_l - target_u / gap_u + x_u`` it solves

            Theta dv + B^T dy = r,     B dv = b - B v,     dx = (target -+ x dv) / gap - x.
        """
        core, x_lower, x_upper = self.barrier.problem.core, self.point.x_lower, self.point.x_upper
        r = -self.dual + target_lower / self.gaps.lower - x_lower - target_upper / self.gaps.upper + x_upper
        dv, dy = self.inverse * r, torch.zeros_like(self.point.y)
        if self.factor is not None:
            assert core is not None
            dy = self.factor.solve(core.apply(dv) - self.primal)
            dv = dv - self.inverse * core.transpose(dy)
        d_lower = (target_lower - x_lower * dv) / self.gaps.lower - x_lower
        d_upper = (target_upper + x_upper * dv) / self.gaps.upper - x_upper
        below, above = self.barrier.bounded_below, self.barrier.bounded_above
        return PrimalDual(dv, dy, torch.where(below, d_lower, 0.0), torch.where(above, d_upper, 0.0))

    def centred(self, target: Tensor) -> PrimalDual:
        """Direction to the point of the path with ``mu = target`` (L, 1)."""
        below, above = self.barrier.bounded_below, self.barrier.bounded_above
        return self.direction(torch.where(below, target, 0.0), torch.where(above, target, 0.0))

    def predicted_and_corrected(self) -> PrimalDual:
        """Mehrotra's direction: predict with ``mu = 0``, then centre and correct for the products of the prediction.

        The predictor reaches complementarity mu_a, which sets the centring target ``mu (mu_a / mu)^3``.
        """
        zero, mu = torch.zeros_like(self.point.v), self.gaps.mu
        predictor = self.direction(zero, zero)
        reached = self._complementarity_after(self.longest(predictor), predictor)
        centring = mu * (reached / mu.clamp(min=TINY)).clamp(0, 1).pow(3)
        lower = (centring - predictor.x_lower * predictor.v).where(self.barrier.bounded_below, zero)
        upper = (centring + predictor.x_upper * predictor.v).where(self.barrier.bounded_above, zero)
        return self.direction(lower, upper)

    def longest(self, direction: PrimalDual) -> Tensor:
        """The longest step up to 1 that leaves gaps and multipliers non-negative, (L, 1)."""
        below, above = self.barrier.bounded_below, self.barrier.bounded_above
        ratios = (
            _shrinkage(direction.v, self.gaps.lower, below),
            _shrinkage(-direction.v, self.gaps.upper, above),
            _shrinkage(direction.x_lower, self.point.x_lower, below),
            _shrinkage(direction.x_upper, self.point.x_upper, above),
        )
        return 1 / torch.stack(ratios).amax(0).clamp(min=1.0)

    def _complementarity_after(self, length: Tensor, direction: PrimalDual) -> Tensor:
        """``mu`` after a step, (L, 1)."""
        zero = torch.zeros_like(self.point.v)
        lower = (self.point.x_lower + length * direction.x_lower) * (self.gaps.lower + length * direction.v)
        upper = (self.point.x_upper + length * direction.x_upper) * (self.gaps.upper - length * direction.v)
        below, above = self.barrier.bounded_below, self.barrier.bounded_above
        after = lower.where(below, zero).sum(-1, keepdim=True) + upper.where(above, zero).sum(-1, keepdim=True)
        return after / self.barrier.bound_count


def _shrinkage(change: Tensor, room: Tensor, counts: Tensor) -> Tensor:
    """The largest ``-change / room`` among variables that count and shrink, else 0; (L, 1)."""
    shrinks = counts & (change < 0)
    return torch.where(shrinks, -change / room.clamp(min=TINY), 0.0).amax(-1, keepdim=True)


def _unit(problem: QuadraticProblem) -> Tensor:
    """A typical length of each element, (L, 1): how far its centre is from being feasible."""
    lower, upper, centre = problem.lower, problem.upper, problem.centre
    outside = (centre - centre.clamp(lower, upper)).abs().nan_to_num(0.0, 0.0, 0.0)
    unit = outside.amax(-1, keepdim=True)
    if problem.core is not None:
        factor = problem.core.factor(problem.weight.clamp(min=TINY))
        pull = problem.core.transpose(factor.solve(problem.core.apply(centre) - problem.right))
        unit = torch.maximum(unit, (problem.weight * pull).abs().amax(-1, keepdim=True).nan_to_num(0.0))
    size = centre.abs().amax(-1, keepdim=True)
    return torch.maximum(unit, 1e-6 * size).clamp(min=1e-12)
