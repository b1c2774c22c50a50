"""Direct methods of profiles: what bounds and rows must be for each, and errors where nothing else serves.

A profile is a slice of the variables in order. The direct methods want the same bounds along a profile and at most one
row for each, the same for all profiles. Other monotone and TV shapes go to active sets.
"""

from __future__ import annotations

import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.tensors import checking
from probhard.constraints.monotone import Monotone
from probhard.constraints.shapes import Profiles, profiles
from probhard.errors import ParameterError
from probhard.laws.covariance import Covariance, Diagonal
from probhard.projection.base import Options, Projector
from probhard.projection.diagnosis import check_capacity, check_sides
from probhard.projection.diminishing import DiminishingProjector
from probhard.projection.parts import Parts
from probhard.projection.polyhedral import FaceProjector
from probhard.projection.profiles import ATTAINED, PooledProjector, ProfileSet
from probhard.rows.disjoint import DisjointRows

Row = tuple[Tensor | None, Tensor | None, Tensor | None]  # coefficients, mass, largest mass or None
Profile = tuple[Tensor | None, ...]  # lower and upper bounds, coefficients of the row, mass, largest mass or None


def pooled(parts: Parts, weight: Diagonal, options: Options) -> Projector:
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


def semicontinuous(parts: Parts, weight: Covariance, options: Options) -> PooledProjector:
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


def diminishing(parts: Parts, weight: Covariance, options: Options) -> DiminishingProjector:
    """Fields whose total variation diminishes, with bounds of the whole field and nothing else."""
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
