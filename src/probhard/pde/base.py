"""The interface of problems: exact fields on a grid, their mass, and their known properties as constraints.

    d/dt (integral of u over x) = flux in - flux out,     so that     integral of u(t, x) = mass(parameter, t).

A field has nt slices of nx points; flattened time-major it is an event of n = nt * nx variables. Bounds are constant
along a slice and the exact solution obeys them, so the constant field mass / length obeys them too. Mass, bounds and
monotone slices are therefore always feasible, although the trapezoid mass of the exact field is not quite its mass.
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
from probhard.constraints.inequality import LinearInequality
from probhard.constraints.monotone import Monotone
from probhard.constraints.semicontinuous import Semicontinuous
from probhard.constraints.slices import per_slice
from probhard.errors import ParameterError, check_choice
from probhard.projection.profiles import ATTAINED

STRIDE = 5  # every fifth time point is kept, never the last


class Split(NamedTuple):
    """Parameters of the training, validation and test fields, (count,) each."""

    train: Tensor
    validation: Tensor
    test: Tensor


@dataclass(frozen=True)
class Problem(ABC):
    """A family of exact solutions u(t, x; parameter) on a fixed grid, with t in [0, 1).

    Subclasses implement ``solution`` and ``mass``, and set bounds, monotonicity and default ranges. Methods take
    parameters (*batch,) and raise ParameterError unless all are positive and below ``limit``.

    Args:
        lower: Smallest parameter, positive.
        upper: Largest parameter.
        length: The domain in x is [0, length].
        points: Number nx of grid points in x.
        slices: Number nt of time slices.
        dtype: Dtype of all results.

    Raises:
        ParameterError: If the range, the grid or the domain is not valid.
    """

    name: ClassVar[str]
    monotone: ClassVar[str | None] = None  # "increasing" or "decreasing" in x, if slices are monotone
    limit: ClassVar[float] = float("inf")  # parameters are below it
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
                f"The exact solutions hold for parameters between 0 and {self.limit:g}.",
                f"Pass 0 < lower <= upper < {self.limit:g}.",
            )
        if self.points < 2 or self.slices < 1 or not self.length > 0:
            raise ParameterError(
                f"The grid has {self.points} points on [0, {self.length}] and {self.slices} time slices.",
                "The trapezoid rule needs two points, and a field one slice.",
                "Pass points >= 2, slices >= 1 and length > 0.",
            )
        if self.length < self.reach:
            raise ParameterError(
                f"The domain of {type(self).__name__} is [0, {self.length}].",
                f"Its solution varies up to x = {self.reach:g}, and the mass covers all of it.",
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
        """Position of the jump of every slice and its height, (*batch, nt) each; height 0 where there is none."""
        none = torch.zeros_like(self.mass(parameter))
        return none, none

    def parameters(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw parameters uniformly from their range.

        Args:
            count: Number of parameters.
            generator: Source of random numbers; torch's global one for None.

        Returns:
            Parameters, (count,).

        Raises:
            ParameterError: If ``count`` is below 1.
        """
        if count < 1:
            raise ParameterError(f"Got count={count}.", "At least one parameter must be drawn.", "Pass count >= 1.")
        device = None if generator is None else generator.device
        unit = torch.rand(count, generator=generator, dtype=self.dtype, device=device)
        return self.lower + (self.upper - self.lower) * unit

    def split(self, seed: int, train: int = 160, validation: int = 40, test: int = 100) -> Split:
        """Draw the parameters of an experiment; the same seed gives others in another ``dtype``.

        Args:
            seed: Seed of the draws.
            train: Number of training fields.
            validation: Number of validation fields.
            test: Number of test fields, drawn first, so that they do not depend on the other sizes.

        Returns:
            The three sets of parameters.

        Raises:
            ParameterError: If a size is below 1.
        """
        generator = torch.Generator().manual_seed(seed)
        test_set, train_set, validation_set = (self.parameters(count, generator) for count in (test, train, validation))
        return Split(train_set, validation_set, test_set)

    def constraint(self, parameter: Tensor | float) -> Constraint:
        """Trapezoid mass = exact mass in every slice of a flattened field, for parameters (*batch,) and n = nt * nx."""
        return per_slice(self.slice_constraint(parameter), self.shape)

    def slice_constraint(self, parameter: Tensor | float) -> Conservation:
        """``constraint`` with the slices as batch: events of nx variables, batch (*batch, nt)."""
        mass = self.mass(parameter)
        return Conservation(self.weights.to(mass.device), mass)

    def physics(self, parameter: Tensor | float, mass: str = "trapezoid", phases: bool = False) -> Constraint:
        """All known properties of a flattened field: mass, bounds and, where they hold, monotone slices.

        Args:
            parameter: (*batch,).
            mass: Rule for the trapezoid sum of a slice. ``"trapezoid"``, as in the paper, equates it with the mass;
                exact fields with a front miss that by up to half a cell. ``"interval"`` allows monotone slices
                ``dx / 2 (upper - lower)`` on both sides. ``"jump"`` adds the excess of a jump at the known position.
            phases: Also ask for 0 ahead of the front and at least the height of the jump behind it, with a free front.
                Not convex; needs a mass rule that exact fields obey.

        Raises:
            ParameterError: If the rule is not known, or the problem has no phases.
        """
        return per_slice(self.slice_physics(parameter, mass, phases), self.shape)

    def slice_physics(self, parameter: Tensor | float, mass: str = "trapezoid", phases: bool = False) -> Constraint:
        """``physics`` with the slices as batch: events of nx variables, batch (*batch, nt)."""
        rules = {"trapezoid": self.slice_constraint, "interval": self.slice_interval, "jump": self.slice_jump}
        check_choice("mass", mass, tuple(rules))
        known = rules[mass](parameter) & Box(*self.bounds(parameter))
        if phases:
            known = known & self.slice_phases(parameter)
        return known if self.monotone is None else known & Monotone(self.monotone)

    def slice_interval(self, parameter: Tensor | float) -> LinearInequality:
        """Range of the trapezoid sums of monotone slices with this mass and these bounds; else the mass itself."""
        mass = self.mass(parameter)
        slack = torch.zeros_like(mass)
        if self.monotone is not None:
            lower, upper = self.bounds(parameter)  # (*batch, nt, 1)
            slack = (upper - lower).squeeze(-1) * self.length / (2 * (self.points - 1))
        return LinearInequality.between(self.weights.to(mass.device), mass - slack, mass + slack)

    def slice_jump(self, parameter: Tensor | float) -> Conservation:
        """Trapezoid sum = exact mass + excess of the rule at a jump, which exact fields obey to second order."""
        mass = self.mass(parameter)
        excess = jump_excess(self.grid.to(mass.device), *self.jump(parameter))
        return Conservation(self.weights.to(mass.device), mass + excess)

    def slice_phases(self, parameter: Tensor | float) -> Semicontinuous:
        """``u = 0`` or ``u >= height`` of the jump, which fronts that fall to 0 obey.

        Args:
            parameter: (*batch,).

        Returns:
            The constraint for events of nx variables, batch (*batch, nt).

        Raises:
            ParameterError: If the solution is not such a front.
        """
        if self.monotone is None:
            raise ParameterError(
                f"{type(self).__name__} has no phases.",
                "Its solution is not a front that falls to 0: it has small values.",
                "Leave phases=True out.",
            )
        return Semicontinuous(self.jump(parameter)[1].unsqueeze(-1))

    def single_point(self, parameter: Tensor | float) -> Tensor:
        """Slices on which only one field obeys mass and bounds, (*batch, nt) bool."""
        mass = self.mass(parameter)
        low, high = (self.length * bound.squeeze(-1) for bound in self.bounds(parameter))
        return torch.minimum(mass - low, high - mass) <= ATTAINED[self.dtype] * mass.abs()

    def inputs(self, parameter: Tensor | float) -> Tensor:
        """Inputs of a network, (*batch, 3, nt, nx): the parameter, t and x, broadcast over the grid."""
        value, time, place = self._broadcast(parameter)
        return torch.stack(torch.broadcast_tensors(value, time, place), -3)

    def _value(self, parameter: Tensor | float) -> Tensor:
        """The checked parameter, as a tensor of this problem's dtype."""
        value = torch.as_tensor(parameter, dtype=self.dtype)
        if checking() and not bool(((value > 0) & (value < self.limit)).all()):
            values = value.detach().flatten()
            bad = values[~((values > 0) & (values < self.limit))]
            raise ParameterError(
                f"{bad.numel()} of {values.numel()} parameters of {type(self).__name__} are not positive and below "
                f"{self.limit:g}: the first is {float(bad[0]):g}.",
                "The exact solution is not defined there.",
                f"Use values like those of .parameters(), in [{self.lower:g}, {self.upper:g}].",
            )
        return value

    def _broadcast(self, parameter: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        """Parameter (*batch, 1, 1), time (nt, 1) and place (nx,), for formulas on the grid."""
        value = self._value(parameter)
        return value[..., None, None], self.times.to(value.device)[:, None], self.grid.to(value.device)

    def _in_time(self, parameter: Tensor | float) -> tuple[Tensor, Tensor]:
        """Parameter (*batch, 1) and times (nt,), for formulas of the slices."""
        value = self._value(parameter)
        return value[..., None], self.times.to(value.device)
