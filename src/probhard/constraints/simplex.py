"""The simplex, ``u >= 0`` and ``sum(u) = total``, resolved to a conservation row and bounds."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from probhard._util.tensors import check_finite, checking
from probhard.constraints._reals import reals
from probhard.constraints._time import numbers_in_time
from probhard.constraints.base import Constraint, immutable
from probhard.constraints.box import NonNegative
from probhard.constraints.conservation import Conservation
from probhard.constraints.shapes import check_slices, profile_width, profiles, slices_text
from probhard.errors import InfeasibleError, ParameterError


@immutable
class Simplex(Constraint):
    """``u >= 0`` and ``sum(u) = total``, along a profile or along each slice of a field.

    Args:
        total: A number or (*batch,), not negative; with slices (*batch, slices).
        slices: Number of consecutive profiles in the variables.

    Raises:
        InfeasibleError: A total is negative.
        ParameterError: A total is not finite, or there are no slices.
    """

    total: Tensor
    slices: int
    width: int | None

    def __init__(self, total: Any = 1.0, slices: int = 1) -> None:
        total = reals("The total of the simplex", total)
        self._set(total=total, slices=check_slices(self, slices), width=None)
        if checking():
            check_finite("The total of the simplex", self.total)
            if bool((self.total < 0).any()):
                at = tuple(int(i) for i in (self.total < 0).nonzero()[0])
                where = f" in batch element {at}" if at else ""
                raise InfeasibleError(
                    f"The total of the simplex is {float(self.total.min()):.6g}{where}.",
                    "Non-negative numbers cannot add up to a negative one.",
                    "Give a total of at least 0.",
                )

    @property
    def variables(self) -> int | None:
        return None if self.width is None else self.slices * self.width

    @property
    def algorithm(self) -> str:
        return "a search for one multiplier per slice"

    def data(self) -> tuple[Tensor, ...]:
        return (self._totals(self.total),)

    def on_slices(self, slices: int, width: int) -> Simplex:
        return Simplex(numbers_in_time(self.total, slices), slices)._copy(width=width)

    def resolve(self, n: int) -> Constraint:
        width = profile_width(n, self.slices)
        row = Conservation(_ones(width), self.total)
        return (row if self.slices == 1 else row.on_slices(self.slices, width)) & NonNegative()

    def residual(self, u: Tensor) -> Tensor:
        return profiles(u, self.slices).sum(-1) - self._totals(u)

    def scale(self, u: Tensor) -> Tensor:
        return profiles(u, self.slices).abs().sum(-1) + self._totals(u).abs()

    def excess(self, u: Tensor) -> Tensor:
        return -u

    def excess_scale(self, u: Tensor) -> Tensor:
        return u.abs()

    def linear_part(self) -> Constraint:
        raise ParameterError(
            "A Simplex has no fixed number of variables.",
            "ProbConserv projects on its linear equality alone.",
            "Write Conservation(torch.ones(n), total) & NonNegative().",
        )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._copy(total=self.total.to(*args, **kwargs))

    def _totals(self, u: Tensor) -> Tensor:
        return self.total.to(u).unsqueeze(-1) if self.slices == 1 else self.total.to(u)

    def __repr__(self) -> str:
        total = f"{float(self.total):g}" if self.total.numel() == 1 else f"{tuple(self.total.shape)} values"
        return f"Simplex(total={total}{slices_text(self.slices)})"


_ONES: dict[int, Tensor] = {}


def _ones(width: int) -> Tensor:
    """One tensor per width, so that the system built from it is cached."""
    if width not in _ONES:
        _ONES[width] = torch.ones(width, dtype=torch.float64)
    return _ONES[width]
