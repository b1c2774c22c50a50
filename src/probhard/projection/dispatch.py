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
from dataclasses import dataclass
from typing import Any

import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.tensors import broadcast_batch, checking
from probhard.constraints.ball import Ball
from probhard.constraints.base import Constraint
from probhard.constraints.intersection import check_constraint
from probhard.constraints.monotone import Monotone
from probhard.constraints.shapes import Profiles, profiles
from probhard.errors import ParameterError
from probhard.laws.covariance import Covariance, Diagonal, Factored
from probhard.projection.ball import BallProjector
from probhard.projection.base import Options, Projector
from probhard.projection.cones import ConeProjector
from probhard.projection.convex_program import ProgramProjector
from probhard.projection.coupled import CoupledProjector
from probhard.projection.curved import CurvedProjector
from probhard.projection.diagnosis import check_capacity, check_sides
from probhard.projection.diminishing import DiminishingProjector
from probhard.projection.factored import FactoredProjector
from probhard.projection.iterated import IteratedProjector, iterated
from probhard.projection.lifting import shared
from probhard.projection.linear import LinearProjector
from probhard.projection.mean_field import MeanField
from probhard.projection.nonlinear import NonlinearProjector
from probhard.projection.parts import Parts, parts_of
from probhard.projection.polyhedral import FaceProjector
from probhard.projection.profiles import ATTAINED, PooledProjector, ProfileSet
from probhard.projection.reduced import reduced
from probhard.projection.threshold_field import ThresholdField
from probhard.rows.disjoint import DisjointRows

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
        own = Diagonal(weight.diagonal_part)
        inner = reduced(plan.parts, own, options) or _routed(plan, own, options)
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
        return _phases
    if parts.convex_programs:
        return ProgramProjector
    if parts.diminishing is not None:
        return _diminishing
    if not parts.polyhedral:
        curved = BallProjector if diagonal and _only_ball(parts) else CurvedProjector
        return ConeProjector if parts.cones else curved
    if not diagonal or not shared(parts):
        return CoupledProjector
    return _pooled if len(parts.shapes) == 1 and isinstance(parts.shapes[0], Profiles) else FaceProjector


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


def _pooled(parts: Parts, weight: Diagonal, options: Options) -> Projector:
    """The direct method of one shape if its bounds and rows allow it, else active sets."""
    (shape,) = parts.shapes
    assert isinstance(shape, Profiles)
    like = weight.variance.new_empty(0, dtype=torch.float64)
    profile = _profile(parts, shape.slices, like, options) if checking() else None
    if profile is None:
        return FaceProjector(parts, weight, options)
    lower, upper, a, mass, most = profile
    set_ = ProfileSet(shape.pooled_as, shape.amounts(like), lower, upper, mass, a, most)
    return PooledProjector(set_, weight, shape.slices)


def _phases(parts: Parts, weight: Covariance, options: Options) -> PooledProjector:
    """Semicontinuous values: each a profile of one point, or along monotone profiles."""
    alone = parts.linear is None and not (parts.inequalities or parts.shapes)
    shapes = (Monotone(slices=parts.variables),) if alone else parts.shapes
    others = bool(parts.curved or parts.cones or parts.convex_programs)
    others = others or parts.nonlinear is not None or parts.diminishing is not None
    if isinstance(weight, Diagonal) and not others and len(shapes) == 1 and isinstance(shapes[0], Monotone):
        like = weight.variance.new_empty(0, dtype=torch.float64)
        direction, slices = shapes[0].direction, shapes[0].slices
        least, profile = _least(parts, slices, like), _profile(parts, slices, like, options)
        if least is not None and profile is not None and (profile[2] is None or bool((profile[2] >= 0).all())):
            lower, upper, a, mass, most = profile
            if upper is not None and parts.box is not None:  # equal up to rounding to the lower precision
                data = (weight.variance, parts.box.upper, *(part.least for part in parts.semicontinuous))
                close = max(ATTAINED[x.dtype] for x in data)
                least = torch.where((least > upper) & (least - upper <= close * least), upper, least)
            set_ = ProfileSet(direction, None, lower, upper, mass, a, most, least)
            return PooledProjector(set_, weight, slices)
    raise ParameterError(
        f"Semicontinuous values are part of {parts.constraint!r}, under a metric of the kind {type(weight).__name__}.",
        "The solver needs monotone profiles under a diagonal metric. Each profile has one least value, uniform bounds "
        "and at most one row of non-negative weights, the same for all profiles.",
        "Join Semicontinuous with one Monotone, a Box, and a Conservation or LinearInequality.between per profile, or "
        "use it alone.",
    )


