"""An interior point method for elements whose sides do not settle; it gives the sides, not the answer.

Mehrotra's predictor and corrector on ``Theta dv + B^T dy = r_d``, ``B dv = r_p`` with the diagonal
``Theta = 1 / w + x_l / (v - lower) + x_u / (upper - v)``; so each step is one factor of ``B Theta^-1 B^T``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probhard.solvers.quadratic import HELD, Faces, QuadraticProblem

STEPS = 40
CLOSED = 1e-14  # complementarity, relative to the start, at which sides are read off
SHARE = 0.995  # of the way to the boundary


def central(problem: QuadraticProblem, patient: bool = False) -> Faces:
    """The ends of the central paths and the sides that they are on; ``done`` where the gap closed.

    A patient method follows the path closely, in more and shorter steps without a predictor.
    """
    lower, upper, w, centre = problem.lower, problem.upper, problem.weight, problem.centre
    still = (w <= 0) | (lower == upper)
    unit = _unit(problem)  # per element: lengths are measured in it
    low, high = torch.isfinite(lower) & ~still, torch.isfinite(upper) & ~still
    width = torch.where(low & high, upper - lower, torch.inf)
    margin = torch.minimum(unit, 0.25 * width)
    v = torch.where(still, centre.clamp(lower, upper), _inside(centre, lower, upper, margin))
    cost = 1 / torch.where(still, 1.0, w)  # gradient of the quadratic term per length
    linear = torch.zeros_like(v) if problem.linear is None else problem.linear
    typical = torch.where(still, 0.0, cost).amax(-1, keepdim=True) if problem.costed is None else _typical(problem)
    x_low, x_high = torch.where(low, typical * unit, 0.0), torch.where(high, typical * unit, 0.0)
    y = torch.zeros_like(problem.right)
    first_measure = typical * unit.square()
    done = torch.zeros(len(v), dtype=torch.bool, device=v.device)
    count = (low | high).sum(-1, keepdim=True).clamp(min=1) + (low & high).sum(-1, keepdim=True)
    steps = torch.zeros(len(v), dtype=torch.int64, device=v.device)
    for _ in range(4 * STEPS if patient else STEPS):
        gap_low = torch.where(low, v - lower, 1.0)
        gap_high = torch.where(high, upper - v, 1.0)
        measure = ((x_low * gap_low).sum(-1, keepdim=True) + (x_high * gap_high).sum(-1, keepdim=True)) / count
        primal = problem.right if problem.core is None else problem.right - problem.core.apply(v)
        done = _closed(problem, v.abs() + unit, measure, primal, first_measure)
        if bool(done.all()):
            break
        steps = steps + (~done).to(torch.int64)
        theta = cost + x_low / gap_low + x_high / gap_high
        inverse = torch.where(still, 0.0, 1 / theta)
        dual = _gradient(problem, v, centre, cost, linear, y) - x_low + x_high
        bearing = torch.maximum(inverse, HELD * problem.natural)
        factor = None if problem.core is None else problem.core.factor(bearing)

        def newton(target_low: Tensor, target_high: Tensor) -> tuple[Tensor, ...]:
            r = -dual + target_low / gap_low - x_low - target_high / gap_high + x_high  # noqa: B023
            step, turn = inverse * r, torch.zeros_like(y)  # noqa: B023
            if factor is not None:  # noqa: B023
                assert problem.core is not None
                turn = factor.solve(problem.core.apply(step) - primal)  # noqa: B023
                step = step - inverse * problem.core.transpose(turn)  # noqa: B023
            d_low = torch.where(low, (target_low - x_low * step) / gap_low - x_low, 0.0)  # noqa: B023
            d_high = torch.where(high, (target_high + x_high * step) / gap_high - x_high, 0.0)  # noqa: B023
            return step, turn, d_low, d_high

        zero = torch.zeros_like(v)
        step, _, d_low, d_high = newton(zero, zero)
        first = _length(step, gap_low, gap_high, low, high, x_low, x_high, d_low, d_high)
        after = ((x_low + first * d_low) * (gap_low + first * step)).where(low, zero).sum(-1, keepdim=True)
        after = after + ((x_high + first * d_high) * (gap_high - first * step)).where(high, zero).sum(-1, keepdim=True)
        centring = measure * (after / count / measure.clamp(min=1e-300)).clamp(0, 1).pow(3)
        if patient:
            centring, d_low, d_high = 0.3 * measure, zero, zero
        corrected = (centring - d_low * step).where(low, zero), (centring + d_high * step).where(high, zero)
        step, turn, d_low, d_high = newton(*corrected)
        length = (0.9 if patient else SHARE) * _length(step, gap_low, gap_high, low, high, x_low, x_high, d_low, d_high)
        good = torch.isfinite(step).all(-1, keepdim=True) & torch.isfinite(turn).all(-1, keepdim=True)
        length = torch.where(good, length, 0.0)
        v, y = v + length * step.nan_to_num(0.0), y + length * turn.nan_to_num(0.0)
        x_low, x_high = x_low + length * d_low.nan_to_num(0.0), x_high + length * d_high.nan_to_num(0.0)
        if problem.costed is not None:
            centre = problem.auxiliary(v, centre)
    at_low = low & (x_low * problem.natural > v - lower)
    at_high = high & (x_high * problem.natural > upper - v)
    nearer = torch.where(upper - v < v - lower, 1, -1).to(torch.int8)
    side = torch.where(at_low & at_high, nearer, at_high.to(torch.int8) - at_low.to(torch.int8))
    side = torch.where(lower == upper, torch.ones_like(side), side)
    outside = (centre > upper).to(torch.int8) - (centre < lower).to(torch.int8)
    side = torch.where(w <= 0, outside, side)
    value = torch.where(side == 0, v, torch.where(side < 0, lower, upper))
    return Faces(side, value, steps, done, y)


def _closed(problem: QuadraticProblem, lengths: Tensor, measure: Tensor, primal: Tensor, first: Tensor) -> Tensor:
    """Where complementarity and rows hold well enough to read off the sides, (L,)."""
    closed = (measure <= CLOSED * first).squeeze(-1)
    if problem.core is None:
        return closed
    size = problem.core.magnitude(lengths) + problem.right.abs()
    return closed & (primal.abs().amax(-1) <= 1e-9 * size.amax(-1) + 1e-300)


def _gradient(p: QuadraticProblem, v: Tensor, centre: Tensor, cost: Tensor, linear: Tensor, y: Tensor) -> Tensor:
    """Of the Lagrangian without bounds."""
    gradient = cost * (v - centre) + linear
    return gradient if p.core is None else gradient + p.core.transpose(y)


def _unit(problem: QuadraticProblem) -> Tensor:
    """A typical length of each element, (L, 1): how far its centre is from being feasible."""
    lower, upper, centre = problem.lower, problem.upper, problem.centre
    outside = (centre - centre.clamp(lower, upper)).abs().nan_to_num(0.0, 0.0, 0.0)
    unit = outside.amax(-1, keepdim=True)
    if problem.core is not None:
        shift = problem.core.factor(problem.weight.clamp(min=1e-300))
        pull = problem.core.transpose(shift.solve(problem.core.apply(centre) - problem.right))
        unit = torch.maximum(unit, (problem.weight * pull).abs().amax(-1, keepdim=True).nan_to_num(0.0))
    size = centre.abs().amax(-1, keepdim=True)
    return torch.maximum(unit, 1e-6 * size).clamp(min=1e-12)


def _typical(problem: QuadraticProblem) -> Tensor:
    assert problem.costed is not None
    usable = problem.costed & (problem.weight > 0)
    return torch.where(usable, 1 / problem.weight, 0.0).amax(-1, keepdim=True)


def _inside(centre: Tensor, lower: Tensor, upper: Tensor, margin: Tensor) -> Tensor:
    """Centres moved strictly between their bounds."""
    return torch.minimum(torch.maximum(centre, lower + margin), upper - margin)


def _length(
    step: Tensor,
    gap_low: Tensor,
    gap_high: Tensor,
    low: Tensor,
    high: Tensor,
    x_low: Tensor,
    x_high: Tensor,
    d_low: Tensor,
    d_high: Tensor,
) -> Tensor:
    """The longest step up to 1 that leaves gaps and multipliers non-negative, (L, 1)."""

    def ratio(change: Tensor, room: Tensor, counts: Tensor) -> Tensor:
        shrinks = counts & (change < 0)
        return torch.where(shrinks, -change / room.clamp(min=1e-300), 0.0).amax(-1, keepdim=True)

    worst = ratio(step, gap_low, low)
    for change, room, counts in ((-step, gap_high, high), (d_low, x_low, low), (d_high, x_high, high)):
        worst = torch.maximum(worst, ratio(change, room, counts))
    return 1 / worst.clamp(min=1.0)
