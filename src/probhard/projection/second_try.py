"""Points that a projector flagged, from a second solver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from probhard.errors import MissingExtraError
from probhard.laws.covariance import Covariance
from probhard.projection.base import Options, Solution
from probhard.projection.convex_program import ProgramProjector
from probhard.projection.parts import Parts
from probhard.tangent import ChosenTangent

MOST = 128  # points for the solver of convex programs, about 1 s; more stay flagged


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


def by_program(
    parts: Parts, weight: Covariance, z: Tensor, solution: Solution, solve: Callable[[Tensor], Solution]
) -> Solution:
    """The solution with flagged points by the solver of convex programs, if cvxpy is installed, up to ``MOST``.

    Args:
        parts: The parts of the constraint: cones, balls, rows, bounds and shapes.
        weight: W, over (*batch, n).
        z: Points to project, (*lead, n).
        solution: Their solution so far.
        solve: The projector that it is from.
    """
    failed = ~solution.stats.converged
    if not bool(failed.any()):
        return solution
    failed = failed & (failed.flatten().cumsum(0).reshape(failed.shape) <= MOST)
    try:
        second = ProgramProjector(parts, weight, Options()).solved(z, failed.cpu())
    except (MissingExtraError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return solution  # cvxpy is not installed, or the weight has no factor
    return replaced(solution, second, z, solve)
