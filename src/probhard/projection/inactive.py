"""Points that an iterative method of curved sets did not find, although no curved part holds them back.

If the nearest point of the rows and bounds alone lies within the curved parts, too, it is the nearest point of all. The
methods of polyhedra find it to rounding, also from far away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from probhard._util.numerics import TOLERANCE
from probhard._util.tensors import checking
from probhard.laws.covariance import Covariance, Diagonal
from probhard.projection.base import Options, Projector, Solution
from probhard.projection.checked import replaced
from probhard.projection.coupled import CoupledProjector
from probhard.projection.lifting import shared
from probhard.projection.linear import LinearProjector
from probhard.projection.parts import Parts
from probhard.projection.polyhedral import FaceProjector


def without_curved(
    parts: Parts, weight: Covariance, options: Options, z: Tensor, solve: Callable[[Tensor], Solution]
) -> Solution:
    """Solve, and complete the solution by nearest points of the rows and bounds alone.

    Args:
        parts: The parts of the constraint, with curved inequalities or cones.
        weight: W, over (*batch, n).
        options: Options of the layer.
        z: Points to project, (*lead, n).
        solve: Projects points on all parts.
    """
    solution = solve(z)
    if not checking() or parts.nonlinear is not None or bool(solution.stats.converged.all()):
        return solution
    rest = replace(parts, curved=(), cones=(), kept=None)
    if rest.linear is None and rest.box is None and not rest.inequalities and not rest.shapes:
        return solution
    other = _polyhedral(rest, weight, options).solve(z)
    with torch.no_grad():
        good = other.stats.converged & ~solution.stats.converged
        size = torch.maximum(z.abs(), other.value.abs()).amax(-1, keepdim=True)
        for part in (*parts.curved, *parts.cones):
            good = good & (part.relative_violation(other.value, size) <= TOLERANCE[z.dtype])
    other = replace(other, stats=replace(other.stats, converged=good))
    return replaced(solution, other, z, solve)


def _polyhedral(parts: Parts, weight: Covariance, options: Options) -> Projector:
    if parts.only_equalities:
        assert parts.linear is not None
        return LinearProjector(parts.linear, weight, replace(options, validate=False))
    if isinstance(weight, Diagonal) and shared(parts):
        return FaceProjector(parts, weight, options)
    return CoupledProjector(parts, weight, options)
