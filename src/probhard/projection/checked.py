"""Points as they are returned: in the caller's precision, within their bounds, with their violation checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from probhard._util.numerics import TOLERANCE
from probhard._util.tensors import checking
from probhard.projection.base import Solution, Stats
from probhard.projection.parts import Parts
from probhard.tangent import ChosenTangent, Differential

ROUNDING = 1e-15


def finished(
    parts: Parts, z: Tensor, value: Tensor, tangent: Differential, steps: Tensor, settled: Tensor, local: bool = False
) -> Solution:
    """A solution in the precision of z, never rounded out of its bounds.

    Args:
        parts: The parts of the constraint.
        z: Points to project, (*lead, n).
        value: Their projections within the bounds, (*lead, n); only the other parts are checked.
        tangent: The tangent at the projections.
        steps: Number of iterations, (*lead,).
        settled: Whether the solver converged, (*lead,).
        local: Whether the set is not convex.
    """
    if z.dtype != value.dtype:
        value = value.to(z.dtype)
        if parts.box is not None:
            lower, upper = parts.box.lower.to(value), parts.box.upper.to(value)
            value = placed(value, value.detach().clamp(lower, upper))
    residual = relative_violation(parts, value.detach(), z.detach())
    return Solution(value, tangent, Stats(steps, residual, settled & (residual <= TOLERANCE[z.dtype]), local))


def relative_violation(parts: Parts, value: Tensor, z: Tensor) -> Tensor:
    """Largest relative violation of all parts but the bounds; see ``Constraint.relative_violation``."""
    size = torch.maximum(z.abs().amax(-1, keepdim=True), value.abs().amax(-1, keepdim=True))
    worst = value.new_zeros(value.shape[:-1])
    for part in (parts.linear, parts.nonlinear, *parts.inequalities, *parts.shapes, *parts.curved):
        if part is not None:
            worst = torch.maximum(worst, part.relative_violation(value, size))
    return worst.nan_to_num(torch.inf)


def feasible(parts: Parts, z: Tensor, value: Tensor, other: Tensor) -> Tensor:
    """Points on their faces (*lead, n), or those of the solver where only they are feasible; gradients are unchanged.

    A face with rows that nearly repeat each other is computed with less accuracy than the solver's own point.
    """
    if not checking():
        return value
    with torch.no_grad():
        here = relative_violation(parts, value, z)
        worse = here > TOLERANCE[torch.float64]
        if not bool(worse.any()):
            return value
        worse &= relative_violation(parts, other, z) < here
        target = torch.where(worse.unsqueeze(-1), other, value)
    return placed(value, target)


def within(u: Tensor, z: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Clip u (*lead, n) to its bounds, and move it to a bound within the rounding of z; gradients are unchanged."""
    with torch.no_grad():
        fixed, size = u.clamp(lower, upper), z.abs().mul_(ROUNDING)
        for bound in (lower, upper):
            gap = (u - bound).abs_()
            close = (gap <= torch.add(size, bound.abs(), alpha=ROUNDING)).logical_and_(gap < torch.inf)
            fixed = torch.where(close, bound, fixed)
    return placed(u, fixed)


def placed(u: Tensor, target: Tensor) -> Tensor:
    """The numbers of ``target``, exactly, with the gradients of u: ``u + (target - u)`` would round."""
    return target.detach() + (u - u.detach()) if torch.is_grad_enabled() else target


def replaced(first: Solution, second: Solution, z: Tensor, solve: Callable[[Tensor], Solution]) -> Solution:
    """The first solution, with the points that only the second one found.

    Args:
        first: The solution of the projector.
        second: Another one, over the same leading dimensions.
        z: Points to project, (*lead, n).
        solve: The projector, by which gradients of the first solution are computed without its failed points.
    """
    good = second.stats.converged & ~first.stats.converged
    if not bool(good.any()):
        return first
    if torch.is_grad_enabled() and first.value.requires_grad:  # gradients of failed points may be NaN
        again = solve(torch.where(good.unsqueeze(-1), second.value.detach(), z))
        both = again.stats.converged & first.stats.converged  # a point may depend on others of its batch
        first = replace(again, stats=replace(again.stats, converged=both))
    residual = torch.where(good, second.stats.residual, first.stats.residual)
    stats = replace(first.stats, residual=residual, converged=good | first.stats.converged)
    value = torch.where(good.unsqueeze(-1), second.value, first.value)
    return Solution(value, ChosenTangent(good, second.tangent, first.tangent), stats)
