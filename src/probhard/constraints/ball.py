"""The Euclidean ball, ``|u - center|_2 <= radius``."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from probhard.constraints._reals import radius_and_center
from probhard.constraints.base import Constraint, immutable
from probhard.constraints.nonlinear import NonlinearEquality, NonlinearInequality


@immutable
class Ball(NonlinearInequality):
    """``|u - center|_2 <= radius``.

    Args:
        radius: A number or (*batch,), not negative.
        center: (*batch, n); the origin if None.

    Raises:
        InfeasibleError: A radius is negative or NaN.
        ParameterError: The center is not finite.
    """

    radius: Tensor
    center: Tensor | None

    def __init__(self, radius: Any, center: Any = None) -> None:
        size, place = radius_and_center("ball", radius, center)
        self._set(radius=size, center=place, convex=True)
        middle = torch.zeros(1, dtype=torch.float64) if self.center is None else self.center
        self._set(function=NonlinearEquality(_beyond, (self.radius.unsqueeze(-1), middle), _slope))

    @property
    def variables(self) -> int | None:
        return None if self.center is None or self.center.dim() == 0 else self.center.shape[-1]

    @property
    def algorithm(self) -> str:
        return "a search for one multiplier"

    def offset(self, u: Tensor) -> Tensor:
        """``u - center`` for u (*batch, n)."""
        return u if self.center is None else u - self.center.to(u)

    def excess(self, u: Tensor) -> Tensor:
        return (self.offset(u).norm(dim=-1) - self.radius.to(u)).unsqueeze(-1)

    def excess_scale(self, u: Tensor) -> Tensor:
        size = u.norm(dim=-1) + self.radius.to(u)
        return (size if self.center is None else size + self.center.to(u).norm(dim=-1)).unsqueeze(-1)

    def excess_unit(self, u: Tensor) -> float:
        return 1.0  # its excess is a length

    def on_slices(self, slices: int, width: int) -> Constraint:
        return Constraint.on_slices(self, slices, width)  # the norm of a slice is not smooth at its center

    def to(self, *args: Any, **kwargs: Any) -> Self:
        center = None if self.center is None else self.center.to(*args, **kwargs)
        return type(self)(self.radius.to(*args, **kwargs), center)

    def __repr__(self) -> str:
        radius = f"{float(self.radius):g}" if self.radius.numel() == 1 else f"{tuple(self.radius.shape)} values"
        return f"Ball(radius={radius})"


def _beyond(u: Tensor, radius: Tensor, center: Tensor) -> Tensor:
    """``(|u - center|^2 - radius^2) / 2``, smooth everywhere, unlike the norm."""
    return 0.5 * ((u - center).square().sum(-1, keepdim=True) - radius.square())


def _slope(u: Tensor, radius: Tensor, center: Tensor) -> Tensor:
    return (u - center).unsqueeze(-2)
