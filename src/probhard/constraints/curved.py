"""Curved inequalities, ``g(u) <= 0``: the ball, and any smooth function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.constraints.base import Constraint, reals
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.errors import InfeasibleError, ParameterError


class NonlinearInequality(Constraint):
    """``fn(u, *args) <= 0`` for a smooth function.

    Args:
        fn: Maps u (*batch, n) and this batch's data to (*batch, p). Elements of the batch must not mix.
        args: This batch's data, as in ``NonlinearEquality``.
        convex: Whether each component is convex in u. If not, the nearest point found is a local one, and
            ``Stats.local`` says so.
        jacobian: Maps the same arguments to (*batch, p, n); by torch.func if not given.
    """

    def __init__(
        self,
        fn: Callable[..., Tensor],
        args: tuple[Any, ...] = (),
        convex: bool = True,
        jacobian: Callable[..., Tensor] | None = None,
    ) -> None:
        self.function = NonlinearEquality(fn, args, jacobian)
        self.convex = convex

    @property
    def variables(self) -> int | None:
        """Any number that the function takes."""
        return None

    @property
    def algorithm(self) -> str:
        return "active sets over safeguarded SQP" + ("" if self.convex else ", local")

    def excess(self, u: Tensor) -> Tensor:
        return self.function.residual(u)

    def excess_scale(self, u: Tensor) -> Tensor:
        return self.function.scale(u)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__ = {**self.__dict__, "function": self.function.to(*args, **kwargs)}
        return twin

    def __repr__(self) -> str:
        return f"NonlinearInequality({self.function!r}, convex={self.convex})"


class Ball(NonlinearInequality):
    """``|u - center|_2 <= radius``.

    Args:
        radius: A number or (*batch,), not negative.
        center: The origin unless given, (*batch, n).
    """

    def __init__(self, radius: Any, center: Any = None) -> None:
        self.radius = reals("The radius of the ball", radius)
        self.center = None if center is None else reals("The center of the ball", center)
        self.convex = True
        if checking():
            if not bool((self.radius >= 0).all()):
                raise InfeasibleError(
                    f"The radius of the ball is {float(self.radius.min()):.6g} at its smallest.",
                    "A ball of negative or undefined radius has no point.",
                    "Give a radius of at least 0.",
                )
            if self.center is not None and not bool(torch.isfinite(self.center).all()):
                raise ParameterError(
                    "The center of the ball has NaN or infinite entries.", "No point is near it.", "Check the center."
                )
        middle = torch.zeros(1, dtype=torch.float64) if self.center is None else self.center
        self.function = NonlinearEquality(_beyond, (self.radius.unsqueeze(-1), middle), _slope)

    @property
    def variables(self) -> int | None:
        return None if self.center is None or self.center.dim() == 0 else self.center.shape[-1]

    @property
    def algorithm(self) -> str:
        return "a search for one multiplier"

    def offset(self, u: Tensor) -> Tensor:
        """``u - center``."""
        return u if self.center is None else u - self.center.to(u)

    def excess(self, u: Tensor) -> Tensor:
        return (self.offset(u).norm(dim=-1) - self.radius.to(u)).unsqueeze(-1)

    def excess_scale(self, u: Tensor) -> Tensor:
        size = u.norm(dim=-1) + self.radius.to(u)
        return (size if self.center is None else size + self.center.to(u).norm(dim=-1)).unsqueeze(-1)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        center = None if self.center is None else self.center.to(*args, **kwargs)
        return type(self)(self.radius.to(*args, **kwargs), center)

    def __repr__(self) -> str:
        radius = f"{float(self.radius):g}" if self.radius.numel() == 1 else f"{tuple(self.radius.shape)} values"
        return f"Ball(radius={radius})"


def _beyond(u: Tensor, radius: Tensor, center: Tensor) -> Tensor:
    """Half the squared distance beyond the radius: smooth, where the norm is not."""
    return 0.5 * ((u - center).square().sum(-1, keepdim=True) - radius.square())


def _slope(u: Tensor, radius: Tensor, center: Tensor) -> Tensor:
    return (u - center).unsqueeze(-2)
