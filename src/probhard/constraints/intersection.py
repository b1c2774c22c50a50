"""Constraints joined by ``&``. Linear equalities are stacked into one system; other parts stay separate."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from probhard.constraints.base import Constraint, immutable, joined, same_variables
from probhard.errors import ParameterError

ORDER = ("linear", "nonlinear", "box")  # roles with at most one part; they come first, in this order


@immutable
class Intersection(Constraint):
    """Several constraints at once, built by ``&``. Linear equalities are substituted, not iterated on.

    Args:
        parts: The constraints, on the same variables. Use ``&``, which merges and orders them.

    Raises:
        ShapeError: By ``&``, if the constraints have different numbers of variables.
    """

    _parts: tuple[Constraint, ...]

    def __init__(self, *parts: Constraint) -> None:
        self._set(_parts=parts)

    def parts(self) -> tuple[Constraint, ...]:
        return self._parts

    @property
    def variables(self) -> int | None:
        return next((part.variables for part in self._parts if part.variables is not None), None)

    @property
    def algorithm(self) -> str:
        return "; ".join(part.algorithm for part in self._parts)

    def data(self) -> tuple[Tensor, ...]:
        return tuple(x for part in self._parts for x in part.data())

    def residual(self, u: Tensor) -> Tensor:
        return joined([part.residual(u) for part in self._parts], u)

    def scale(self, u: Tensor) -> Tensor:
        return joined([part.scale(u) for part in self._parts], u)

    def excess(self, u: Tensor) -> Tensor:
        return joined([part.excess(u) for part in self._parts], u)

    def excess_scale(self, u: Tensor) -> Tensor:
        return joined([part.excess_scale(u) for part in self._parts], u)

    def linear_part(self) -> Constraint:
        linear = next((part for part in self._parts if part.role == "linear"), None)
        return super().linear_part() if linear is None else linear

    def resolve(self, n: int) -> Constraint:
        resolved = [part.resolve(n) for part in self._parts]
        if all(a is b for a, b in zip(resolved, self._parts)):
            return self
        return _joined(resolved)

    def on_slices(self, slices: int, width: int) -> Constraint:
        return _joined([part.on_slices(slices, width) for part in self._parts])

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return type(self)(*(part.to(*args, **kwargs) for part in self._parts))

    def __repr__(self) -> str:
        return " & ".join(map(repr, self._parts))


def join(first: object, second: object) -> Any:
    """Intersect two constraints: rows are stacked, functions concatenated, boxes tightened.

    Args:
        first: A constraint.
        second: A constraint on the same variables.

    Returns:
        A merged constraint or an ``Intersection``; NotImplemented if an argument is not a constraint.

    Raises:
        ParameterError: An argument is None, a list or a class.
        ShapeError: The numbers of variables differ.
    """
    for value in (first, second):
        if value is None or isinstance(value, list | tuple | type):
            check_constraint(value, "'&'")
    if not (isinstance(first, Constraint) and isinstance(second, Constraint)):
        return NotImplemented
    same_variables(first, second)
    merged: list[Constraint] = []
    for part in (*first.parts(), *second.parts()):
        for place, other in enumerate(merged):
            both = other.merged(part)
            if both is not None:
                merged[place] = both
                break
        else:
            merged.append(part)
    if len(merged) == 1:
        return merged[0]
    return Intersection(*sorted(merged, key=lambda part: ORDER.index(part.role) if part.role in ORDER else len(ORDER)))


def check_constraint(value: object, user: str) -> None:
    """Check that a value is a constraint.

    Args:
        value: What was passed.
        user: Who got it, for errors.

    Raises:
        ParameterError: It is something else, such as None or a list of constraints.
    """
    if isinstance(value, Constraint):
        return
    if isinstance(value, list | tuple | set | dict):
        what, fix = f"a {type(value).__name__} of {len(value)}", "Join several constraints with '&', as in a & b."
    elif isinstance(value, type) and issubclass(value, Constraint):
        what, fix = f"the class {value.__name__}", f"Build a constraint from it: {value.__name__}(...)."
    else:
        what = "None" if value is None else f"a {type(value).__name__}"
        fix = "Pass a LinearEquality, a Hierarchy, a Box, a NonlinearEquality, or several joined by '&'."
    raise ParameterError(f"{user} got {what} as its constraint.", "It takes one constraint of probhard.", fix)


def _joined(parts: list[Constraint]) -> Constraint:
    first, *others = parts
    for other in others:
        first = first & other
    return first
