"""Projectors: one constraint under one weight, made ready; the table of who projects on what."""

from __future__ import annotations

from torch import Tensor

from probhard.constraints.base import Constraint
from probhard.constraints.intersection import Intersection
from probhard.constraints.linear import LinearEquality, broadcast_batch
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.covariance import Covariance
from probhard.errors import ParameterError
from probhard.projectors.base import Options, Projector, Solution, Stats
from probhard.projectors.linear import LinearProjector
from probhard.projectors.nonlinear import NonlinearProjector

__all__ = ["Options", "Projector", "Solution", "Stats", "projector_of"]


def projector_of(constraint: Constraint, z: Tensor, weight: Covariance, options: Options) -> Projector:
    """The projector of a constraint for points like z."""
    if isinstance(constraint, Constraint):
        constraint.check_event(z, "The distribution")
    if isinstance(constraint, LinearEquality):
        broadcast_batch(z.shape[:-1], constraint.batch_shape, "the distribution", "the constraint")
        return LinearProjector(constraint, weight, options)
    if isinstance(constraint, NonlinearEquality):
        return NonlinearProjector(None, constraint, weight, options)
    if isinstance(constraint, Intersection):
        return NonlinearProjector(constraint.linear, constraint.nonlinear, weight, options)
    raise ParameterError(
        f"DPPL got a {type(constraint).__name__} as its constraint.",
        "It projects onto linear and nonlinear equalities.",
        "Pass a LinearEquality, a Hierarchy, a Conservation, a NonlinearEquality, or several joined by '&'.",
    )
