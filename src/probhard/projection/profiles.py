"""Projection on monotone profiles and profiles of bounded or penalised variation, under a diagonal weight.

    u* = argmin |u - z|_Q^2 / 2 (+ amount TV(u))   subject to  a shape,  lower <= u <= upper,  mass <= a . u <= most.

``solvers.profiles`` computes the points. Their runs of equal values ("groups") are constant near a solution, which
gives the closed form, with the symbols of ``tangent.profiles``,

    u = F M (z - amount W s) + bounds - B S^-1 (C^T F M (z - amount W s) + C^T bounds - (mass, amount)).

Only a penalty has the term ``amount W s``. Gradients are those of the closed form. Weights below 1e-12 of the largest
of a profile are raised to that, so a variable without variance moves only if it must. Weights that are all 0 count as
equal. The zeros of semicontinuous values (``solvers.profiles.phases``) are constant, too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from probhard._util.numerics import TOLERANCE, floored
from probhard._util.tensors import broadcast
from probhard.errors import InfeasibleError, ParameterError, ProbhardError, ShapeError, check_choice
from probhard.laws.covariance import Diagonal
from probhard.projection.base import Projector, Solution, Stats
from probhard.tangent.profiles import PooledTangent, Pooling

SHAPES = ("increasing", "decreasing", "tv-penalty", "tv-bound")  # in the order of the kernels' numbers
ATTAINED = {torch.float64: 1e-12, torch.float32: 1e-6}  # relative gap up to which a mass counts as attained


@dataclass(frozen=True)
class ProfileSet:
    """The profiles to project on; numbers broadcast with (*lead,), the row with (*lead, nx)."""

    shape: str  # one of SHAPES
    amount: Tensor | None = None  # bound or penalty of TV
    lower: Tensor | None = None
    upper: Tensor | None = None
    mass: Tensor | None = None  # a . u = mass; with ``most`` the least a . u
    row: Tensor | None = None  # a
    most: Tensor | None = None
    least: Tensor | None = None  # smallest nonzero value of semicontinuous profiles

    def double(self) -> ProfileSet:
        """The same set in float64."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        numbers: dict[str, Any] = {name: x.to(torch.float64) for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **numbers)

    @property
    def numbers(self) -> tuple[Tensor | None, ...]:
        """Amount, lower and upper bound, least and largest mass."""
        return self.amount, self.lower, self.upper, self.mass, self.mass if self.most is None else self.most

    @property
    def may_vanish(self) -> Tensor:
        """Whether 0 lies within the bounds."""
        allowed = torch.tensor(True) if self.lower is None else self.lower <= 0
        return allowed if self.upper is None else allowed & (self.upper >= 0)

    @property
    def nonzero_lower(self) -> Tensor | None:
        """Lower bound of nonzero values."""
        if self.least is None or self.lower is None:
            return self.lower if self.least is None else self.least
        return torch.maximum(self.lower, self.least)


def project_points(
    profiles: ProfileSet,
    z: Tensor,  # (*lead, nx), float64
    weight: Tensor,  # (*lead, nx)
    tolerance: float = 1e-12,
) -> tuple[Tensor, Pooling, Tensor]:
    """Project profiles on a set.

    Args:
        profiles: The set.
        z: Points to project, (*lead, nx), in float64.
        weight: Metric weights, broadcasting with z.
        tolerance: Relative gap of the row that counts as 0, for semicontinuous values.

    Returns:
        The projected profiles with their gradients (*lead, nx), their tangent, and residual and gap (*lead, 2) of the
        row. The values are those of the kernels, feasible to rounding.
    """
    from probhard.solvers.profiles import phases  # imports numba, which only profiles need

    top = weight.detach().amax(-1, keepdim=True)
    weight = torch.where(top > 0, floored(weight), 1.0)
    value, first, side, edge, binds, residual = _solved(profiles, z, weight, tolerance)
    profiles = replace(profiles, lower=profiles.nonzero_lower)
    if profiles.row is not None and profiles.least is not None:
        profiles = replace(profiles, row=torch.where(side == phases.ZERO, 0.0, profiles.row))
    rows: list[tuple[Tensor | None, Tensor]] = [] if profiles.row is None else [(profiles.row, binds[..., :1])]
    if profiles.shape == "tv-bound":
        rows.append((None, binds[..., 1:]))
    pooled = Pooling(weight.expand(value.shape), first, side, edge, rows)
    return _attached(profiles, pooled, z, weight, value), pooled, residual


