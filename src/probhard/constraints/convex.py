"""Convex or concave profiles: slopes that never fall, or never rise.

    (u_(i+1) - u_i) / (x_(i+1) - x_i) - (u_i - u_(i-1)) / (x_i - x_(i-1)) >= 0      at places x.

Each row is scaled by the harmonic mean of its two steps. On equal steps it is ``u_(i-1) - 2 u_i + u_(i+1) >= 0``.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar, Self

import numpy as np
import scipy.sparse as sp
from torch import Tensor

from probhard.constraints._reals import reals
from probhard.constraints.base import Constraint, immutable
from probhard.constraints.box import Box
from probhard.constraints.shapes import (
    SLACK,
    LiftedRows,
    Shape,
    Term,
    check_slices,
    profile_width,
    profiles,
    slices_text,
)
from probhard.errors import ParameterError, ShapeError, check_choice


@immutable
class Convex(Shape):
    """Profiles that curve upwards (convex) or downwards (concave), along a profile or each slice of a field.

    Args:
        direction: ``"up"`` for convex, ``"down"`` for concave profiles.
        grid: Places of the points, (width,), increasing; equal steps if None. It is not differentiated.
        slices: Number of consecutive profiles in the variables; see ``per_slice``.

    Raises:
        ParameterError: The direction is unknown, the grid does not increase, or there are no slices.
        ShapeError: The grid is not a vector.
    """

    only_rows: ClassVar[bool] = True
    direction: str
    slices: int
    width: int | None
    steps: tuple[float, ...] | None  # between the places of the grid

    def __init__(self, direction: str = "up", grid: Any = None, slices: int = 1) -> None:
        check_choice("direction", direction, ("up", "down"))
        steps = None if grid is None else _steps(reals("The grid of a convex profile", grid))
        width = None if steps is None else len(steps) + 1
        self._set(direction=direction, slices=check_slices(self, slices), width=width, steps=steps)

    @property
    def algorithm(self) -> str:
        return "active sets over second differences"

    @property
    def variables(self) -> int | None:
        return None if self.width is None else self.slices * self.width

    @property
    def key(self) -> Hashable:
        return "Convex", self.direction, self.slices, self.steps

    @property
    def sign(self) -> int:
        """1 if convex, -1 if concave."""
        return 1 if self.direction == "up" else -1

    def excess(self, u: Tensor) -> Tensor:
        before, after = self._weights(u)
        slope = profiles(u, self.slices).diff(dim=-1)
        return -self.sign * (after * slope[..., 1:] - before * slope[..., :-1]).flatten(-2)

    def excess_scale(self, u: Tensor) -> Tensor:
        before, after = self._weights(u)
        size = profiles(u, self.slices).abs()
        step = size[..., 1:] + size[..., :-1]
        return (after * step[..., 1:] + before * step[..., :-1]).flatten(-2)

    def lifted(self, n: int) -> LiftedRows:
        """Second differences less slacks, ``+-D u - s = 0``."""
        rows = self._rows(n)
        count = rows.shape[0]
        return LiftedRows(rows, sp.csr_array(-sp.eye_array(count)), np.full(count, SLACK))

    def right_side(self, n: int, like: Tensor) -> Tensor:
        return like.new_zeros(self.slices * max(profile_width(n, self.slices) - 2, 0))

    def term(self, n: int, like: Tensor) -> Term:
        rows = self._rows(n)
        return Term((self.key, n), lambda u: [rows @ u >= 0] if rows.shape[0] else [])

    def resolve(self, n: int) -> Constraint:
        """Profiles of two points have no rows."""
        return self if profile_width(n, self.slices) > 2 else Box()

    def on_slices(self, slices: int, width: int) -> Convex:
        lifted = Convex(self.direction, slices=slices)
        return lifted._copy(width=width, steps=self.steps)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self

    def _weights(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the step before and after each inner point; 1 on equal steps."""
        width = profile_width(u.shape[-1], self.slices)
        before, after = _step_weights(self.steps, width)
        return u.new_tensor(before), u.new_tensor(after)

    def _rows(self, n: int) -> sp.csr_array:
        """The signed second differences of each profile, (slices * (width - 2), n)."""
        width = profile_width(n, self.slices)
        before, after = _step_weights(self.steps, width)
        shape = (max(width - 2, 0), width)
        middle = -before - after
        rows = (
            sp.diags_array([before, middle, after], offsets=[0, 1, 2], shape=shape) if shape[0] else sp.csr_array(shape)
        )
        return sp.csr_array(self.sign * sp.kron(sp.eye_array(self.slices), rows))

    def __repr__(self) -> str:
        grid = "" if self.steps is None else f", grid of {self.width} places"
        return f"Convex({self.direction!r}{grid}{slices_text(self.slices)})"


def _step_weights(steps: tuple[float, ...] | None, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights of the difference before and after each inner point, (width - 2,) each."""
    h = np.ones(max(width - 1, 0)) if steps is None else np.asarray(steps)
    total = h[1:] + h[:-1]
    return 2 * h[1:] / total, 2 * h[:-1] / total


def _steps(grid: Tensor) -> tuple[float, ...]:
    """The steps between places, checked."""
    if grid.dim() != 1:
        raise ShapeError(
            f"The grid of a convex profile has shape {tuple(grid.shape)}.",
            "It holds one place per point of a profile, the same for the whole batch.",
            "Pass a vector (width,).",
        )
    places = grid.detach().cpu().double().numpy()
    steps = np.diff(places)
    if not (np.isfinite(places).all() and (steps > 0).all()):
        raise ParameterError(
            "The grid of a convex profile does not increase.",
            "Slopes are differences over the steps between its places.",
            "Sort the places, remove repeated ones, and check for NaN.",
        )
    return tuple(steps.tolist())
