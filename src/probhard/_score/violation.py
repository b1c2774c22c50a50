"""Constraint error: violations of a constraint, over points or draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from probhard.laws.distribution import as_location_scale


@dataclass(frozen=True)
class ConstraintViolation:
    """How far points are from obeying a constraint; all scalars.

    Args:
        largest: Largest violation of any point.
        mean: Mean over points of the summed absolute residuals and positive excesses.
        mean_square: Mean over points of their summed squares.
    """

    largest: Tensor
    mean: Tensor
    mean_square: Tensor


def constraint_error(constraint: Any, u: Any) -> ConstraintViolation:
    """Constraint error CE of points, draws, or the mean of a distribution.

    Args:
        constraint: A ``Constraint`` over n variables.
        u: Points or draws, (..., n), or a distribution, of which the mean is taken.

    Returns:
        The largest, mean and mean squared violation.

    Raises:
        ParameterError: If u is neither a tensor nor a distribution.
        ShapeError: If u has another number of variables.
    """
    if isinstance(u, Tensor):
        point = u
    else:
        point = u.mean if hasattr(u, "mean") else as_location_scale(u).mean
    residual, excess = constraint.residual(point), constraint.excess(point).clamp(min=0)  # (..., q), (..., p)
    return ConstraintViolation(
        largest=constraint.violation(point).max(),
        mean=(residual.abs().sum(-1) + excess.sum(-1)).mean(),
        mean_square=(residual.square().sum(-1) + excess.square().sum(-1)).mean(),
    )