def _solved(profiles: ProfileSet, z: Tensor, weight: Tensor, tolerance: float) -> list[Tensor]:
    """The results of the kernels over (*lead): values, first points of groups, sides, edges, binds and residuals."""
    from probhard.solvers.profiles import phases, pooling

    raised = replace(profiles, lower=profiles.nonzero_lower)
    vectors = (z, weight) if raised.row is None else (z, weight, raised.row)
    lead = broadcast(*[x.shape[:-1] for x in vectors], *[x.shape for x in raised.numbers if x is not None])
    line = z.new_empty(*z.shape[:-1], 0) if raised.row is None else raised.row
    points, weights, lines = (_numpy(x, lead, x.shape[-1]) for x in (z, weight, line))
    ends = zip(raised.numbers, (0.0, -torch.inf, torch.inf, 0.0, 0.0))
    amount, lower, upper, mass, most = (_numpy(z.new_tensor(end) if x is None else x, lead) for x, end in ends)
    kind = SHAPES.index(raised.shape)
    if profiles.least is None:
        results = pooling.solve(kind, points, weights, amount, lower, upper, lines, mass, most)
    else:
        may_vanish = profiles.may_vanish.cpu().expand(lead).reshape(-1).contiguous().numpy()
        limits = (lower, upper, mass, most)
        results = phases.solve(kind, points, weights, lines, limits, may_vanish, tolerance)
    tensors = [torch.from_numpy(x).to(z.device) for x in results]
    return [x.reshape(*lead, x.shape[-1]) for x in tensors]


def _attached(profiles: ProfileSet, pooled: Pooling, z: Tensor, weight: Tensor, value: Tensor) -> Tensor:
    """Attach gradients: by the tangent if only z requires them, else by the closed form."""
    if not torch.is_grad_enabled():
        return value
    others = (weight, profiles.row, *profiles.numbers)
    if any(x is not None and x.requires_grad for x in others):
        mass, most, row = profiles.mass, profiles.most, profiles.row
        if mass is not None and most is not None and row is not None:  # the end at which the row may bind
            mass = torch.where(2 * (row * value).sum(-1) > mass + most, most, mass)
        near = _closed_form(replace(profiles, mass=mass), pooled, z)
        return value + (near - near.detach())
    return cast(Tensor, Attached.apply(z.expand(value.shape), value, pooled)) if z.requires_grad else value


