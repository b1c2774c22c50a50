"""Lift a constraint on one time slice to every slice of a field. Fields flatten time-major, n = nt * nx."""

from __future__ import annotations

from typing import Any

from probhard.constraints._time import field_shape
from probhard.constraints.base import Constraint
from probhard.constraints.intersection import check_constraint
from probhard.errors import ShapeError


def per_slice(constraint: Constraint, shape: tuple[int, int]) -> Any:
    """Lift a constraint on one slice to a field, flattened time-major.

    Data may differ in time: a Conservation takes a mass of shape (*batch, nt), a Box bounds of shape (*batch, nt, nx).

    Args:
        constraint: On nx variables, or on any number.
        shape: (nt, nx); the result has nt * nx variables.

    Raises:
        ShapeError: The shape, or data that differs in time, does not fit.
        ParameterError: The constraint cannot be lifted.
    """
    check_constraint(constraint, "per_slice")
    slices, width = field_shape("per_slice", shape)
    if constraint.variables not in (None, width):
        raise ShapeError(
            f"per_slice got a constraint on {constraint.variables} variables and slices of {width}.",
            "The constraint must apply to one slice.",
            f"Use shape=(nt, {constraint.variables}), time first.",
        )
    return constraint.on_slices(slices, width)
