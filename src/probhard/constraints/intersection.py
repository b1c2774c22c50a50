"""Constraints joined by ``&``: the linear equalities as one system of rows, everything else beside it."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from probhard.constraints.base import Constraint, same_variables
from probhard.constraints.box import Box
from probhard.constraints.equality import LinearEquality
from probhard.constraints.nonlinear import NonlinearEquality


class Intersection(Constraint):
    """Several constraints at once; made by ``&``.

    The linear equalities are projected on first and never left again: they are substituted, not iterated on.
    """

    def __init__(
        self,
        linear: LinearEquality | None = None,
        nonlinear: NonlinearEquality | None = None,
        sets: tuple[Constraint, ...] = (),
    ) -> None:
        self.linear, self.nonlinear, self.sets = linear, nonlinear, sets

    def parts(self) -> tuple[Constraint, ...]:
        """The constraints that are joined."""
        return tuple(part for part in (self.linear, self.nonlinear) if part is not None) + self.sets

    @property
    def variables(self) -> int | None:
        return next((part.variables for part in self.parts() if part.variables is not None), None)

    @property
    def algorithm(self) -> str:
        return "; ".join(part.algorithm for part in self.parts())

    def residual(self, u: Tensor) -> Tensor:
        return _joined([part.residual(u) for part in self.parts()], u)

    def scale(self, u: Tensor) -> Tensor:
        return _joined([part.scale(u) for part in self.parts()], u)

    def excess(self, u: Tensor) -> Tensor:
        return _joined([part.excess(u) for part in self.parts()], u)

    def excess_scale(self, u: Tensor) -> Tensor:
        return _joined([part.excess_scale(u) for part in self.parts()], u)

    def linear_part(self) -> Constraint:
        return super().linear_part() if self.linear is None else self.linear

    def resolve(self, n: int) -> Constraint:
        resolved = [part.resolve(n) for part in self.parts()]
        if all(a is b for a, b in zip(resolved, self.parts())):
            return self
        found = resolved[0]
        for part in resolved[1:]:
            found = found & part
        return found

    def to(self, *args: Any, **kwargs: Any) -> Self:
        def moved(part: Any) -> Any:
            return None if part is None else part.to(*args, **kwargs)

        return type(self)(moved(self.linear), moved(self.nonlinear), tuple(map(moved, self.sets)))

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.parts()))


def join(first: object, second: object) -> Any:
    """The intersection of two constraints: rows are stacked, functions concatenated, boxes tightened."""
    if not (isinstance(first, Constraint) and isinstance(second, Constraint)):
        return NotImplemented
    same_variables(first, second)
    parts = [*_parts(first), *_parts(second)]
    linear = nonlinear = box = None
    sets: list[Constraint] = []
    for part in parts:
        if isinstance(part, LinearEquality):
            linear = part if linear is None else linear.stacked(part)
        elif isinstance(part, NonlinearEquality):
            nonlinear = part if nonlinear is None else _both(nonlinear, part)
        elif isinstance(part, Box):
            box = part if box is None else box.tightened(part)
        else:
            sets.append(part)
    if box is not None:
        sets.insert(0, box)
    if len(sets) + (linear is not None) + (nonlinear is not None) == 1:
        return linear or nonlinear or sets[0]
    return Intersection(linear, nonlinear, tuple(sets))


def _parts(constraint: Constraint) -> tuple[Constraint, ...]:
    return constraint.parts() if isinstance(constraint, Intersection) else (constraint,)


def _both(first: NonlinearEquality, second: NonlinearEquality) -> NonlinearEquality:
    split = len(first.args)

    def fn(u: Tensor, *args: Any) -> Tensor:
        return _joined([first.fn(u, *args[:split]), second.fn(u, *args[split:])], u)

    jacobian = None
    if first.given_jacobian is not None and second.given_jacobian is not None:

        def jacobian(u: Tensor, *args: Any) -> Tensor:
            found = first.with_args(args[:split]).jacobian(u), second.with_args(args[split:]).jacobian(u)
            return torch.cat(found, -2)

    return NonlinearEquality(fn, (*first.args, *second.args), jacobian)


def _joined(parts: list[Tensor], u: Tensor) -> Tensor:
    parts = [part for part in parts if part.shape[-1]]
    if not parts:
        return u[..., :0]
    shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, -1) for part in parts], -1)