Profile = tuple[Tensor | None, ...]  # lower and upper bounds, coefficients of the row, mass, largest mass or None


def _profile(parts: Parts, slices: int, like: Tensor, options: Options) -> Profile | None:
    """Bounds and row of each profile, checked; None if there is no direct method for them."""
    if parts.inequalities and parts.linear is not None:
        return None
    bounds = _uniform(parts, slices, like)
    row = _two_sided(parts, slices, like) if parts.inequalities else _one_row(parts, slices, like)
    if bounds is None or row is None:
        return None
    _, mass, most = row
    if options.validate:
        check_capacity(parts, like)
        if mass is not None and most is not None:
            check_sides(mass.detach(), most.detach())
    return (*bounds, *row)


def _least(parts: Parts, slices: int, like: Tensor) -> Tensor | None:
    """Smallest nonzero value of each profile (*batch, slices); None if it differs along a profile."""
    least = parts.semicontinuous[0].least.to(like)
    for part in parts.semicontinuous[1:]:
        least = torch.maximum(least, part.least.to(like))
    profile = profiles(least.expand(*least.shape[:-1], parts.variables), slices)
    return None if bool((profile != profile[..., :1]).any()) else profile[..., 0]


def _uniform(parts: Parts, slices: int, like: Tensor) -> tuple[Tensor | None, Tensor | None] | None:
    """Bounds of each profile (*batch, slices); None if they differ along a profile."""
    if parts.box is None:
        return None, None
    ends = []
    for bound in parts.bounds(like):
        profile = bound.unflatten(-1, (slices, -1))
        if bool((profile != profile[..., :1]).any()):
            return None
        ends.append(profile[..., 0])
    return ends[0], ends[1]


Row = tuple[Tensor | None, Tensor | None, Tensor | None]  # coefficients, mass, largest mass or None


def _two_sided(parts: Parts, slices: int, like: Tensor) -> Row | None:
    """The row a of each profile with ``a . u <= d`` and ``-a . u <= e``; None for other rows."""
    matrix = parts.inequalities[0].prepared.matrix
    if len(parts.inequalities) > 1 or matrix is None or matrix.shape[0] != 2 * slices:
        return None
    first = matrix[:1, : matrix.shape[1] // slices]
    if (matrix != sp.kron(sp.eye_array(slices), sp.vstack([first, -first]))).nnz:
        return None
    most, least = parts.inequalities[0].d.to(like).unflatten(-1, (slices, 2)).unbind(-1)
    return torch.from_numpy(first.toarray()[0]).to(like), -least, most


def _one_row(parts: Parts, slices: int, like: Tensor) -> Row | None:
    """The row of each profile and its mass (*batch, slices); None for other rows."""
    if parts.linear is None:
        return None, None, None
    system = parts.linear.system
    core = system.core
    plain = system.pins is None and system.held is None and system.transform is None and system.kept is None
    if not (plain and isinstance(core, DisjointRows) and core.group is None and core.row_count == slices):
        return None
    if core.batch_dims:
        return None
    row = core.split_coefficient().to(like)
    if row.dim() == 1:
        return row, parts.linear.b.to(like), None
    return None if bool((row != row[:1]).any()) else (row[0], parts.linear.b.to(like), None)


def _diminishing(parts: Parts, weight: Covariance, options: Options) -> DiminishingProjector:
    assert parts.diminishing is not None
    equalities = parts.linear is not None or parts.nonlinear is not None
    others = equalities or parts.inequalities or parts.shapes or parts.curved or parts.cones
    like = weight.diagonal().new_empty(0, dtype=torch.float64)
    bounds = _uniform(parts, 1, like)
    if others or bounds is None or not isinstance(weight, Diagonal):
        raise ParameterError(
            f"Total variation diminishing was joined with others in {parts.constraint!r}, or got a coupled metric.",
            "It is projected slice by slice, which allows only bounds of the whole field and a diagonal metric.",
            "Use per_slice(TotalVariation(bound), shape), a convex set that joins with any other.",
        )
    lower, upper = (None if x is None else x[..., 0] for x in bounds)
    return DiminishingProjector(parts.diminishing.shape, lower, upper, weight)
