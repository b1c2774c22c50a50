"""What every problem offers: exact fields on a grid, their mass, and all that is known of them as constraints.

    d/dt (integral of u over x) = flux in - flux out,     so that     integral of u(t, x) = mass(parameter, t).

A field has nt slices of nx points; flattened time-major it is an event of n = nt * nx variables. Bounds are uniform
along a slice and the exact solution obeys them, so that the constant mass / length does as well: mass, bounds and
monotone slices always leave a point, though the trapezoid mass of the exact field is not quite the exact mass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.constraints.base import Constraint
from probhard.constraints.box import Box
from probhard.constraints.conservation import Conservation, jump_excess, trapezoid_weights
from probhard.constraints.inequality import LinearInequality, Monotone
from probhard.constraints.semicontinuous import Semicontinuous
from probhard.constraints.slices import per_slice
from probhard.errors import ParameterError, check_choice
from probhard.projection.profiles import ATTAINED

STRIDE = 5  # every fifth of the time points is kept, and never the last


class Split(NamedTuple):
    """Parameters to train on, to choose with and to test on, one dimension each."""

    train: Tensor
    validation: Tensor
    test: Tensor


@dataclass(frozen=True)
class Problem(ABC):
    """A family of exact solutions u(t, x; parameter) on a fixed grid; t runs over [0, 1).

    A subclass gives ``solution`` and ``mass``, what it knows of bounds and monotony, and defaults for range and length.

    Args:
        lower, upper: Range of the parameter, positive.
        length: The domain in x is [0, length].
        points: Number nx of grid points in x.
        slices: Number nt of time slices.
        dtype: Of everything that is computed.
    """

    name: ClassVar[str]
    monotone: ClassVar[str | None] = None  # "increasing" or "decreasing" in x, where it holds
    limit: ClassVar[float] = float("inf")  # parameters lie below it
    reach: ClassVar[float] = 0.0  # the mass holds on domains at least this long

    lower: float
    upper: float
    length: float = 1.0
    points: int = 100
    slices: int = 20
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not 0 < self.lower <= self.upper < self.limit:
            raise ParameterError(
                f"The parameter's range is [{self.lower}, {self.upper}].",
                f"The exact solutions hold for parameters between 0 and {self.limit:g}, drawn from an interval.",
                f"Pass 0 < lower <= upper < {self.limit:g}.",
            )
        if self.points < 2 or self.slices < 1 or not self.length > 0:
            raise ParameterError(
                f"The grid has {self.points} points on [0, {self.length}] and {self.slices} time slices.",
                "The trapezoid rule needs two points on an interval, and a field one slice.",
                "Pass points >= 2, slices >= 1 and length > 0.",
            )
        if self.length < self.reach:
            raise ParameterError(
                f"The domain of {type(self).__name__} is [0, {self.length}].",
                f"Its solution varies up to x = {self.reach:g}, and the mass is that of all of it.",
                f"Pass length >= {self.reach:g}.",
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
        """The integral over x of every slice, (*batch, nt), for parameters (*batch,)."""

    def bounds(self, parameter: Tensor | float) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of every slice, (*batch, nt, 1) each; infinite where none is known."""
        value, time, _ = self._broadcast(parameter)
        free = torch.full_like(value * time, torch.inf)
        return -free, free

    def jump(self, parameter: Tensor | float) -> tuple[Tensor, Tensor]:
        """Where every slice jumps and by how much it falls there, (*batch, nt) each; a fall of 0 where it does not."""
        none = torch.zeros_like(self.mass(parameter))
        return none, none

    def parameters(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Parameters (count,) drawn uniformly from their range."""
        if count < 1:
            raise ParameterError(f"Got count={count}.", "There is nothing to draw.", "Ask for at least one parameter.")
        device = None if generator is None else generator.device
        unit = torch.rand(count, generator=generator, dtype=self.dtype, device=device)
        return self.lower + (self.upper - self.lower) * unit

    def split(self, seed: int, train: int = 160, validation: int = 40, test: int = 100) -> Split:
        """Parameters of an experiment; those of the test are drawn first, whatever the other sizes are.

        The same seed gives other parameters in another ``dtype``.
        """
        generator = torch.Generator().manual_seed(seed)
        tested, trained, validated = (self.parameters(count, generator) for count in (test, train, validation))
        return Split(trained, validated, tested)

    def constraint(self, parameter: Tensor | float) -> Constraint:
        """Trapezoid mass = exact mass in every slice of a flattened field, n = nt * nx."""
        return per_slice(self.slice_constraint(parameter), self.shape)

    def slice_constraint(self, parameter: Tensor | float) -> Conservation:
        """The same law with the slices as batch: for events of nx variables in a batch (*batch, nt)."""
        mass = self.mass(parameter)
        return Conservation(self.weights.to(mass.device), mass)

    def physics(self, parameter: Tensor | float, mass: str = "trapezoid", phases: bool = False) -> Constraint:
        """All that is known of a flattened field: mass, bounds and, where it holds, monotone slices.

        Args:
            parameter: (*batch,).
            mass: ``"trapezoid"``, whose sum is to be the exact mass, as the paper has it: fields with a front miss that
                by up to half a cell. Two are true of the exact field: ``"interval"`` asks of monotone slices only that
                the sum be within ``dx / 2 (upper - lower)`` of the mass, ``"jump"`` for the sum that a jump at this
                place gives.
            phases: Whether values are 0 ahead of the front and at least what they fall by at it behind it. Where the
                front is, is left open. Not convex; wants a mass that exact fields obey.
        """
        return per_slice(self.slice_physics(parameter, mass, phases), self.shape)

    def slice_physics(self, parameter: Tensor | float, mass: str = "trapezoid", phases: bool = False) -> Constraint:
        """The same with the slices as batch: for events of nx variables in a batch (*batch, nt)."""
        laws = {"trapezoid": self.slice_constraint, "interval": self.slice_interval, "jump": self.slice_jump}
        check_choice("mass", mass, tuple(laws))
        known = laws[mass](parameter) & Box(*self.bounds(parameter))
        if phases:
            known = known & self.slice_phases(parameter)
        return known if self.monotone is None else known & Monotone(self.monotone)

    def slice_interval(self, parameter: Tensor | float) -> LinearInequality:
        """Where trapezoid sums of monotone slices with this mass and these bounds lie; of other slices, the mass."""
        mass = self.mass(parameter)
        slack = torch.zeros_like(mass)
        if self.monotone is not None:
            lower, upper = self.bounds(parameter)  # (*batch, nt, 1)
            slack = (upper - lower).squeeze(-1) * self.length / (2 * (self.points - 1))
        return LinearInequality.between(self.weights.to(mass.device), mass - slack, mass + slack)

    def slice_jump(self, parameter: Tensor | float) -> Conservation:
        """Trapezoid sum = exact mass + what the rule adds at a jump, which exact fields obey to second order."""
        mass = self.mass(parameter)
        excess = jump_excess(self.grid.to(mass.device), *self.jump(parameter))
        return Conservation(self.weights.to(mass.device), mass + excess)

    def slice_phases(self, parameter: Tensor | float) -> Semicontinuous:
        """``u = 0`` or ``u >= fall`` of the jump, which fronts that fall to 0 obey."""
        if self.monotone is None:
            raise ParameterError(
                f"{type(self).__name__} has no phases.",
                "Its solution is no front that falls to 0, and small values belong to it.",
                "Leave phases=True out.",
            )
        return Semicontinuous(self.jump(parameter)[1].unsqueeze(-1))

    def single_point(self, parameter: Tensor | float) -> Tensor:
        """Slices on which mass and bounds leave exactly one point, bool (*batch, nt)."""
        mass = self.mass(parameter)
        low, high = (self.length * bound.squeeze(-1) for bound in self.bounds(parameter))
        return torch.minimum(mass - low, high - mass) <= ATTAINED[self.dtype] * mass.abs()

    def inputs(self, parameter: Tensor | float) -> Tensor:
        """What a network takes, (*batch, 3, nt, nx): the parameter, t and x, broadcast over the grid."""
        value, time, place = self._broadcast(parameter)
        return torch.stack(torch.broadcast_tensors(value, time, place), -3)

    def _value(self, parameter: Tensor | float) -> Tensor:
        """The parameter as a tensor of this problem's dtype, checked."""
        value = torch.as_tensor(parameter, dtype=self.dtype)
        if checking() and not bool(((value > 0) & (value < self.limit)).all()):
            found = value.detach().flatten()
            bad = found[~((found > 0) & (found < self.limit))]
            raise ParameterError(
                f"{bad.numel()} of {found.numel()} parameters of {type(self).__name__} are not positive and below "
                f"{self.limit:g}: the first is {float(bad[0]):g}.",
                "The exact solution is not defined there.",
                f"Use values like those of .parameters(), in [{self.lower:g}, {self.upper:g}].",
            )
        return value

    def _broadcast(self, parameter: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        """Parameter (*batch, 1, 1), time (nt, 1) and place (nx,), ready for a formula on the grid."""
        value = self._value(parameter)
        return value[..., None, None], self.times.to(value.device)[:, None], self.grid.to(value.device)

    def _in_time(self, parameter: Tensor | float) -> tuple[Tensor, Tensor]:
        """Parameter (*batch, 1) and times (nt,), ready for a formula of the slices."""
        value = self._value(parameter)
        return value[..., None], self.times.to(value.device)
