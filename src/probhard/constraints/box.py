"""Bounds on single variables, ``lower <= u <= upper``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from probhard._util.tensors import broadcast, checking
from probhard.constraints._reals import reals
from probhard.constraints._time import spread_in_time
from probhard.constraints.base import Arrays, Constraint, immutable
from probhard.errors import InfeasibleError, ParameterError, ShapeError


@immutable
class Box(Constraint):
    """``lower <= u <= upper``.

    Args:
        lower: None, a number, or (*batch, n); -inf for no bound.
        upper: None, a number, or (*batch, n); inf for no bound.

    Raises:
        InfeasibleError: A lower bound is above its upper bound, or infinite on the wrong side.
        ParameterError: A bound is NaN or not a number.
        ShapeError: The bounds do not broadcast.
    """

    role: ClassVar[str] = "box"
    stored_as: ClassVar[str | None] = "box"
    lower: Tensor
    upper: Tensor
    _size: int | None

    def __init__(self, lower: Any = None, upper: Any = None) -> None:
        self._set(lower=_bound(lower, -torch.inf, "lower"), upper=_bound(upper, torch.inf, "upper"))
        try:
            shape = broadcast(self.lower.shape, self.upper.shape)
        except RuntimeError as error:
            raise ShapeError(
                f"The lower bounds have shape {tuple(self.lower.shape)}, the upper ones {tuple(self.upper.shape)}.",
                "Both bound the same variables, so their shapes must broadcast.",
                "Give each the shape (*batch, n) or (n,), or one number.",
            ) from error
        self._set(_size=shape[-1] if shape else None)
        if checking():
            empty = self.lower > self.upper
            if bool(empty.any()):
                at = tuple(int(i) for i in empty.nonzero()[0])
                low, high = (float(x.expand(empty.shape)[at]) for x in (self.lower, self.upper))
                where = f" for entry {at} of the bounds" if at else ""
                raise InfeasibleError(
                    f"The lower bound {low:.6g} is above the upper bound {high:.6g}{where}.",
                    "The box is empty.",
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

    def data(self) -> tuple[Tensor, ...]:
        return self.lower, self.upper

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._copy(lower=self.lower.to(*args, **kwargs), upper=self.upper.to(*args, **kwargs))

    def merged(self, other: Constraint) -> Constraint | None:
        """The intersection of two boxes: the tighter bounds."""
        if not isinstance(other, Box):
            return None
        lower = torch.maximum(*_together(self.lower, other.lower))
        return Box(lower, torch.minimum(*_together(self.upper, other.upper)))

    def on_slices(self, slices: int, width: int) -> Box:
        return Box(*(spread_in_time(bound, slices, width) for bound in (self.lower, self.upper)))

    def stored(self) -> tuple[dict[str, Any], Arrays]:
        return {}, {"lower": self.lower.numpy(force=True), "upper": self.upper.numpy(force=True)}

    @classmethod
    def restored(cls, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Box:
        return Box(*(torch.from_numpy(arrays[name]) for name in ("lower", "upper")))

    def __repr__(self) -> str:
        return f"Box(lower={_words(self.lower)}, upper={_words(self.upper)})"


@immutable
class NonNegative(Box):
    """``u >= 0``."""

    def __init__(self) -> None:
        super().__init__(0.0, None)

    def __repr__(self) -> str:
        return "NonNegative()"


def _bound(value: Any, missing: float, name: str) -> Tensor:
    bound = reals(f"The {name} bound", missing if value is None else value)
    if checking() and bool(torch.isnan(bound).any()):
        raise ParameterError(
            f"The {name} bound has {int(torch.isnan(bound).sum())} NaN entries.",
            "No value can be compared with NaN.",
            "Use -inf or inf where there is no bound.",
        )
    if checking() and bool((bound == -missing).any()):
        raise InfeasibleError(
            f"The {name} bound is {-missing:g}.",
            "No number satisfies it.",
            f"Use {missing:g} where there is no {name} bound.",
        )
    return bound


def _together(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(first.dtype, second.dtype)
    return first.to(dtype), second.to(first.device, dtype)


def _words(bound: Tensor) -> str:
    return f"{float(bound):g}" if bound.numel() == 1 else f"{tuple(bound.shape)} values"
