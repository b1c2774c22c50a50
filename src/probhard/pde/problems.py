"""Equations with exact solutions and known mass (paper, section "Enforcing Conservation Laws in PDEs").

    d/dt (integral of u over x) = flux in - flux out,     so that     integral of u(t, x) = mass(parameter, t).

| problem       | equation            | parameter   | solution                   | mass                      |
|---------------|---------------------|-------------|----------------------------|---------------------------|
| PorousMedium  | u_t = (u^m u_x)_x   | m in [2, 3] | (m relu(t - x))^(1/m)      | (m t)^(1 + 1/m) / (m + 1) |

A field has nt slices of nx points; flattened time-major it is an event of n = nt * nx variables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from probhard.constraints.base import Constraint
from probhard.constraints.conservation import Conservation, trapezoid_weights
from probhard.constraints.slices import per_slice
from probhard.errors import ParameterError, checking

STRIDE = 5  # every fifth of the time points is kept, and never the last


@dataclass(frozen=True)
class Problem(ABC):
    """A family of exact solutions u(t, x; parameter) on a fixed grid; t runs over [0, 1).

    A subclass gives ``solution`` and ``mass``, and defaults for the parameter's range and the length of the domain.

    Args:
        lower, upper: Range of the parameter, positive.
        length: The domain in x is [0, length].
        points: Number nx of grid points in x.
        slices: Number nt of time slices.
        dtype: Of everything that is computed.
    """

    lower: float
    upper: float
    length: float = 1.0
    points: int = 100
    slices: int = 20
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not 0 < self.lower <= self.upper < float("inf"):
            raise ParameterError(
                f"The parameter's range is [{self.lower}, {self.upper}].",
                "The exact solutions hold for positive parameters, drawn from an interval.",
                "Pass 0 < lower <= upper.",
            )
        if self.points < 2 or self.slices < 1 or not self.length > 0:
            raise ParameterError(
                f"The grid has {self.points} points on [0, {self.length}] and {self.slices} time slices.",
                "The trapezoid rule needs two points on an interval, and a field one slice.",
                "Pass points >= 2, slices >= 1 and length > 0.",
            )

    @cached_property
    def grid(self) -> Tensor:
        """Points in x, (nx,)."""
        return torch.linspace(0, self.length, self.points, dtype=self.dtype)

    @cached_property
    def times(self) -> Tensor:
        """Times of the slices, (nt,), from 0 to just before 1."""
        return torch.linspace(0, 1, STRIDE * self.slices, dtype=self.dtype)[0:-1:STRIDE]

    @cached_property
    def weights(self) -> Tensor:
        """Trapezoid weights of the grid, (nx,)."""
        return trapezoid_weights(self.grid)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (nt, nx) of a field."""
        return self.slices, self.points

    @abstractmethod
    def solution(self, parameter: Tensor | float) -> Tensor:
        """The exact field, (*batch, nt, nx), for parameters (*batch,)."""

    @abstractmethod
    def mass(self, parameter: Tensor | float) -> Tensor:
        """The exact integral over x of every slice, (*batch, nt), for parameters (*batch,)."""

    def parameters(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Parameters (count,) drawn uniformly from their range."""
        if count < 1:
            raise ParameterError(f"Got count={count}.", "There is nothing to draw.", "Ask for at least one parameter.")
        device = None if generator is None else generator.device
        unit = torch.rand(count, generator=generator, dtype=self.dtype, device=device)
        return self.lower + (self.upper - self.lower) * unit

    def constraint(self, parameter: Tensor | float) -> Constraint:
        """Trapezoid mass = exact mass in every slice of a flattened field, n = nt * nx."""
        return per_slice(self.slice_constraint(parameter), self.shape)

    def slice_constraint(self, parameter: Tensor | float) -> Conservation:
        """The same law with the slices as batch: for events of nx variables in a batch (*batch, nt)."""
        mass = self.mass(parameter)
        return Conservation(self.weights.to(mass.device), mass)

    def inputs(self, parameter: Tensor | float) -> Tensor:
        """What a network takes, (*batch, 3, nt, nx): the parameter, t and x, broadcast over the grid."""
        value, time, place = self._broadcast(parameter)
        return torch.stack(torch.broadcast_tensors(value, time, place), -3)

    def _value(self, parameter: Tensor | float) -> Tensor:
        """The parameter as a tensor of this problem's dtype, checked."""
        value = torch.as_tensor(parameter, dtype=self.dtype)
        if checking() and not bool(((value > 0) & value.isfinite()).all()):
            found = value.detach().flatten()
            bad = found[~((found > 0) & found.isfinite())]
            raise ParameterError(
                f"{bad.numel()} of {found.numel()} parameters of {type(self).__name__} are not positive and finite: "
                f"the first is {float(bad[0]):g}.",
                "The exact solution is not defined there.",
                f"Use values like those of .parameters(), in [{self.lower:g}, {self.upper:g}].",
            )
        return value

    def _broadcast(self, parameter: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        """Parameter (*batch, 1, 1), time (nt, 1) and place (nx,), ready for a formula on the grid."""
        value = self._value(parameter)
        return value[..., None, None], self.times.to(value.device)[:, None], self.grid.to(value.device)


@dataclass(frozen=True)
class PorousMedium(Problem):
    """The porous medium equation ``u_t = (u^m u_x)_x``: a front with an infinite slope, moving at speed 1.

    The left boundary value is ``(m t)^(1/m)``; the front at x = t stays in the domain, so nothing flows out.
    """

    lower: float = 2.0
    upper: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1:
            raise ParameterError(
                f"The domain of the porous medium equation is [0, {self.length}].",
                "Its front reaches x = 1, and the mass holds only while it is inside.",
                "Pass length >= 1.",
            )

    def solution(self, parameter: Tensor | float) -> Tensor:
        m, time, place = self._broadcast(parameter)
        return _power(m * (time - place), 1 / m)

    def mass(self, parameter: Tensor | float) -> Tensor:
        m = self._value(parameter)[..., None]
        return _power(m * self.times.to(m.device), 1 + 1 / m) / (m + 1)


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    """``relu(base)^exponent``, with value and gradient 0 where the base is not positive."""
    inside = base > 0
    # Both branches of where() enter the gradient: the unused one must be finite, hence 1 in place of 0.
    return torch.where(inside, torch.where(inside, base, 1.0) ** exponent, 0.0)
