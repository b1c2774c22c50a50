"""Constraints joined by ``&``: the linear equalities as one system of rows, the nonlinear ones beside it."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from probhard.constraints.base import Constraint
from probhard.constraints.linear import LinearEquality
from probhard.constraints.nonlinear import NonlinearEquality


class Intersection(Constraint):
    """Linear and nonlinear equalities at once; made by ``&``.

    The linear part is projected on first and never left again: it is substituted, not iterated on.
    """

    def __init__(self, linear: LinearEquality, nonlinear: NonlinearEquality) -> None:
        self.linear, self.nonlinear = linear, nonlinear

    @property
    def variables(self) -> int:
        return self.linear.variables

    @property
    def algorithm(self) -> str:
        return f"{self.linear.algorithm}; {self.nonlinear.algorithm}"

    def residual(self, u: Tensor) -> Tensor:
        return _joined(self.linear.residual(u), self.nonlinear.residual(u))

    def scale(self, u: Tensor) -> Tensor:
        return _joined(self.linear.scale(u), self.nonlinear.scale(u))

    def linear_part(self) -> Constraint:
        return self.linear

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return type(self)(self.linear.to(*args, **kwargs), self.nonlinear.to(*args, **kwargs))

    def __and__(self, other: object) -> Constraint:
        return join(self, other)

    def __rand__(self, other: object) -> Constraint:
        return join(other, self)

    def __repr__(self) -> str:
        return f"{self.linear!r} & {self.nonlinear!r}"


def join(first: object, second: object) -> Any:
    """The intersection of two constraints; linear rows are stacked, residual functions concatenated."""
    if not (isinstance(first, Constraint) and isinstance(second, Constraint)):
        return NotImplemented
    linear = [part for part in (_linear(first), _linear(second)) if part is not None]
    nonlinear = [part for part in (_nonlinear(first), _nonlinear(second)) if part is not None]
    rows = linear[0] & linear[1] if len(linear) == 2 else linear[0] if linear else None
    curved = _both(*nonlinear) if len(nonlinear) == 2 else nonlinear[0] if nonlinear else None
    if rows is None or curved is None:
        return rows if curved is None else curved
    return Intersection(rows, curved)


def _linear(constraint: Constraint) -> LinearEquality | None:
    if isinstance(constraint, Intersection):
        return constraint.linear
    return constraint if isinstance(constraint, LinearEquality) else None


def _nonlinear(constraint: Constraint) -> NonlinearEquality | None:
    if isinstance(constraint, Intersection):
        return constraint.nonlinear
    return constraint if isinstance(constraint, NonlinearEquality) else None


def _both(first: NonlinearEquality, second: NonlinearEquality) -> NonlinearEquality:
    split = len(first.args)

    def fn(u: Tensor, *args: Any) -> Tensor:
        return _joined(first.fn(u, *args[:split]), second.fn(u, *args[split:]))

    jacobian = None
    if first.given_jacobian is not None and second.given_jacobian is not None:
        rows = first.given_jacobian, second.given_jacobian

        def jacobian(u: Tensor, *args: Any) -> Tensor:
            return torch.cat([rows[0](u, *args[:split]), rows[1](u, *args[split:])], -2)

    return NonlinearEquality(fn, (*first.args, *second.args), jacobian)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(first.shape[:-1], second.shape[:-1])
    return torch.cat([first.expand(*shape, -1), second.expand(*shape, -1)], -1)