class Attached(torch.autograd.Function):
    """Values as a function of the points alone, whose derivative is the tangent."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, value: Tensor, pooled: Pooling) -> Tensor:
        """Return the values and save the groups for the backward pass."""
        ctx.pooled = pooled
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """``T^T g``."""
        return ctx.pooled.transpose(gradients[0]), None, None


def _closed_form(profiles: ProfileSet, pooled: Pooling, z: Tensor) -> Tensor:
    """The solution as a differentiable function of all data, for fixed groups."""
    u, amount = pooled.average(z), profiles.amount
    if profiles.shape == "tv-penalty" and amount is not None:
        u = u - amount.unsqueeze(-1) * pooled.free * pooled.total(pooled.sign) / pooled.mass
    for bound, number in ((profiles.lower, -1), (profiles.upper, 1)):
        u = u if bound is None else torch.where(pooled.side == number, bound.unsqueeze(-1), u)
    targets = [x for x in (profiles.mass, amount if profiles.shape == "tv-bound" else None) if x is not None]
    return pooled.balanced(u, targets)


class PooledProjector(Projector):
    """Projects on profiles that are monotone or of bounded or penalised variation, with uniform bounds and one row.

    Numbers broadcast with (*samples, *batch, slices). ``slices`` is the number of profiles in a point.

    Args:
        profiles: The set; its row a is (nx,) or (*batch, nx). With ``least`` it is not convex.
        weight: Metric weight over (*batch, n), ``n = slices nx``.
        slices: Number of profiles in a point.

    Raises:
        ParameterError, ShapeError: Arguments are unknown, missing or do not fit.
    """

    moments_from = "monte-carlo"

    def __init__(self, profiles: ProfileSet, weight: Diagonal, slices: int = 1) -> None:
        shape, amount, row, mass = profiles.shape, profiles.amount, profiles.row, profiles.mass
        check_choice("shape", shape, SHAPES)
        if (amount is None and shape.startswith("tv")) or (row is None) != (mass is None):
            raise ParameterError(
                f"A projector on {shape!r} got amount={amount}, row={row}, mass={mass}.",
                "A bound or penalty of the variation needs its amount, and a row needs its mass.",
                "Pass the amount, and both row and mass or neither.",
            )
        if weight.shape[-1] % slices:
            raise ShapeError(
                f"{weight.shape[-1]} variables cannot be cut into {slices} profiles.",
                "All profiles of a point have the same number of points.",
                "Pass the number of slices that the field has.",
            )
        self.slices, self.weight, self.local = slices, weight, profiles.least is not None
        self.profiles = profiles.double()
        if row is not None and row.dim() > 1:
            self.profiles = replace(self.profiles, row=row.to(torch.float64).unsqueeze(-2))

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        points, weight = (x.to(torch.float64).unflatten(-1, (self.slices, -1)) for x in (z, self.weight.variance))
        value, pooled, residual = project_points(self.profiles, points, weight, ATTAINED[z.dtype])
        stats = stats_of(value, residual, z.dtype)
        low, high = self.profiles.nonzero_lower, self.profiles.upper
        lower, upper = (None if x is None else x.unsqueeze(-1) for x in (low, high))
        if self.profiles.least is not None:
            assert lower is not None
            lower = torch.where(value == 0, 0.0, lower)
        return Solution(rounded(value, z.dtype, lower, upper).flatten(-2), PooledTangent(pooled), stats)

    def explain(self, z: Tensor, stats: Stats) -> ProbhardError | None:
        if self.profiles.least is None or not bool(z.isfinite().all()):
            return None
        bad, (low, high) = ~stats.converged, (float(x) for x in self.profiles.least.detach().aminmax())
        values = f"0 or at least {low:.6g}{'' if low == high else f' (up to {high:.6g})'}"
        if self.profiles.mass is None:
            return InfeasibleError(
                f"In {int(bad.sum())} of {bad.numel()} points the bounds leave no values that are {values}.",
                "They exclude 0 and end below the least value.",
                "Relax the bounds, or lower the least value.",
            )
        return InfeasibleError(
            f"In {int(bad.sum())} of {bad.numel()} points no values that are {values} and within their bounds have the "
            "sum that is asked for.",
            "The sum is too small with some number of nonzero values, and too large with one more.",
            "Lower the least value, or correct the sum: Conservation.trapezoid(grid, mass, jump=(place, fall)) is the "
            "trapezoid sum of a jump between two grid points; in problem.physics, use mass='jump'.",
        )


def stats_of(value: Tensor, residual: Tensor, dtype: torch.dtype) -> Stats:
    """Status of projected fields.

    Args:
        value: Fields, (*lead, slices, nx).
        residual: Residual and gap of the row of each profile, (*lead, slices, 2).
        dtype: The precision that was asked for, which sets the tolerance.

    Returns:
        The status, over (*lead).
    """
    good = (residual[..., 0] <= TOLERANCE[dtype]) & (residual[..., 1] <= ATTAINED[dtype])
    converged = (good & value.detach().isfinite().all(-1)).all(-1)
    return Stats(torch.ones_like(converged, dtype=torch.int64), residual[..., 0].amax(-1).to(dtype), converged)


def rounded(value: Tensor, dtype: torch.dtype, lower: Tensor | None, upper: Tensor | None) -> Tensor:
    """Round values to a precision, without leaving their bounds.

    Args:
        value: Values, (*lead, slices, nx).
        dtype: The precision.
        lower: Lower bounds that broadcast with the values, or None.
        upper: Upper bounds, or None.
    """
    if value.dtype == dtype:
        return value
    value = value.to(dtype)
    low, high = (None if x is None else x.detach().to(dtype) for x in (lower, upper))
    inside = value.detach()
    inside = inside if low is None else torch.maximum(inside, low)
    inside = inside if high is None else torch.minimum(inside, high)
    return value + (inside - value.detach())


def _numpy(x: Tensor, lead: torch.Size, *event: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A contiguous float64 array, the leading dimensions flattened to one."""
    x = x.detach().to("cpu", torch.float64).expand((*lead, *event))
    return x.reshape((lead.numel(), *event)).contiguous().numpy()
