"""Conservation of an integral along a profile, ``sum_i weights_i u_i = mass``; ``per_slice`` lifts it to a field.

With trapezoid weights it is the discrete integral of a conservation law (paper, section "Enforcing Conservation Laws
in PDEs"). The caller supplies the mass. Across a jump the trapezoid rule is only first-order accurate: it puts a fall
at s in the middle of its cell. A profile with this mass then has the sum

    sum_i weights_i u_i = mass + fall * (middle - s).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from probhard._util.tensors import check_finite, checking
from probhard.constraints._reals import reals
from probhard.constraints._time import rows_in_time
from probhard.constraints.base import immutable
from probhard.constraints.equality import LinearEquality, remembered
from probhard.errors import ParameterError, ShapeError
from probhard.rows.system import LinearSystem


def trapezoid_weights(grid: Tensor) -> Tensor:
    """Weights (n,) of the trapezoid rule on increasing grid points (n,).

    Raises:
        ShapeError: The grid is not one-dimensional or has fewer than two points.
        ParameterError: The grid points do not increase.
    """
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
    """Trapezoid sum minus integral of a profile with a jump.

    Args:
        grid: Increasing points, (n,); a point at the jump has the value before it.
        place: Position of the jump, (*batch,).
        fall: Value before the jump minus value after it, (*batch,).

    Returns:
        The excess of the sum, (*batch,); 0 for jumps outside the grid.

    Raises:
        ParameterError: A place or fall is not finite.
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
        mass: Required value of the weighted sum, (*batch,).

    Raises:
        ShapeError: The weights are not one vector.
        ParameterError: The weights are all zero, or a number is not finite.
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
        """Conserve the integral over a grid, by the trapezoid rule.

        Args:
            grid: Increasing points, (n,).
            mass: The integral, (*batch,).
            jump: ``(place, fall)`` of a jump, as in ``jump_excess``; None for smooth profiles.

        Raises:
            ShapeError: The grid, or the shapes of mass and jump, do not fit.
            ParameterError: The grid does not increase, or a number is not finite.
        """
        weights = trapezoid_weights(grid)
        if jump is not None:
            parts = jump if isinstance(jump, tuple | list) else (jump,)
            numbers = [torch.as_tensor(part, dtype=weights.dtype) for part in (mass, *parts)]
            shapes = [tuple(number.shape) for number in numbers]
            try:
                mass, place, fall = torch.broadcast_tensors(*numbers)
            except (RuntimeError, ValueError) as error:
                raise ShapeError(
                    f"The mass and the parts of its jump have the shapes {', '.join(map(str, shapes))}.",
                    "Every profile has a mass and a jump, which is a place and a fall.",
                    "Pass jump=(place, fall), numbers or tensors with the shape of the mass.",
                ) from error
            mass = mass + jump_excess(grid, place, fall)
        return cls(weights, mass)


def conservation_blocks(weights: Tensor, row_count: int) -> LinearSystem:
    """One conservation row per block of variables, cached for each tensor of weights.

    Args:
        weights: Quadrature weights of a block, (n,).
        row_count: Number of blocks.

    Raises:
        ParameterError: The weights are all zero or not finite.
    """

    def build() -> LinearSystem:
        if checking():
            check_finite("The conservation weights", weights)
            if not bool((weights != 0).any()):
                raise ParameterError(
                    "All conservation weights are zero.", "The row constrains nothing.", "Check the grid spacing."
                )
        # a copy: the cache must not keep the caller's tensor alive
        return LinearSystem.blocks(weights if weights.requires_grad else weights.clone(), row_count)

    return build() if weights.requires_grad else remembered(weights, row_count, build)
