"""What every constraint offers: one residual, used to project, penalise, score and test."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from torch import Tensor

from probhard.errors import ShapeError


class Constraint(ABC):
    """A set of feasible points in n variables, the last dimension; batch dimensions broadcast."""

    @property
    @abstractmethod
    def variables(self) -> int | None:
        """Number of variables n, where it is known."""

    @property
    @abstractmethod
    def algorithm(self) -> str:
        """How points are projected on it, in words."""

    @abstractmethod
    def residual(self, u: Tensor) -> Tensor:
        """Equality residuals (*batch, q); 0 exactly where u is feasible."""

    @abstractmethod
    def scale(self, u: Tensor) -> Tensor:
        """Magnitudes (*batch, q) against which a residual counts as rounding."""

    @abstractmethod
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The constraint with its data on another device or in another dtype."""

    def linear_part(self) -> Constraint:
        """The linear equalities among the constraints, all that ProbConserv uses."""
        return self

    def violation(self, u: Tensor) -> Tensor:
        """Largest absolute residual, (*batch,)."""
        return self.residual(u).abs().amax(-1)

    def relative_violation(self, u: Tensor) -> Tensor:
        """Largest residual relative to the size of the terms that should cancel, (*batch,)."""
        residual, scale = self.residual(u).abs(), self.scale(u)
        return (residual / scale.clamp(min=1e-300 if u.element_size() == 8 else 1e-37)).amax(-1)

    def check_event(self, u: Tensor, name: str) -> None:
        """Raise unless the last dimension of u has n variables."""
        if self.variables is not None and (u.dim() == 0 or u.shape[-1] != self.variables):
            raise ShapeError(
                f"{name} has shape {tuple(u.shape)}, the constraint {self.variables} variables.",
                "The event is the last dimension.",
                f"Flatten or transpose so that the last dimension is {self.variables}; fields flatten time-major.",
            )
