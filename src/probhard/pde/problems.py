"""Equations with exact solutions and known mass (paper, section "Enforcing Conservation Laws in PDEs").

| problem      | equation                 | parameter         | solution                   | mass                    |
|--------------|--------------------------|-------------------|----------------------------|-------------------------|
| Heat         | u_t = k u_xx             | k in [1, 5]       | exp(-k t) sin x            | 0                       |
| PorousMedium | u_t = (u^m u_x)_x        | m in [2, 3]       | (m relu(t - x))^(1/m)      | (m t)^(1+1/m) / (m+1)   |
| Stefan       | u_t = (1[u >= u*] u_x)_x | u* in [0.6, 0.65] | 1 - c erf(x / (2 sqrt t)), | 2 c sqrt(t / pi),       |
|              |                          |                   | 0 from alpha sqrt(t) on    | while alpha sqrt(t) < 1 |
| Advection    | u_t + beta u_x = 0       | beta in [1, 2]    | 1[x <= 1/2 + beta t]       | min(1/2 + beta t, 1)    |
| Burgers      | u_t + (u^2 / 2)_x = 0    | a in [0.5, 1.5]   | a ramp; from t = 1/(2a) on | a (1/4 + a t / 2)       |
|              |                          |                   | a 1[x <= 1/4 + a t / 2]    |                         |

The heat equation lives on [0, 2 pi]. The others live on [0, 1] and are fronts that fall in x. Stefan has
``c = (1 - u*) / erf(alpha / 2)`` and, with ``r = alpha / 2``, ``(1 - u*) / sqrt(pi) = u* r erf(r) exp(r^2)``, the
Rankine-Hugoniot condition at its front. For Stefan and advection, the paper's mass is that of a domain without right
end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from probhard.errors import check_choice
from probhard.pde.base import Problem, Split

__all__ = ["PROBLEMS", "Advection", "Burgers", "Heat", "PorousMedium", "Problem", "Split", "Stefan"]

LAWS = ("exact", "paper")
NEWTON_STEPS = 40  # enough for any threshold: 5 suffice from 0.6 to 0.65, 29 at 1e-12 and at 1 - 1e-15
RAMP = 0.5  # where the falling ramp of Burgers' initial value ends


@dataclass(frozen=True)
class Heat(Problem):
    """The heat equation ``u_t = k u_xx`` with a sine as initial value: smooth, periodic, decaying."""

    name: ClassVar[str] = "heat"

    lower: float = 1.0
    upper: float = 5.0
    length: float = 2 * math.pi

    def solution(self, parameter: Tensor | float) -> Tensor:
        k, time, place = self._broadcast(parameter)
        return torch.exp(-k * time) * torch.sin(place)

    def mass(self, parameter: Tensor | float) -> Tensor:
        k, times = self._in_time(parameter)
        return torch.exp(-k * times) * (1 - math.cos(self.length))  # 0 on whole periods

    def bounds(self, parameter: Tensor | float) -> tuple[Tensor, Tensor]:
        k, time, _ = self._broadcast(parameter)
        height = torch.ones_like(k * time)  # the maximum principle; the decay is left to the model
        return -height, height


class _Front(Problem):
    """A front that falls from a positive value at the left to 0."""

    monotone: ClassVar[str | None] = "decreasing"

    def bounds(self, parameter: Tensor | float) -> tuple[Tensor, Tensor]:
        value, time, _ = self._broadcast(parameter)
        height = self._height(value, time)
        return torch.zeros_like(height), height

    def _height(self, value: Tensor, time: Tensor) -> Tensor:
        """The value at the left, (*batch, nt, 1)."""
        return torch.ones_like(value * time)


@dataclass(frozen=True)
class PorousMedium(_Front):
    """The porous medium equation ``u_t = (u^m u_x)_x``: a front with an infinite slope, moving at speed 1.

    The left boundary value is ``(m t)^(1/m)``; the front at x = t stays in the domain, so nothing flows out.
    """

    name: ClassVar[str] = "pme"
    reach: ClassVar[float] = 1.0

    lower: float = 2.0
    upper: float = 3.0

    def solution(self, parameter: Tensor | float) -> Tensor:
        m, time, place = self._broadcast(parameter)
        return power_of(m * (time - place), 1 / m)

    def mass(self, parameter: Tensor | float) -> Tensor:
        m, times = self._in_time(parameter)
        return power_of(m * times, 1 + 1 / m) / (m + 1)

    def _height(self, value: Tensor, time: Tensor) -> Tensor:
        return power_of(value * time, 1 / value)


@dataclass(frozen=True)
class Stefan(_Front):
    """The Stefan problem: heat that spreads only where ``u >= u*``, behind a jump from u* to 0 at ``alpha sqrt(t)``.

    The left boundary value is 1. For small u* the front leaves the domain before t = 1.

    Args:
        law: Rule for the mass: ``"exact"``, or ``"paper"``, which keeps growing after the front has left.
    """

    name: ClassVar[str] = "stefan"
    limit: ClassVar[float] = 1.0

    lower: float = 0.6
    upper: float = 0.65
    law: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("law", self.law, LAWS)

    def solution(self, parameter: Tensor | float) -> Tensor:
        threshold, time, place = self._broadcast(parameter)
        root, slope = _similarity(threshold)
        spread = 2 * time.sqrt()
        behind = place <= root * spread
        # x = t = 0 gives 0 / 0 and belongs to the left boundary
        profile = 1 - slope * torch.erf(place / spread.clamp(min=torch.finfo(self.dtype).tiny))
        return torch.where(behind, profile, 0.0)

    def mass(self, parameter: Tensor | float) -> Tensor:
        threshold, times = self._in_time(parameter)
        root, slope = _similarity(threshold)
        spread = 2 * times.sqrt()
        if self.law == "paper":
            return slope * spread / math.sqrt(math.pi)
        # Integral of the profile up to the front or to the end of the domain.
        end = torch.minimum(root, self.length / spread)
        return spread * (end * (1 - slope * torch.erf(end)) - slope * torch.expm1(-end.square()) / math.sqrt(math.pi))

    def jump(self, parameter: Tensor | float) -> tuple[Tensor, Tensor]:
        threshold, times = self._in_time(parameter)
        place = _similarity(threshold)[0] * (2 * times.sqrt())
        return place, torch.where(times > 0, threshold, 1.0)  # at t = 0 the entire profile is one jump


@dataclass(frozen=True)
class Advection(_Front):
    """Linear advection ``u_t + beta u_x = 0`` of a step from 1 to 0 that starts at x = 1/2; 1 flows in at the left.

    Args:
        law: Rule for the mass: ``"exact"``, or ``"paper"``, which keeps growing after the front has left.
    """

    name: ClassVar[str] = "advection"

    lower: float = 1.0
    upper: float = 2.0
    law: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("law", self.law, LAWS)

    def solution(self, parameter: Tensor | float) -> Tensor:
        beta, time, place = self._broadcast(parameter)
        return (place <= 0.5 + beta * time).to(self.dtype)

    def mass(self, parameter: Tensor | float) -> Tensor:
        beta, times = self._in_time(parameter)
        front = 0.5 + beta * times
        return front if self.law == "paper" else front.clamp(max=self.length)

    def jump(self, parameter: Tensor | float) -> tuple[Tensor, Tensor]:
        beta, times = self._in_time(parameter)
        place = 0.5 + beta * times
        return place, torch.ones_like(place)


@dataclass(frozen=True)
class Burgers(_Front):
    """Burgers' equation without viscosity: a ramp from a at x = 0 to 0 at x = 1/2 that steepens into a shock.

    The value a flows in at the left. The ramp spans [a t, 1/2] until it breaks at t = 1 / (2 a). Then the shock moves
    at speed a / 2, the mean of both sides. Up to a = 1.5 it stays in the domain.
    """

    name: ClassVar[str] = "burgers"
    reach: ClassVar[float] = RAMP

    lower: float = 0.5
    upper: float = 1.5

    def solution(self, parameter: Tensor | float) -> Tensor:
        height, time, place = self._broadcast(parameter)
        gap = RAMP - height * time
        broken = gap <= 0
        ramp = ((RAMP - place) / torch.where(broken, 1.0, gap)).clamp(0, 1)
        shock = (place <= (RAMP + height * time) / 2).to(self.dtype)
        return height * torch.where(broken, shock, ramp)

    def mass(self, parameter: Tensor | float) -> Tensor:
        height, times = self._in_time(parameter)
        return height * ((RAMP + height * times) / 2).clamp(max=self.length)

    def jump(self, parameter: Tensor | float) -> tuple[Tensor, Tensor]:
        height, times = self._in_time(parameter)
        return (RAMP + height * times) / 2, torch.where(height * times >= RAMP, height, 0.0)

    def _height(self, value: Tensor, time: Tensor) -> Tensor:
        return value.expand(torch.broadcast_shapes(value.shape, time.shape))


PROBLEMS: dict[str, type[Heat | PorousMedium | Stefan | Advection | Burgers]] = {
    Heat.name: Heat,
    PorousMedium.name: PorousMedium,
    Stefan.name: Stefan,
    Advection.name: Advection,
    Burgers.name: Burgers,
}


def _similarity(threshold: Tensor) -> tuple[Tensor, Tensor]:
    """``alpha / 2`` and c of the Stefan problem, solved in float64, with first derivatives in the threshold."""
    level = threshold.double()

    def step(root: Tensor) -> Tensor:
        # The condition at the front is divided by exp(r^2); otherwise steps overflow at small thresholds.
        decay, error = torch.exp(-root.square()) / math.sqrt(math.pi), torch.erf(root)
        balance = level * root * error - (1 - level) * decay
        return root - balance / (level * error + 2 * root * decay)

    with torch.no_grad():
        root = torch.ones_like(level)
        for _ in range(NEWTON_STEPS):
            root = step(root)
    root = step(root)  # at the solution, a Newton step has the derivative of the solution
    return root.to(threshold.dtype), ((1 - level) / torch.erf(root)).to(threshold.dtype)


def power_of(base: Tensor, exponent: Tensor) -> Tensor:
    """``relu(base)^exponent``, with value and gradient 0 where the base is not positive.

    Args:
        base: Any shape.
        exponent: Positive, broadcasting with the base.

    Returns:
        The powers, of the broadcast shape.
    """
    inside = base > 0
    # Both branches of where() enter the gradient, so the unused one must be finite: 1 replaces 0.
    return torch.where(inside, torch.where(inside, base, 1.0) ** exponent, 0.0)
