"""What every constraint offers: one residual and one excess, used to project, penalise, score and test."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

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


class Constraint(ABC):
    """A set of feasible points in n variables, the last dimension; batch dimensions broadcast."""

    @property
    @abstractmethod
    def variables(self) -> int | None:
        """Number of variables n, where it is known."""

    @property
    @abstractmethod
    def algorithm(self) -> str:
        """How points are projected on it, in words; of several constraints, on each of them alone."""

    @abstractmethod
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The constraint with its data on another device or in another dtype."""

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
        tiny = u.new_tensor(1e-300 if u.element_size() == 8 else 1e-37)
        floor = tiny if size is None else torch.maximum(1e-6 * size, tiny)
        equal = self.residual(u).abs() / torch.maximum(self.scale(u), floor)
        return _largest(u, equal, self.excess(u).clamp(min=0) / torch.maximum(self.excess_scale(u), floor))

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
    found = [part.amax(-1) for part in parts if part.shape[-1]]
    if not found:
        return u.new_zeros(u.shape[:-1])
    return found[0] if len(found) == 1 else torch.maximum(*found)


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
