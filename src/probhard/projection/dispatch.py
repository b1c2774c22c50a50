"""The dispatch table: which projector handles which parts. The choice depends on the data, not on the class.

| parts                                                          | projector                | method                |
|----------------------------------------------------------------|--------------------------|-----------------------|
| linear equalities                                              | ``LinearProjector``      | closed form           |
| nonlinear equalities, with linear ones or without              | ``NonlinearProjector``   | SQP                   |
| anything with a ConvexProgram                                  | ``ProgramProjector``     | cone solver, polished |
| total variation diminishing, and bounds of the field           | ``DiminishingProjector`` | taut strings in time  |
| one monotone or TV shape, bounds, a row each (also two-sided)  | ``PooledProjector``      | pooling, taut string  |
| semicontinuous values, alone or as one monotone shape          | ``PooledProjector``      | branch and bound      |
| one ball                                                       | ``BallProjector``        | root of one equation  |
| bounds, rows over disjoint variables                           | ``FaceProjector``        | root per row          |
| bounds, shared dense rows, also under one constant weight      | ``ReducedProjector``     | pivoting of rows      |
| bounds, other shared rows, shapes                              | ``FaceProjector``        | active sets           |
| the same under weights ``D + G G^T``                           | ``FactoredProjector``    | Newton over D         |
| the same under dense weights, or with rows per batch element   | ``CoupledProjector``     | active sets, dense    |
| cones with rows, bounds and balls                              | ``ConeProjector``        | eigenvalues, ALM      |
| curved functions with anything polyhedral                      | ``CurvedProjector``      | SQP over active sets  |
| polyhedral sets but for rows or bounds alone, ``iterations=K`` | ``IteratedProjector``    | ADMM, faces           |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from probhard._util.tensors import broadcast_batch, checking
from probhard.constraints.ball import Ball
from probhard.constraints.base import Constraint
from probhard.constraints.intersection import check_constraint
from probhard.constraints.shapes import Profiles
from probhard.laws.covariance import Covariance, Diagonal, Factored
from probhard.projection.ball import BallProjector
from probhard.projection.base import Options, Projector
from probhard.projection.cones import ConeProjector
from probhard.projection.convex_program import ProgramProjector
from probhard.projection.coupled import CoupledProjector
from probhard.projection.curved import CurvedProjector
from probhard.projection.factored import FactoredProjector
from probhard.projection.iterated import IteratedProjector, iterated
from probhard.projection.lifting import shared
from probhard.projection.linear import LinearProjector
from probhard.projection.mean_field import MeanField
from probhard.projection.nonlinear import NonlinearProjector
from probhard.projection.parts import Parts, parts_of
from probhard.projection.polyhedral import FaceProjector
from probhard.projection.profile_dispatch import diminishing, pooled, semicontinuous
from probhard.projection.reduced import reduced
from probhard.projection.threshold_field import ThresholdField

REGULAR = 1e-8  # smallest share of independent noise in a variance; below it, weights are solved densely
FEW = 64  # variables up to which weights with zeros are solved densely, which is quicker


@dataclass(frozen=True)
class Plan:
    """The parts of a constraint for n variables, cached until its data are changed in place.

    Args:
        parts: The parts.
        data: The data of the constraint.
        versions: torch's version of each tensor of the data, which every change in place increases.
        routes: The projectors, by whether the weight is diagonal.
    """

    parts: Parts
    data: tuple[Tensor, ...]
    versions: tuple[int, ...]
    routes: dict[bool, Route]

    @property
    def current(self) -> bool:
        """Whether no data has been changed in place."""
        return all(x._version == version for x, version in zip(self.data, self.versions))


Route = Callable[[Parts, Any, Options], Projector]


def projector_of(constraint: Constraint, z: Tensor, weight: Covariance, options: Options) -> Projector:
    """The projector of a constraint for points like z.

    Args:
        constraint: What to project on.
        z: Points (*samples, *batch, n), for their shape.
        weight: W of the metric.
        options: Options of the layer.

    Raises:
        ParameterError: No method handles these parts together, or under this metric.
        ShapeError: Points and constraint do not fit.
        InfeasibleError: The constraint is empty and ``options.validate`` is set.
    """
    plan = _plan(constraint, z)
    broadcast_batch(z.shape[:-1], plan.parts.batch_shape, "the distribution", "the constraint")
    if options.iterations is not None and iterated(plan.parts):
        return IteratedProjector(plan.parts, weight, options)
    projector = _chosen(plan, weight, options)
    rules = (ThresholdField(plan.parts, weight, projector), MeanField(plan.parts, weight, options.oblique))
    projector.mean_field = tuple(rule for rule in rules if rule.served)
    return projector


def _chosen(plan: Plan, weight: Covariance, options: Options) -> Projector:
    """The direct method of shared dense rows or of factored weights, else the projector by the table."""
    direct = reduced(plan.parts, weight, options)
    if direct is None and _factored(plan.parts, weight):
        assert isinstance(weight, Factored)
        own, plain = Diagonal(weight.diagonal_part), replace(options, last_resort=False)
        inner = reduced(plan.parts, own, plain) or _routed(plan, own, plain)
        return FactoredProjector(inner, plan.parts, weight, options)
    return direct or _routed(plan, weight, options)


def _routed(plan: Plan, weight: Covariance, options: Options) -> Projector:
    """The projector by the table, without regard to the factors of a weight."""
    diagonal = isinstance(weight, Diagonal)
    if diagonal not in plan.routes:
        plan.routes[diagonal] = _route(plan.parts, diagonal)
    return plan.routes[diagonal](plan.parts, weight, options)


def _factored(parts: Parts, weight: Covariance) -> bool:
    """Whether a polyhedral set has a projector for the diagonal part of the weight, which is regular."""
    suits = parts.polyhedral and not parts.only_equalities and not parts.semicontinuous and shared(parts)
    if not isinstance(weight, Factored) or not suits or not checking():
        return False
    if parts.variables <= FEW and bool((weight.diagonal() == 0).any()):
        return False
    return bool((weight.diagonal_part >= REGULAR * weight.diagonal()).all())


def _plan(constraint: Constraint, z: Tensor) -> Plan:
    """The plan for points like z, cached on the constraint if its data are constant."""
    n = z.shape[-1] if z.dim() else 0
    known = constraint.plans.get(n) if isinstance(constraint, Constraint) and checking() else None
    if known is not None and known.current:
        return known
    check_constraint(constraint, "DPPL")
    constraint.check_event(z, "The distribution")
    parts = parts_of(constraint, n)
    if parts.kept is None:
        return Plan(parts, (), (), {})
    data = constraint.data()
    plan = constraint.plans[n] = Plan(parts, data, tuple(x._version for x in data), {})
    return plan


def _route(parts: Parts, diagonal: bool) -> Route:
    """The table above."""
    if parts.only_equalities:
        return _linear if parts.nonlinear is None else _nonlinear
    if parts.semicontinuous:
        return semicontinuous
    if parts.convex_programs:
        return ProgramProjector
    if parts.diminishing is not None:
        return diminishing
    if not parts.polyhedral:
        curved = BallProjector if diagonal and _only_ball(parts) else CurvedProjector
        return ConeProjector if parts.cones else curved
    if not diagonal or not shared(parts):
        return CoupledProjector
    return pooled if len(parts.shapes) == 1 and isinstance(parts.shapes[0], Profiles) else FaceProjector


def _linear(parts: Parts, weight: Covariance, options: Options) -> LinearProjector:
    assert parts.linear is not None
    return LinearProjector(parts.linear, weight, options)


def _nonlinear(parts: Parts, weight: Covariance, options: Options) -> NonlinearProjector:
    assert parts.nonlinear is not None
    return NonlinearProjector(parts.linear, parts.nonlinear, weight, options)


def _only_ball(parts: Parts) -> bool:
    alone = all(part is None for part in (parts.linear, parts.nonlinear, parts.box)) and not parts.inequalities
    alone = alone and not parts.shapes
    return alone and len(parts.curved) == 1 and isinstance(parts.curved[0], Ball)
