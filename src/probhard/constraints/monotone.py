"""Monotone profiles, ``u_i <= u_(i+1)`` or ``u_i >= u_(i+1)``."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
import scipy.sparse as sp
from torch import Tensor

from probhard.constraints.base import Constraint, immutable
from probhard.constraints.box import Box
from probhard.constraints.shapes import (
    SLACK,
    LiftedRows,
    Profiles,
    Term,
    check_slices,
    differences,
    profile_width,
    profiles,
    slices_text,
)
from probhard.errors import check_choice


@immutable
class Monotone(Profiles):
    """``u_i <= u_(i+1)`` (increasing) or ``u_i >= u_(i+1)`` (decreasing), along a profile or each slice of a field.

    Args:
        direction: ``"increasing"`` or ``"decreasing"``.
        slices: Number of consecutive profiles in the variables; see ``per_slice``.

    Raises:
        ParameterError: The direction is unknown, or there are no slices.
    """

    only_rows: ClassVar[bool] = True
    direction: str

    def __init__(self, direction: str = "increasing", slices: int = 1) -> None:
        check_choice("direction", direction, ("increasing", "decreasing"))
        self._set(direction=direction, slices=check_slices(self, slices), width=None)

    @property
    def algorithm(self) -> str:
        return "pool adjacent violators"

    @property
    def pooled_as(self) -> str:
        return self.direction

    @property
    def sign(self) -> int:
        """1 if increasing, -1 if decreasing."""
        return 1 if self.direction == "increasing" else -1

    def excess(self, u: Tensor) -> Tensor:
        return (-self.sign * profiles(u, self.slices).diff(dim=-1)).flatten(-2)

    def excess_scale(self, u: Tensor) -> Tensor:
        size = profiles(u, self.slices).abs()
        return (size[..., 1:] + size[..., :-1]).flatten(-2)

    def lifted(self, n: int) -> LiftedRows:
        """``+-(u_(i+1) - u_i) - s_i = 0``."""
        rows = self.sign * differences(n, self.slices)
        count = rows.shape[0]
        return LiftedRows(sp.csr_array(rows), sp.csr_array(-sp.eye_array(count)), np.full(count, SLACK))

    def right_side(self, n: int, like: Tensor) -> Tensor:
        return like.new_zeros(n - self.slices)

    def term(self, n: int, like: Tensor) -> Term:
        steps = self.sign * differences(n, self.slices)
        return Term(self.key, lambda u: [steps @ u >= 0])

    def resolve(self, n: int) -> Constraint:
        """Profiles of one point have no rows."""
        return self if profile_width(n, self.slices) > 1 else Box()

    def on_slices(self, slices: int, width: int) -> Monotone:
        return Monotone(self.direction, slices).of_width(width)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self

    def __repr__(self) -> str:
        return f"Monotone({self.direction!r}{slices_text(self.slices)})"
