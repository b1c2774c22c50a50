"""The parts of a constraint by role, resolved for a known number of variables."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from probhard._util.tensors import broadcast, checking
from probhard.constraints.base import Constraint
from probhard.constraints.box import Box
from probhard.constraints.cones import Cone
from probhard.constraints.convex_program import ConvexProgram
from probhard.constraints.equality import LinearEquality
from probhard.constraints.inequality import LinearInequality
from probhard.constraints.nonlinear import NonlinearEquality, NonlinearInequality
from probhard.constraints.semicontinuous import Semicontinuous
from probhard.constraints.shapes import Shape
from probhard.constraints.variation import TotalVariationDiminishing
from probhard.errors import ParameterError

SINGLE = ("linear", "nonlinear", "box", "diminishing")  # roles with at most one part


@dataclass(frozen=True)
class Parts:
    """The parts of a constraint, one field per role."""

    constraint: Constraint
    variables: int
    batch_shape: torch.Size = torch.Size()  # noqa: RUF009 - of the data of all parts
    linear: LinearEquality | None = None
    nonlinear: NonlinearEquality | None = None
    box: Box | None = None
    inequalities: tuple[LinearInequality, ...] = ()
    shapes: tuple[Shape, ...] = ()
    curved: tuple[NonlinearInequality, ...] = ()
    cones: tuple[Cone, ...] = ()
    diminishing: TotalVariationDiminishing | None = None
    convex_programs: tuple[ConvexProgram, ...] = ()
    semicontinuous: tuple[Semicontinuous, ...] = ()
    kept: dict[Any, Any] | None = field(default=None, compare=False)  # cache; None if the data is not constant

    @property
    def only_equalities(self) -> bool:
        """Whether all parts are equalities."""
        return self.box is None and self.bounded_only

    @property
    def bounded_only(self) -> bool:
        """Whether bounds are the only inequalities."""
        sets = (self.inequalities, self.shapes, self.curved, self.cones, self.convex_programs, self.semicontinuous)
        return self.diminishing is None and not any(sets)

    @property
    def polyhedral(self) -> bool:
        """Whether no part is curved."""
        curved = self.curved or self.cones or self.convex_programs
        return self.nonlinear is None and self.diminishing is None and not curved

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds (*batch, n) in the dtype of ``like``; infinite where there are none."""
        if self.box is None:
            lower = torch.full((self.variables,), -torch.inf, dtype=like.dtype, device=like.device)
            return lower, -lower
        lower, upper = self.box.lower.to(like), self.box.upper.to(like)
        return lower.expand(*lower.shape[:-1], self.variables), upper.expand(*upper.shape[:-1], self.variables)


ROLES = {field.name for field in fields(Parts)} - {"constraint", "variables", "batch_shape", "kept"}


def parts_of(constraint: Constraint, n: int) -> Parts:
    """The parts of a constraint on n variables.

    Args:
        constraint: The constraint.
        n: Number of variables.

    Raises:
        ParameterError: A part has a role that no projector handles.
    """
    groups: dict[str, list[Any]] = {}
    for part in constraint.resolve(n).parts():
        if part.role not in ROLES:
            raise ParameterError(
                f"DPPL got a {type(part).__name__} as its constraint.",
                "No projector handles it.",
                "Pass constraints of probhard, or several joined by '&'.",
            )
        groups.setdefault(part.role, []).append(part)
    by_role: dict[str, Any] = {role: group[0] if role in SINGLE else tuple(group) for role, group in groups.items()}
    data = constraint.data()
    constant = checking() and not any(x.requires_grad or x.is_inference() for x in data)
    shape = broadcast((), *(x.shape[:-1] for x in data))
    return Parts(constraint, n, shape, **by_role, kept={} if constant else None)
