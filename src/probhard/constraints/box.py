"""Bounds on single variables, ``lower <= u <= upper``."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from probhard._util.tensors import broadcast, checking
from probhard.constraints.base import Constraint, reals
from probhard.errors import InfeasibleError, ParameterError, ShapeError


class Box(Constraint):
    """``lower <= u <= upper``.

    Args:
        lower: None, a number, or (*batch, n); -inf where there is none.
        upper: None, a number, or (*batch, n); inf where there is none.
    """

    def __init__(self, lower: Any = None, upper: Any = None) -> None:
        self.lower, self.upper = _bound(lower, -torch.inf, "lower"), _bound(upper, torch.inf, "upper")
        try:
            shape = broadcast(self.lower.shape, self.upper.shape)
        except RuntimeError as error:
            raise ShapeError(
                f"The lower bounds have shape {tuple(self.lower.shape)}, the upper ones {tuple(self.upper.shape)}.",
                "Both belong to the same variables and must broadcast, from the right.",
                "Give each the shape (*batch, n) or (n,), or one number.",
            ) from error
        self._size = shape[-1] if shape else None
        if checking():
            empty = self.lower > self.upper
            if bool(empty.any()):
                at = tuple(int(i) for i in empty.nonzero()[0])
                low, high = (float(x.expand(empty.shape)[at]) for x in (self.lower, self.upper))
                where = f" for entry {at} of the bounds" if at else ""
                raise InfeasibleError(
                    f"The lower bound {low:.6g} is above the upper bound {high:.6g}{where}.",
                    "The box has no point there.",
                    "Swap the bounds, or relax one of them.",
                )

    @property
    def variables(self) -> int | None:
        return None if self._size == 1 else self._size

    @property
    def algorithm(self) -> str:
        return "clipping"

    def excess(self, u: Tensor) -> Tensor:
        lower, upper = self.lower.to(u), self.upper.to(u)
        return torch.cat(torch.broadcast_tensors(lower - u, u - upper), -1)

    def excess_scale(self, u: Tensor) -> Tensor:
        lower, upper = self.lower.to(u), self.upper.to(u)
        return torch.cat(torch.broadcast_tensors(u.abs() + lower.abs(), u.abs() + upper.abs()), -1)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        twin = object.__new__(type(self))
        moved = {name: getattr(self, name).to(*args, **kwargs) for name in ("lower", "upper")}
        twin.__dict__ = {**self.__dict__, **moved}
        return twin

    def tightened(self, other: Box) -> Box:
        """Both boxes at once."""
        return Box(
            torch.maximum(*_together(self.lower, other.lower)), torch.minimum(*_together(self.upper, other.upper))
        )

    def __repr__(self) -> str:
        return f"Box(lower={_words(self.lower)}, upper={_words(self.upper)})"


class NonNegative(Box):
    """``u >= 0``."""

    def __init__(self) -> None:
        super().__init__(0.0, None)

    def __repr__(self) -> str:
        return "NonNegative()"


def _bound(value: Any, missing: float, name: str) -> Tensor:
    given = missing if value is None else value
    bound = reals(f"The {name} bound", given)
    if checking() and bool(torch.isnan(bound).any()):
        raise ParameterError(
            f"The {name} bound has {int(torch.isnan(bound).sum())} NaN entries.",
            "Nothing can be compared with them.",
            "Use -inf or inf where there is no bound.",
        )
    return bound


def _together(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(first.dtype, second.dtype)
    return first.to(dtype), second.to(first.device, dtype)


def _words(bound: Tensor) -> str:
    return f"{float(bound):g}" if bound.numel() == 1 else f"{tuple(bound.shape)} values"
