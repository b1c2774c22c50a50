"""Monotone profiles and profiles of little variation: points by ``solvers.pooling``, derivatives in closed form.

Near a solution the runs of equal values stay, and with the symbols of ``groups``

    u = F M (z - amount W s) + bounds - B S^-1 (C^T F M (z - amount W s) + C^T bounds - (mass, amount)),

the term ``amount W s`` for a penalty only. A weight below 1e-12 of the profile's largest is taken as that, so that a
variable without variance moves only if it must; weights that are all 0 count as equal. Of values that are 0 or not
small (``solvers.phases``), the zeros stay too.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from probhard._util.numerics import TOLERANCE
from probhard._util.tensors import broadcast
from probhard.errors import InfeasibleError, ParameterError, ProbhardError, ShapeError, check_choice
from probhard.laws.covariance import Diagonal
from probhard.projection.base import Projector, Solution, Stats
from probhard.tangent.profiles import PooledTangent, Pooling

SHAPES = ("increasing", "decreasing", "tv-penalty", "tv-bound")  # in the order of the kernels' numbers
SMALLEST = 1e-12  # weight relative to the largest of its profile
ATTAINED = {torch.float64: 1e-12, torch.float32: 1e-6}  # relative gap up to which a mass counts as attained


def project_points(
    shape: str,
    z: Tensor,  # (*lead, nx), float64
    weight: Tensor,  # (*lead, nx)
    amount: Tensor | None,  # (*lead,), as the next three
    lower: Tensor | None = None,
    upper: Tensor | None = None,
    mass: Tensor | None = None,
    row: Tensor | None = None,  # (*lead, nx)
    most: Tensor | None = None,  # (*lead,), as the next
    least: Tensor | None = None,  # of values that are not 0
    tolerance: float = 1e-12,  # gap of the row that counts as none
) -> tuple[Tensor, Pooling, Tensor]:
    """Projected profiles with their gradients, their tangent, and residual and gap (*lead, 2) of the row.

    All arguments broadcast with z. The values are the kernels', feasible to rounding; the gradients are those of the
    closed form on the groups that were found.
    """
    may_vanish = _allows_zero(lower, upper)
    if least is not None:
        lower = least if lower is None else torch.maximum(lower, least)
    numbers = (amount, lower, upper, mass, mass if most is None else most)
    vectors = (z, weight) if row is None else (z, weight, row)
    lead = broadcast(*[x.shape[:-1] for x in vectors], *[x.shape for x in numbers if x is not None])
    top = weight.detach().amax(-1, keepdim=True)
    weight = torch.where(top > 0, torch.maximum(weight, SMALLEST * top), 1.0)
    line = z.new_empty(*z.shape[:-1], 0) if row is None else row
    points, weights, lines = (_numpy(x, lead, x.shape[-1]) for x in (z, weight, line))
    ends = zip(numbers, (0.0, -torch.inf, torch.inf, 0.0, 0.0))
    limits, lows, highs, masses, largest = (_numpy(z.new_tensor(end) if x is None else x, lead) for x, end in ends)
    from probhard.solvers.profiles import phases, pooling  # they load numba, which only these shapes need

    kind = SHAPES.index(shape)
    if least is None:
        found = pooling.solve(kind, points, weights, limits, lows, highs, lines, masses, largest)
    else:
        zeros = may_vanish.cpu().expand(lead).reshape(-1).contiguous().numpy()
        found = phases.solve(kind, points, weights, lows, highs, zeros, lines, masses, largest, tolerance)
    tensors = [torch.from_numpy(x).to(z.device) for x in found]
    value, first, side, edge, binds, residual = (x.reshape(*lead, x.shape[-1]) for x in tensors)
    if row is not None and least is not None:
        row = torch.where(side == phases.ZERO, 0.0, row)
    rows: list[tuple[Tensor | None, Tensor]] = [] if row is None else [(row, binds[..., :1])]
    if shape == "tv-bound":
        rows.append((None, binds[..., 1:]))
    pooled = Pooling(weight.expand(value.shape), first, side, edge, rows)
    inputs = [x for x in (z, weight, row, *numbers) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs[1:]):
        if mass is not None and most is not None and row is not None:  # the end at which the row binds, if it does
            mass = torch.where(2 * (row * value).sum(-1) > mass + most, most, mass)
        near = _closed_form(shape, pooled, z, amount, lower, upper, mass)
        value = value + (near - near.detach())
    elif torch.is_grad_enabled() and z.requires_grad:
        value = cast(Tensor, Attached.apply(z.expand(value.shape), value, pooled))
    return value, pooled, residual


class Attached(torch.autograd.Function):
    """Values as a function of the points alone, whose derivative is the tangent."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, value: Tensor, pooled: Pooling) -> Tensor:
        """Return the values; remember the groups."""
        ctx.pooled = pooled
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """``T^T g``."""
        return ctx.pooled.transpose(gradients[0]), None, None


def _closed_form(
    shape: str,
    pooled: Pooling,
    z: Tensor,
    amount: Tensor | None,
    lower: Tensor | None,
    upper: Tensor | None,
    mass: Tensor | None,
) -> Tensor:
    """The solution as a differentiable function of everything, its groups given."""
    u = pooled.average(z)
    if shape == "tv-penalty" and amount is not None:
        u = u - amount.unsqueeze(-1) * pooled.free * pooled.total(pooled.sign) / pooled.mass
    for bound, number in ((lower, -1), (upper, 1)):
        u = u if bound is None else torch.where(pooled.side == number, bound.unsqueeze(-1), u)
    targets = [x for x in (mass, amount if shape == "tv-bound" else None) if x is not None]
    return pooled.balanced(u, targets)


