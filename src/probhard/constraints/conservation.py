"""Conservation of an integral: ``sum_i weights_i u_i = mass``, of one profile; ``per_slice`` lifts it to a field.

With trapezoid weights it is the discrete integral of a conservation law (paper, section "Enforcing Conservation Laws
in PDEs"); the right-hand side comes from the caller. Fields flatten time-major, n = nt * nx. Across a jump the rule is
of first order only: it takes a fall at s for one in the middle of its cell, so that fields with this mass have the sum

    sum_i weights_i u_i = mass + fall * (middle - s).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from probhard._util.tensors import check_finite, checking
from probhard.constraints._time import rows_in_time
from probhard.constraints.base import immutable, reals
from probhard.constraints.equality import LinearEquality, remembered
from probhard.errors import ParameterError, ShapeError
from probhard.rows.system import LinearSystem


def trapezoid_weights(grid: Tensor) -> Tensor:
    """Weights (n,) of the trapezoid rule on increasing grid points (n,)."""
    if grid.dim() != 1 or grid.shape[0] < 2:
        raise ShapeError(
            f"The grid has shape {tuple(grid.shape)}.",
            "The trapezoid rule needs one dimension with at least two points.",
            "For a product grid, multiply the weights of its axes.",
        )
    steps = grid.diff()
    if checking() and not bool((steps > 0).all()):
        raise ParameterError(
            "The grid points do not increase.",
            "The trapezoid rule would subtract parts of the integral.",
            "Sort the grid, and the field with it.",
        )
    half = steps / 2
    return torch.cat([half[:1], half[1:] + half[:-1], half[-1:]])


def jump_excess(grid: Tensor, place: Tensor, fall: Tensor) -> Tensor:
    """By how much the trapezoid sum of a profile that falls at a place exceeds its integral, (*batch,); 0 off the grid.

    Args:
        grid: Increasing points, (n,); a point at the jump has the value before it.
        place: Where the jump is, (*batch,).
        fall: The value before the jump less that behind it, (*batch,).
    """
    if checking():
        check_finite("The place of a jump", place)
        check_finite("The fall of a jump", fall)
    last = torch.searchsorted(grid, place.contiguous(), right=True) - 1  # the last point up to the jump
    cell = last.clamp(0, len(grid) - 2)
    return torch.where(last == cell, fall * ((grid[cell] + grid[cell + 1]) / 2 - place), 0.0)


@immutable
class Conservation(LinearEquality):
    """One row, ``weights . u = mass``.

    Args:
        weights: Quadrature weights, (n,); see ``trapezoid_weights``.
        mass: What the weighted sum must be, (*batch,).
    """

    weights: Tensor

    def __init__(self, weights: Tensor, mass: Any) -> None:
        weights = reals("The weights", weights)
        if weights.dim() != 1:
            raise ShapeError(
                f"The weights have shape {tuple(weights.shape)}.",
                "A conservation row has one weight per variable.",
                "Pass one (n,) vector; use per_slice for the slices of a field.",
            )
        self._set(weights=weights)
        self._prepare(conservation_blocks(weights, 1), reals("The mass", mass).unsqueeze(-1))

    def on_slices(self, slices: int, width: int) -> LinearEquality:
        return LinearEquality(conservation_blocks(self.weights, slices), rows_in_time(self.b, slices))

    @classmethod
    def trapezoid(cls, grid: Tensor, mass: Any, jump: tuple[Any, Any] | None = None) -> Conservation:
        """The integral over a grid by the trapezoid rule; a jump is given by the arguments of ``jump_excess``."""
        weights = trapezoid_weights(grid)
        if jump is not None:
            parts = jump if isinstance(jump, tuple | list) else (jump,)
            given = [torch.as_tensor(part, dtype=weights.dtype) for part in (mass, *parts)]
            shapes = [tuple(part.shape) for part in given]
            try:
                mass, place, fall = torch.broadcast_tensors(*given)
            except (RuntimeError, ValueError) as error:
                raise ShapeError(
                    f"The mass and the parts of its jump have the shapes {', '.join(map(str, shapes))}.",
                    "Every profile has a mass and a jump, which is a place and a fall.",
                    "Pass jump=(place, fall), numbers or tensors with the shape of the mass.",
                ) from error
            mass = mass + jump_excess(grid, place, fall)
        return cls(weights, mass)


def conservation_blocks(weights: Tensor, row_count: int) -> LinearSystem:
    """One conservation row per block of variables, made ready once for each tensor of weights."""

    def build() -> LinearSystem:
        if checking():
            check_finite("The conservation weights", weights)
            if not bool((weights != 0).any()):
                raise ParameterError(
                    "All conservation weights are zero.", "The row says nothing.", "Check the grid spacing."
                )
        # a copy: what is remembered must not keep the caller's tensor alive
        return LinearSystem.blocks(weights if weights.requires_grad else weights.clone(), row_count)

    return build() if weights.requires_grad else remembered(weights, row_count, build)
