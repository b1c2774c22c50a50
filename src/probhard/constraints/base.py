"""The base class of all constraints: one residual and one excess, used to project, penalise, score and test.

A new constraint is one file. It subclasses ``Constraint``, or ``Shape`` if it consists of rows with auxiliary
variables, and overrides the methods that it supports. Other packages only call these methods.
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

Arrays = dict[str, np.ndarray]
STORED: dict[str, type[Constraint]] = {}  # constraints that can be saved as plain values, by ``stored_as``

immutable = dataclass(frozen=True, eq=False, repr=False, init=False)


@immutable
class Constraint(ABC):
    """A set of feasible points (*batch, n). Batch dimensions broadcast.

    Attributes:
        role: The field of ``projection.parts.Parts`` that holds it.
        stored_as: Its name in saved files; None if it cannot be saved.
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
        """Number of variables n; None if any number fits."""

    @property
    @abstractmethod
    def algorithm(self) -> str:
        """The solver's name; for combined constraints, one per part."""

    @abstractmethod
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the data to a device or dtype; arguments as of ``Tensor.to``."""

    def data(self) -> tuple[Tensor, ...]:
        """All tensors of the constraint, each a number or (*batch, k): plans are kept while none of them changes."""
        return ()

    def merged(self, other: Constraint) -> Constraint | None:
        """One constraint equivalent to both; None if ``&`` keeps them as two parts."""
        return None

    def on_slices(self, slices: int, width: int) -> Constraint:
        """Lift the constraint to every slice of a field; see ``per_slice``.

        Args:
            slices: Number of slices nt.
            width: Number of points per slice nx.

        Returns:
            A constraint on nt * nx variables.

        Raises:
            ParameterError: The constraint cannot be lifted.
        """
        raise ParameterError(
            f"per_slice cannot lift a {type(self).__name__}.",
            "It cannot be applied to every slice of a field.",
            "Put the slices into the batch dimensions, or build the field's constraint directly.",
        )

    def stored(self) -> tuple[dict[str, Any], Arrays] | None:
        """Plain values and arrays for ``restored``; None if the constraint cannot be saved."""
        return None

    @classmethod
    def restored(cls, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Constraint:
        """Rebuild a constraint from the values and arrays that ``stored`` returned.

        Raises:
            NotImplementedError: The constraint cannot be saved.
        """
        raise NotImplementedError(cls.__name__)

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """Cache of what projections derive from this constraint alone."""
        return {}

    def _set(self, **fields: Any) -> None:
        """Set fields while the constraint is built."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _copy(self, **changes: Any) -> Self:
        """A copy with other data of the same shapes, without validation."""
        twin = copy.copy(self)
        vars(twin).pop("plans", None)
        twin._set(**changes)
        return twin

    def residual(self, u: Tensor) -> Tensor:
        """Equality residuals (*batch, q) at u (*batch, n); 0 where satisfied."""
        return u[..., :0]

    def scale(self, u: Tensor) -> Tensor:
        """Size of the terms that cancel in each residual, (*batch, q)."""
        return u[..., :0]

    def excess(self, u: Tensor) -> Tensor:
        """Inequality functions (*batch, p) at u (*batch, n); satisfied where not positive."""
        return u[..., :0]

    def excess_scale(self, u: Tensor) -> Tensor:
        """Size of the terms that cancel in each excess, (*batch, p)."""
        return u[..., :0]

    def resolve(self, n: int) -> Constraint:
        """The constraint for n variables in its simplest form, such as rows and bounds."""
        return self

    def parts(self) -> tuple[Constraint, ...]:
        """The constraints joined by ``&``, or this one alone."""
        return (self,)

    def linear_part(self) -> Constraint:
        """The linear equalities, which are all that ProbConserv uses; raises ParameterError if there are none."""
        raise ParameterError(
            "This constraint has no linear part.",
            "ProbConserv projects on linear equalities alone.",
            "Join it with a linear equality by '&', or use probhard-inf.",
        )

    def violation(self, u: Tensor) -> Tensor:
        """Largest absolute residual or positive excess of u (*batch, n), (*batch,).

        Raises:
            ShapeError: u does not have n variables.
        """
        self.check_event(u, "The point")
        return _largest(u, self.residual(u).abs(), self.excess(u).clamp(min=0))

    def relative_violation(self, u: Tensor, size: Tensor | None = None) -> Tensor:
        """Largest violation relative to the size of the terms that cancel.

        Args:
            u: Points, (*batch, n).
            size: Magnitude of the numbers that u was computed from, (*batch, 1). A millionth of it has a tolerance.

        Returns:
            The violations, (*batch,).

        Raises:
            ShapeError: u does not have n variables.
        """
        self.check_event(u, "The point")
        sizes = (None, None) if size is None else (self.unit(u) * size, self.excess_unit(u) * size)
        equal = relative(self.residual(u), self.scale(u), sizes[0])
        return _largest(u, equal, relative(self.excess(u).clamp(min=0), self.excess_scale(u), sizes[1]))

    def unit(self, u: Tensor) -> Tensor | float:
        """How much residuals (*batch, q) may change if all variables change by 1."""
        return 1.0

    def excess_unit(self, u: Tensor) -> Tensor | float:
        """How much excesses (*batch, p) may change if all variables change by 1."""
        return 1.0

    def penalty(self, u: Tensor) -> Tensor:
        """Sum of squared residuals and positive excesses of u (*batch, n), (*batch,); raises as ``violated``."""
        equal, unequal = self.violated(u)
        return equal.square().sum(-1) + unequal.square().sum(-1)

    def violated(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals (*batch, q) and positive excesses (*batch, p) of u (*batch, n).

        Raises:
            ShapeError: u does not have n variables.
        """
        self.check_event(u, "The point")
        return self.residual(u), self.excess(u).clamp(min=0)

    def check_event(self, u: Tensor, name: str) -> None:
        """Check the number of variables.

        Args:
            u: Points, (*batch, n).
            name: What they are, for errors.

        Raises:
            ShapeError: The last dimension of u does not have n variables.
        """
        if self.variables is not None and (u.dim() == 0 or u.shape[-1] != self.variables):
            raise ShapeError(
                f"{name} has shape {tuple(u.shape)}, the constraint {self.variables} variables.",
                "The last dimension holds the variables.",
                f"Flatten or transpose so that the last dimension is {self.variables}; fields flatten time-major.",
            )

    def __and__(self, other: object) -> Any:
        from probhard.constraints.intersection import join  # it imports this module

        return join(self, other)

    def __bool__(self) -> bool:
        raise ParameterError(
            f"A {type(self).__name__} was used as true or false, by 'and', 'or', 'not' or 'if'.",
            "Python then keeps one of two constraints and drops the other.",
            "Join constraints with '&', as in a & b; ask whether there is one with 'is None'.",
        )


def _largest(u: Tensor, *parts: Tensor) -> Tensor:
    largest = [part.amax(-1) for part in parts if part.shape[-1]]
    if not largest:
        return u.new_zeros(u.shape[:-1])
    return largest[0] if len(largest) == 1 else torch.maximum(*largest)


def joined(parts: list[Tensor], u: Tensor) -> Tensor:
    """Concatenate residuals or excesses (*batch, k) of several parts at u (*batch, n)."""
    parts = [part for part in parts if part.shape[-1]]
    if not parts:
        return u[..., :0]
    shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, -1) for part in parts], -1)


def same_variables(first: Constraint, second: Constraint) -> int | None:
    """The number of variables of two constraints, None if neither fixes it.

    Raises:
        ShapeError: The numbers differ.
    """
    known = [c.variables for c in (first, second) if c.variables is not None]
    if len(known) == 2 and known[0] != known[1]:
        raise ShapeError(
            f"'&' got constraints on {known[0]} and {known[1]} variables.",
            "Constraints joined by '&' apply to the same variables.",
            "Lift the smaller one, for instance with per_slice.",
        )
    return known[0] if known else None