class PooledProjector(Projector):
    """Profiles that are monotone, penalised or bounded in variation, with uniform bounds and one row.

    Args:
        shape: ``"increasing"``, ``"decreasing"``, ``"tv-penalty"`` or ``"tv-bound"``.
        amount: Penalty or bound of TV; as lower, upper and mass it broadcasts with (*samples, *batch, slices).
        lower: Smallest value, or None.
        upper: Largest value, or None.
        row: Coefficients a of ``a . u = mass``, (nx,) or (*batch, nx), or None.
        mass: Right-hand side of the row, or None.
        weight: Metric weight over (*batch, n), ``n = slices nx``.
        slices: Number of profiles in a point.
        most: None, or the row asks for ``mass <= a . u <= most``.
        least: None, or values are 0 or at least this, like lower: the set is then not convex.
    """

    moments_from = "monte-carlo"

    def __init__(
        self,
        shape: str,
        amount: Tensor | None,
        lower: Tensor | None,
        upper: Tensor | None,
        row: Tensor | None,
        mass: Tensor | None,
        weight: Diagonal,
        slices: int = 1,
        most: Tensor | None = None,
        least: Tensor | None = None,
    ) -> None:
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
        self.shape, self.slices, self.weight, self.local = shape, slices, weight, least is not None
        double = [None if x is None else x.to(torch.float64) for x in (amount, lower, upper, mass, most, row, least)]
        self.amount, self.lower, self.upper, self.mass, self.most, self.row, self.least = double
        if self.row is not None and self.row.dim() > 1:
            self.row = self.row.unsqueeze(-2)

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        points, weight = (x.to(torch.float64).unflatten(-1, (self.slices, -1)) for x in (z, self.weight.variance))
        numbers = (self.amount, self.lower, self.upper, self.mass)
        further = (self.row, self.most, self.least, ATTAINED[z.dtype])
        value, pooled, residual = project_points(self.shape, points, weight, *numbers, *further)
        stats = stats_of(value, residual, z.dtype)
        lower, upper = (None if x is None else x.unsqueeze(-1) for x in (self.lower, self.upper))
        if self.least is not None:
            least = self.least.unsqueeze(-1)
            lower = torch.where(value == 0, 0.0, least if lower is None else torch.maximum(lower, least))
        return Solution(rounded(value, z.dtype, lower, upper).flatten(-2), PooledTangent(pooled), stats)

    def explain(self, z: Tensor, stats: Stats) -> ProbhardError | None:
        if self.least is None or not bool(z.isfinite().all()):
            return None
        bad, (low, high) = ~stats.converged, (float(x) for x in self.least.detach().aminmax())
        values = f"0 or at least {low:.6g}{'' if low == high else f' (up to {high:.6g})'}"
        if self.mass is None:
            return InfeasibleError(
                f"In {int(bad.sum())} of {bad.numel()} points the bounds leave no values that are {values}.",
                "They leave out 0 and end below the least value.",
                "Relax the bounds, or lower the least value.",
            )
        return InfeasibleError(
            f"In {int(bad.sum())} of {bad.numel()} points no values that are {values} and within their bounds have the "
            "sum that is asked for.",
            "With so many values that are not 0 the sum is too small, with one more it is too large.",
            "Lower the least value, or correct the sum: the trapezoid rule makes that of Conservation.trapezoid(grid, "
            "mass, jump=(place, fall)) of a jump between two grid points; in problem.physics, mass='jump'.",
        )


def stats_of(value: Tensor, residual: Tensor, dtype: torch.dtype) -> Stats:
    """Status of fields (*lead, slices, nx) from residuals and gaps (*lead, slices, 2)."""
    good = (residual[..., 0] <= TOLERANCE[dtype]) & (residual[..., 1] <= ATTAINED[dtype])
    converged = (good & value.detach().isfinite().all(-1)).all(-1)
    return Stats(torch.ones_like(converged, dtype=torch.int64), residual[..., 0].amax(-1).to(dtype), converged)


def rounded(value: Tensor, dtype: torch.dtype, lower: Tensor | None, upper: Tensor | None) -> Tensor:
    """Values (*lead, slices, nx) in the caller's precision, clipped to bounds like them as they are rounded to it."""
    if value.dtype == dtype:
        return value
    value = value.to(dtype)
    low, high = (None if x is None else x.detach().to(dtype) for x in (lower, upper))
    inside = value.detach()
    inside = inside if low is None else torch.maximum(inside, low)
    inside = inside if high is None else torch.minimum(inside, high)
    return value + (inside - value.detach())


def _allows_zero(lower: Tensor | None, upper: Tensor | None) -> Tensor:
    """Whether 0 lies within bounds, if there are any."""
    allowed = torch.tensor(True) if lower is None else lower <= 0
    return allowed if upper is None else allowed & (upper >= 0)


def _numpy(x: Tensor, lead: torch.Size, *event: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A contiguous float64 array, the leading dimensions flattened to one."""
    x = x.detach().to("cpu", torch.float64).expand((*lead, *event))
    return x.reshape((lead.numel(), *event)).contiguous().numpy()
