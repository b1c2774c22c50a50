"""Moments of projected draws, and means that are feasible themselves.

An average of feasible points is feasible on a convex set only, and to rounding of the largest draws: if they cancel,
the average leaves the set. Averages are computed in float64. Where one is still infeasible it is projected, and it is
NaN if that fails.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from probhard._util.numerics import TOLERANCE
from probhard._util.tensors import checking, no_autocast, safe_sqrt
from probhard.constraints.base import Constraint
from probhard.constraints.box import Box
from probhard.projection.base import Projector
from probhard.projection.checked import placed
from probhard.projection.policy import Policy


def moments_of(draws: Tensor, unit_variance: float | Tensor) -> tuple[Tensor, Tensor]:
    """Mean and scale of draws (S, *batch, n), in their precision.

    Args:
        draws: The draws.
        unit_variance: Variance of the family at scale 1.
    """
    double = draws.to(torch.float64)
    mean = double.mean(0)
    scale = safe_sqrt((double - mean).square().mean(0) / unit_variance)
    return mean.to(draws.dtype), scale.to(draws.dtype)


def replaced(draws: Tensor, failed: Tensor) -> Tensor:
    """Fixed draws (S, *batch, n) with failed ones (S, *batch) replaced by the next that did not fail."""
    for _ in range(len(draws) - 1):
        if not bool(failed.any()):
            break
        draws = torch.where(failed.unsqueeze(-1), draws.roll(1, 0), draws)
        failed = failed & failed.roll(1, 0)
    return draws


def feasible_mean(mean: Tensor, loc: Tensor, constraint: Constraint, projector: Projector, policy: Policy) -> Tensor:
    """The mean of draws, projected where it is infeasible; NaN stays NaN.

    Args:
        mean: Averages, (*batch, n).
        loc: Location of the law, (*batch, n).
        constraint: The constraint.
        projector: Projects on it.
        policy: Treatment of failures.

    Returns:
        Feasible means. On convex sets they keep the gradients of the average.
    """
    known = torch.isfinite(mean).all(-1, keepdim=True)
    if projector.local:
        with no_autocast(mean):
            z = torch.where(known, mean, loc)
            solution = projector.solve(z)
        converged = solution.stats.converged | ~known.squeeze(-1)  # the others are counted already
        policy.check(replace(solution.stats, converged=converged), projector, z)
        return torch.where(known & solution.stats.converged.unsqueeze(-1), solution.value, torch.nan)
    if policy.approximate or not checking():
        return mean
    mean = _clipped(mean, constraint)
    with torch.no_grad(), no_autocast(mean):
        at = torch.where(known, mean, loc)
        size = torch.maximum(at.abs(), loc.abs()).amax(-1, keepdim=True)
        off = known & ~(constraint.relative_violation(at, size) <= TOLERANCE[mean.dtype]).unsqueeze(-1)
        if not bool(off.any()):
            return mean
        solution = projector.solve(at)
    converged = solution.stats.converged | ~off.squeeze(-1)
    policy.check(replace(solution.stats, converged=converged), projector, at)
    moved = torch.where(solution.stats.converged.unsqueeze(-1), solution.value - at, torch.nan)
    return mean + torch.where(off, moved, 0.0)


def _clipped(mean: Tensor, constraint: Constraint) -> Tensor:
    """Averages within bounds, which the rounding of a sum of equal numbers may leave; gradients are unchanged."""
    for part in constraint.resolve(mean.shape[-1]).parts():
        if isinstance(part, Box):
            mean = placed(mean, mean.detach().clamp(part.lower.to(mean), part.upper.to(mean)))
    return mean
