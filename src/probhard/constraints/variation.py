"""Total variation along a profile, ``TV(u) = sum |u_(i+1) - u_i|``: bounded, penalised, or diminishing in time.

The paper's TVD is the penalty, ``1/2 |u - z|_Q^2 + weight TV(u)``: a proximal map instead of a projection. The hard
forms are a bound on the variation (convex) and true TVD, projected slice after slice: the first is left as it is, each
next one's bound is the variation of the projected one before it.
"""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from probhard._util.tensors import checking
from probhard.constraints.base import Constraint, reals
from probhard.constraints.inequality import Profiles, profiles
from probhard.errors import ParameterError, ShapeError


class _Variation(Profiles):
    """An amount for each profile."""

    amount: Tensor
    name = "bound"

    def __init__(self, amount: Any, slices: int) -> None:
        self.amount = reals(f"The {self.name} of the total variation", amount)
        self._set_slices(slices)
        if checking() and not bool((self.amount >= 0).all()):
            raise ParameterError(
                f"The {self.name} of the total variation is {float(self.amount.min()):.6g} at its smallest.",
                "It must be a number of at least 0.",
                "A variation of 0 means constant profiles.",
            )

    @property
    def algorithm(self) -> str:
        return "weighted taut string"

    def amounts(self, like: Tensor) -> Tensor:
        """One amount per slice, broadcasting with (*batch, slices)."""
        amount = self.amount.to(like)
        return amount.unsqueeze(-1) if self.slices == 1 else amount

    def to(self, *args: Any, **kwargs: Any) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__ = {**self.__dict__, "amount": self.amount.to(*args, **kwargs)}
        return twin

    def __repr__(self) -> str:
        amount = f"{float(self.amount):g}" if self.amount.numel() == 1 else f"{tuple(self.amount.shape)} values"
        slices = "" if self.slices == 1 else f", slices={self.slices}"
        return f"{type(self).__name__}({self.name}={amount}{slices})"


class TotalVariation(_Variation):
    """``TV(u) <= bound``.

    Args:
        bound: A number or (*batch,); with slices (*batch, slices).
        slices: Number of consecutive profiles that the variables hold; see ``per_slice``.
    """

    def __init__(self, bound: Any, slices: int = 1) -> None:
        super().__init__(bound, slices)

    def excess(self, u: Tensor) -> Tensor:
        return variation(u, self.slices) - self.amounts(u)

    def excess_scale(self, u: Tensor) -> Tensor:
        return profiles(u, self.slices).abs().sum(-1) + self.amounts(u)


class TotalVariationPenalty(_Variation):
    """``weight * TV(u)`` added to the squared distance; every point is feasible, so its violation is 0.

    Args:
        weight: A number or (*batch,); with slices (*batch, slices).
        slices: Number of consecutive profiles that the variables hold; see ``per_slice``.
    """

    name = "weight"

    def __init__(self, weight: Any, slices: int = 1) -> None:
        super().__init__(weight, slices)


class TotalVariationDiminishing(Constraint):
    """``TV(u_t) <= TV(u_(t-1))`` for the slices of a field, flattened time-major; not convex, projected in time order.

    Args:
        shape: (nt, nx).
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = (int(shape[0]), int(shape[1]))
        if min(self.shape) < 1:
            raise ShapeError(
                f"The field has shape {self.shape}.", "It needs slices and points.", "Pass shape=(nt, nx), time first."
            )

    @property
    def variables(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def algorithm(self) -> str:
        return "weighted taut string, slice after slice"

    def excess(self, u: Tensor) -> Tensor:
        self.check_event(u, "The point")
        return variation(u, self.shape[0]).diff(dim=-1)

    def excess_scale(self, u: Tensor) -> Tensor:
        size = profiles(u, self.shape[0]).abs().sum(-1)
        return size[..., 1:] + size[..., :-1]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self

    def __repr__(self) -> str:
        return f"TotalVariationDiminishing(shape={self.shape})"


def variation(u: Tensor, slices: int = 1) -> Tensor:
    """Total variation of each slice, (*batch, slices)."""
    return profiles(u, slices).diff(dim=-1).abs().sum(-1)
