"""A constraint's parts by kind, in the simplest terms, for a known number of variables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probhard._util.tensors import broadcast_batch
from probhard.constraints.base import Constraint
from probhard.constraints.box import Box
from probhard.constraints.curved import NonlinearInequality
from probhard.constraints.equality import LinearEquality
from probhard.constraints.inequality import LinearInequality, Monotone
from probhard.constraints.intersection import Intersection
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.constraints.semicontinuous import Semicontinuous
from probhard.constraints.variation import TotalVariation, TotalVariationDiminishing, TotalVariationPenalty
from probhard.errors import ParameterError
from probhard.projection.base import TOLERANCE, Solution, Stats
from probhard.tangent import Differential

Shape = Monotone | TotalVariation | TotalVariationPenalty


@dataclass(frozen=True)
class Parts:
    """What there is to satisfy."""

    constraint: Constraint
    variables: int
    linear: LinearEquality | None = None
    nonlinear: NonlinearEquality | None = None
    box: Box | None = None
    inequalities: tuple[LinearInequality, ...] = ()
    shapes: tuple[Shape, ...] = ()
    curved: tuple[NonlinearInequality, ...] = ()
    diminishing: TotalVariationDiminishing | None = None
    convex_programs: tuple[Constraint, ...] = ()
    semicontinuous: tuple[Semicontinuous, ...] = ()

    def relative_violation(self, value: Tensor, z: Tensor) -> Tensor:
        """Of points projected from z that were clipped to their bounds, so that all but the bounds are looked at."""
        equalities = [part for part in (self.linear, self.nonlinear) if part is not None]
        parts = [*equalities, *self.inequalities, *self.shapes, *self.curved]
        if not parts:
            return value.new_zeros(value.shape[:-1])
        size = torch.maximum(z.abs().amax(-1, keepdim=True), value.abs().amax(-1, keepdim=True))
        found = [part.relative_violation(value, size) for part in parts]
        worst = found[0]
        for other in found[1:]:
            worst = torch.maximum(worst, other)
        return worst.nan_to_num(torch.inf)

    @property
    def only_equalities(self) -> bool:
        """Whether there is nothing but equalities."""
        return self.box is None and self.bounded_only

    @property
    def bounded_only(self) -> bool:
        """Whether bounds are the only inequalities."""
        sets = (
            self.inequalities,
            self.shapes,
            self.curved,
            self.diminishing,
            self.convex_programs,
            self.semicontinuous,
        )
        return self.diminishing is None and not any(sets)

    @property
    def polyhedral(self) -> bool:
        """Whether there is nothing curved."""
        return self.nonlinear is None and not (self.curved or self.diminishing or self.convex_programs)

    def finished(
        self, z: Tensor, value: Tensor, tangent: Differential, steps: Tensor, settled: Tensor, local: bool = False
    ) -> Solution:
        """Points in the precision of z, never rounded out of their bounds, with their status."""
        if z.dtype != value.dtype:
            value = value.to(z.dtype)
            lower, upper = self.bounds(value.detach())
            value = value + (value.clamp(lower, upper) - value).detach()
        residual = self.relative_violation(value.detach(), z.detach())
        converged = settled & (residual <= TOLERANCE[z.dtype])
        return Solution(value, tangent, Stats(steps, residual, converged, local))

    def check_batch(self, z: Tensor) -> None:
        """Raise unless the data of the parts broadcasts with points z."""
        data = [] if self.linear is None else [self.linear.b]
        data += [] if self.box is None else [x for x in (self.box.lower, self.box.upper) if x.dim()]
        data += [part.d for part in self.inequalities]
        data += [part.least for part in self.semicontinuous if part.least.dim()]
        functions = [] if self.nonlinear is None else [self.nonlinear]
        functions += [part.function for part in self.curved]
        data += [x for function in functions for x in function.args if isinstance(x, Tensor) and x.dim() > 1]
        for value in data:
            broadcast_batch(z.shape[:-1], value.shape[:-1], "the distribution", "the constraint")
        for shape in self.shapes:
            if not isinstance(shape, Monotone):
                broadcast_batch(z.shape[:-1], shape.amounts(z).shape[:-1], "the distribution", "the constraint")

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds (*batch, n) in the dtype of ``like``; infinite where there are none."""
        if self.box is None:
            lower = torch.full((self.variables,), -torch.inf, dtype=like.dtype, device=like.device)
            return lower, -lower
        lower, upper = self.box.lower.to(like), self.box.upper.to(like)
        return tuple(x.expand(*x.shape[:-1], self.variables) for x in (lower, upper))  # type: ignore[return-value]


def parts_of(constraint: Constraint, n: int) -> Parts:
    """The parts of a constraint on n variables."""
    resolved = constraint.resolve(n)
    parts = resolved.parts() if isinstance(resolved, Intersection) else (resolved,)
    linear = next((p for p in parts if isinstance(p, LinearEquality)), None)
    nonlinear = next((p for p in parts if isinstance(p, NonlinearEquality)), None)
    box = next((p for p in parts if isinstance(p, Box)), None)
    kinds: dict[Any, list[Any]] = {LinearInequality: [], Shape: [], NonlinearInequality: [], Semicontinuous: []}
    diminishing: TotalVariationDiminishing | None = None
    programs: list[Constraint] = []
    for part in parts:
        if isinstance(part, LinearEquality | NonlinearEquality | Box):
            continue
        kind = next((k for k in kinds if isinstance(part, k)), None)
        if kind is not None:
            kinds[kind].append(part)
        elif isinstance(part, TotalVariationDiminishing):
            diminishing = part
        elif hasattr(part, "compiled"):
            programs.append(part)
        else:
            raise ParameterError(
                f"DPPL got a {type(part).__name__} as its constraint.",
                "It is not a constraint that a projector knows.",
                "Pass constraints of this library, or several joined by '&'.",
            )
    inequalities, shapes, curved, phases = (tuple(parts) for parts in kinds.values())
    sets = (inequalities, shapes, curved, diminishing, tuple(programs), phases)
    return Parts(constraint, n, linear, nonlinear, box, *sets)
