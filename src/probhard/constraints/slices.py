"""Constraints of one time slice, lifted to every slice of a field; fields flatten time-major, n = nt * nx."""

from __future__ import annotations

from typing import Any

from probhard.constraints.base import Constraint
from probhard.errors import ShapeError


def per_slice(constraint: Constraint, shape: tuple[int, int]) -> Any:
    """Lift a slice's constraint to a field of ``shape = (nt, nx)``, flattened time-major.

    The slice's data may differ in time: its second to last dimension is then nt. A Conservation takes a mass of shape
    (*batch, nt), a Box bounds of shape (*batch, nt, nx).

    Args:
        constraint: On nx variables, or on any number.
        shape: (nt, nx).

    Returns:
        The constraint on nt * nx variables.

    Raises:
        ShapeError: The shape or the data in time do not fit.
        ParameterError: The constraint has no form for every slice of a field.
    """
    slices, width = shape
    if min(shape) < 1:
        raise ShapeError(f"per_slice got shape={shape}.", "A field has slices of points.", "Use (nt, nx), time first.")
    if constraint.variables not in (None, width):
        raise ShapeError(
            f"per_slice got a constraint on {constraint.variables} variables and slices of {width}.",
            "The constraint speaks of one slice.",
            f"Use shape=(nt, {constraint.variables}), time first.",
        )
    return constraint.on_slices(slices, width)
