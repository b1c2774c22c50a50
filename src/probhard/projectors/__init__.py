"""Projectors: one constraint under one weight, made ready; the table of who projects on what."""

from __future__ import annotations

from torch import Tensor

from probhard.constraints.base import Constraint
from probhard.constraints.curved import Ball
from probhard.constraints.linear import LinearEquality, broadcast_batch
from probhard.covariance import Covariance, Diagonal
from probhard.errors import ParameterError
from probhard.projectors.ball import BallProjector
from probhard.projectors.base import Options, Projector, Solution, Stats
from probhard.projectors.coupled import CoupledProjector
from probhard.projectors.curved import CurvedProjector
from probhard.projectors.faces import FaceProjector
from probhard.projectors.gathered import Gathered, gather
from probhard.projectors.lifting import shared
from probhard.projectors.linear import LinearProjector
from probhard.projectors.nonlinear import NonlinearProjector

__all__ = ["Options", "Projector", "Solution", "Stats", "projector_of"]


def projector_of(constraint: Constraint, z: Tensor, weight: Covariance, options: Options) -> Projector:
    """The projector of a constraint for points like z."""
    if not isinstance(constraint, Constraint):
        raise ParameterError(
            f"DPPL got a {type(constraint).__name__} as its constraint.",
            "It projects on constraints of this library.",
            "Pass a LinearEquality, a Hierarchy, a Box, a NonlinearEquality, or several joined by '&'.",
        )
    constraint.check_event(z, "The distribution")
    if isinstance(constraint, LinearEquality):
        broadcast_batch(z.shape[:-1], constraint.batch_shape, "the distribution", "the constraint")
        return LinearProjector(constraint, weight, options)
    parts = gather(constraint, z.shape[-1])
    if parts.equalities and parts.nonlinear is not None:
        return NonlinearProjector(parts.linear, parts.nonlinear, weight, options)
    if isinstance(weight, Diagonal) and _only_ball(parts):
        return BallProjector(parts, weight, options)
    if not parts.polyhedral:
        return CurvedProjector(parts, weight, options)
    if isinstance(weight, Diagonal) and shared(parts):
        return FaceProjector(parts, weight, options)
    return CoupledProjector(parts, weight, options)


def _only_ball(parts: Gathered) -> bool:
    alone = parts.linear is None and parts.nonlinear is None and parts.box is None
    others = parts.rows or parts.shapes or parts.diminishing or parts.programs
    return alone and not others and len(parts.curved) == 1 and isinstance(parts.curved[0], Ball)
