"""What every constraint offers: one residual and one excess, used to project, penalise, score and test.

A new constraint is one file. It subclasses ``Constraint`` (or ``Shape``, if rows with auxiliary variables describe it)
and overrides what it can do; every other room asks these methods and knows no class by name.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from probhard._util.tensors import relative
from probhard.errors import ParameterError, ShapeError


def reals(name: str, given: Any) -> Tensor:
    """The data of a constraint as a real tensor; what is no tensor yet, and whole numbers, in float64."""
    if not isinstance(given, Tensor):
        array = np.asarray(given) if hasattr(given, "__array__") else given  # frames, too
        check_real(name, array)  # a cast would drop the imaginary part
        try:
            given = torch.as_tensor(array, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ParameterError(
                f"{name}: got {given!r:.60}.",
                "Constraints are made of real numbers.",
                "Pass a number, an array or a tensor.",
            ) from error
    check_real(name, given)
    return given if given.is_floating_point() else given.to(torch.float64)


def check_real(name: str, given: Any) -> None:
    """Raise if a tensor, an array or a sparse matrix is complex."""
    dtype = getattr(given, "dtype", None)
    if "complex" in str(dtype):
        raise ParameterError(
            f"{name}: got the dtype {dtype}.",
            "Constraints are made of real numbers.",
            "Treat real and imaginary parts as variables of their own.",
        )


Arrays = dict[str, np.ndarray]
STORED: dict[str, type[Constraint]] = {}  # constraints that can be saved as plain values, by ``stored_as``

immutable = dataclass(frozen=True, eq=False, repr=False, init=False)


@immutable
class Constraint(ABC):
    """A set of feasible points in n variables, the last dimension; batch dimensions broadcast.

    Attributes:
        role: The field of ``projection.parts.Parts`` that it belongs to: how projectors see it.
        stored_as: Its name in saved files; None if it cannot be saved as plain values.
    """

    role: ClassVar[str] = ""
    stored_as: ClassVar[str | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "stored_as" in vars(cls) and cls.stored_as is not None:
            STORED[cls.stored_as] = cls

    @property
    @abstractmethod
    def variables(self) -> int | None:
        """Number of variables n, where it is known."""

    @property
    @abstractmethod
    def algorithm(self) -> str:
        """The solver's name; for combined constraints, one per part."""

    @abstractmethod
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The constraint with its data on another device or in another dtype."""

    def data(self) -> tuple[Tensor, ...]:
        """This batch's data, each with batch dimensions before its last one."""
        return ()

    def merged(self, other: Constraint) -> Constraint | None:
        """One constraint that says what both say; None if they stay side by side under ``&``."""
        return None

    def on_slices(self, slices: int, width: int) -> Constraint:
        """The constraint on every slice of a field (slices, width); see ``per_slice``."""
        raise ParameterError(
            f"per_slice cannot lift a {type(self).__name__}.",
            "It has no form for every slice of a field.",
            "Put the slices into the batch dimensions, or build the field's constraint directly.",
        )

    def stored(self) -> tuple[dict[str, Any], Arrays] | None:
        """Plain values and arrays from which ``restored`` makes the constraint again; None if there are none."""
        return None

    @classmethod
    def restored(cls, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Constraint:
        """The constraint of ``stored`` values and arrays."""
        raise NotImplementedError(cls.__name__)

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """What projections derive from this constraint alone, kept while it lives."""
        return {}

    def _set(self, **fields: Any) -> None:
        """Set fields while the constraint is built."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _copy(self, **changes: Any) -> Self:
        """A copy with other data of the same shapes; nothing is checked again."""
        twin = copy.copy(self)
        vars(twin).pop("plans", None)
        twin._set(**changes)
        return twin

    def residual(self, u: Tensor) -> Tensor:
        """Equality residuals (*batch, q); 0 exactly where u satisfies them."""
        return u[..., :0]

    def scale(self, u: Tensor) -> Tensor:
        """Magnitudes (*batch, q) against which a residual counts as rounding."""
        return u[..., :0]

    def excess(self, u: Tensor) -> Tensor:
        """Inequality functions (*batch, p); feasible where none is positive."""
        return u[..., :0]

    def excess_scale(self, u: Tensor) -> Tensor:
        """Magnitudes (*batch, p) against which an excess counts as rounding."""
        return u[..., :0]

    def resolve(self, n: int) -> Constraint:
        """The constraint for n variables, in the simplest terms: sets of any size get their rows, rows their kind."""
        return self

    def parts(self) -> tuple[Constraint, ...]:
        """The constraints joined by ``&``, or this one alone."""
        return (self,)

    def linear_part(self) -> Constraint:
        """The linear equalities among the constraints, all that ProbConserv uses."""
        raise ParameterError(
            "This constraint has no linear part.",
            "ProbConserv projects on linear equalities alone.",
            "Join it with the linear law by '&', or use probhard-inf.",
        )

    def violation(self, u: Tensor) -> Tensor:
        """Largest absolute residual or positive excess, (*batch,)."""
        self.check_event(u, "The point")
        return _largest(u, self.residual(u).abs(), self.excess(u).clamp(min=0))

    def relative_violation(self, u: Tensor, size: Tensor | None = None) -> Tensor:
        """Largest violation relative to the size of the terms that should cancel, (*batch,).

        ``size`` (*batch, 1) is a magnitude of the numbers that u was computed from: terms smaller than a millionth of
        it count as that large, so that the rounding of a sum of zeros is rounding.
        """
        self.check_event(u, "The point")
        equal = relative(self.residual(u), self.scale(u), size)
        return _largest(u, equal, relative(self.excess(u).clamp(min=0), self.excess_scale(u), size))

    def penalty(self, u: Tensor) -> Tensor:
        """Squared residuals and positive excesses, summed, (*batch,)."""
        self.check_event(u, "The point")
        return self.residual(u).square().sum(-1) + self.excess(u).clamp(min=0).square().sum(-1)

    def check_event(self, u: Tensor, name: str) -> None:
        """Raise unless the last dimension of u has n variables."""
        if self.variables is not None and (u.dim() == 0 or u.shape[-1] != self.variables):
            raise ShapeError(
                f"{name} has shape {tuple(u.shape)}, the constraint {self.variables} variables.",
                "The event is the last dimension.",
                f"Flatten or transpose so that the last dimension is {self.variables}; fields flatten time-major.",
            )

    def __and__(self, other: object) -> Any:
        from probhard.constraints.intersection import join  # it builds on this module

        return join(self, other)


def _largest(u: Tensor, *parts: Tensor) -> Tensor:
    largest = [part.amax(-1) for part in parts if part.shape[-1]]
    if not largest:
        return u.new_zeros(u.shape[:-1])
    return largest[0] if len(largest) == 1 else torch.maximum(*largest)


def joined(parts: list[Tensor], u: Tensor) -> Tensor:
    """Residuals or excesses (*batch, k) of several parts, one after the other."""
    parts = [part for part in parts if part.shape[-1]]
    if not parts:
        return u[..., :0]
    shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, -1) for part in parts], -1)


def same_variables(first: Constraint, second: Constraint) -> int | None:
    """The number of variables that two constraints speak of."""
    known = [c.variables for c in (first, second) if c.variables is not None]
    if len(known) == 2 and known[0] != known[1]:
        raise ShapeError(
            f"'&' got constraints on {known[0]} and {known[1]} variables.",
            "They must speak of the same event.",
            "Lift the smaller one, for instance with per_slice.",
        )
    return known[0] if known else None
