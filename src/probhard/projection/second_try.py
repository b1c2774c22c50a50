"""Points that a projector flagged, from a second solver."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from probhard.errors import MissingExtraError
from probhard.laws.covariance import Covariance
from probhard.projection.base import Options, Solution
from probhard.projection.checked import replaced
from probhard.projection.convex_program import ProgramProjector
from probhard.projection.parts import Parts

MOST = 128  # points for the solver of convex programs, about 1 s; more stay flagged


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
