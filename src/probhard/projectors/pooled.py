"""Monotone profiles and profiles of little variation: points by ``solvers.pooling``, derivatives in closed form.

Near a solution the runs of equal values ("groups") stay. With M the average over groups weighted by ``q = 1/w``, F the
groups that lie on no bound, and C the rows that bind (a of the mass, the signs s of the jumps of a bound on TV),

    T = F M - B S^-1 C^T F M,     B = F M W C,     S = C^T B,
    u = F M (z - amount W s) + bounds - B S^-1 (C^T F M (z - amount W s) + C^T bounds - (mass, amount)),

the term ``amount W s`` for a penalty only. All of it costs O(n). A weight below 1e-12 of the profile's largest is taken
as that, so that a variable without variance moves only if it must; weights that are all 0 count as equal.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from probhard.covariance import Covariance, Diagonal, LowRank
from probhard.errors import ParameterError, ShapeError, broadcast, check_choice
from probhard.projectors.base import TOLERANCE, Projector, Solution, Stats
from probhard.tangent import Differential

SHAPES = ("increasing", "decreasing", "tv-penalty", "tv-bound")  # in the order of the kernels' numbers
SMALLEST = 1e-12  # weight relative to the largest of its profile
ATTAINED = {torch.float64: 1e-12, torch.float32: 1e-6}  # relative gap up to which a mass counts as attained


class Pooling:
    """The tangent T of pooled profiles and their groups, over profiles (*lead, nx).

    Args:
        weight: Positive weights w.
        first: Index of the first point of each point's group.
        side: -1 on the lower bound, 1 on the upper, 0 if free.
        edge: Sign of the jump after each point, 0 within a group.
        rows: The vectors a, s that may bind, and per profile whether they do, (*lead, 1).
    """

    def __init__(
        self, weight: Tensor, first: Tensor, side: Tensor, edge: Tensor, rows: list[tuple[Tensor | None, Tensor]]
    ) -> None:
        self.first, self.side, self.inverse, self.free = first, side, 1 / weight, (side == 0).to(weight)
        self.edge = edge
        self.binds = [bind for _, bind in rows]
        self.rows = [torch.where(bind, self.sign if row is None else row, 0.0) for row, bind in rows]

    @cached_property
    def sign(self) -> Tensor:
        """The derivative s of TV: +1 at the upper end of a jump, -1 at the lower."""
        edge = self.edge.to(self.inverse)
        return torch.nn.functional.pad(edge[..., :-1], (1, 0)) - edge

    def total(self, x: Tensor) -> Tensor:
        """Sums over groups, at each of their points, of x (*samples, *lead, nx)."""
        shape = broadcast(x.shape, self.first.shape)
        index = self.first.expand(shape)
        return x.new_zeros(shape).scatter_add(-1, index, x.expand(shape)).gather(-1, index)

    @cached_property
    def mass(self) -> Tensor:
        """Sums of q over groups."""
        return self.total(self.inverse)

    @cached_property
    def responses(self) -> list[Tensor]:
        """The columns of ``B = F M W C``."""
        return [self.free * self.total(row) / self.mass for row in self.rows]

    @cached_property
    def gram(self) -> list[Tensor]:
        """The entries of ``S = C^T B`` on and above the diagonal; a row that does not bind counts as 1."""
        entries = [_dot(self.rows[i], self.responses[j]) for i, j in self._pairs]
        return [entry + self._idle(i, j) for entry, (i, j) in zip(entries, self._pairs)]

    def average(self, x: Tensor) -> Tensor:
        """``F M x``."""
        return self.free * self.total(self.inverse * x) / self.mass

    def multipliers(self, residuals: list[Tensor]) -> list[Tensor]:
        """``S^-1 r``."""
        if len(residuals) < 2:
            return [r / self.gram[0] for r in residuals]
        determinant = self.gram[0] * self.gram[2] - self.gram[1].square()
        first, second = residuals
        return [
            (self.gram[2] * first - self.gram[1] * second) / determinant,
            (self.gram[0] * second - self.gram[1] * first) / determinant,
        ]

    def balanced(self, u: Tensor, targets: list[Tensor]) -> Tensor:
        """``u - B S^-1 (C^T u - t)`` for targets t (*lead,) of the rows."""
        residuals = [
            _dot(row, u) - torch.where(bind, target.unsqueeze(-1), 0.0)
            for row, bind, target in zip(self.rows, self.binds, targets)
        ]
        for response, multiplier in zip(self.responses, self.multipliers(residuals)):
            u = u - response * multiplier
        return u

    def apply(self, x: Tensor) -> Tensor:
        """``T x`` for x (*samples, *lead, nx)."""
        return self.balanced(self.average(x), [x.new_zeros(())] * len(self.rows))

    def transpose(self, x: Tensor) -> Tensor:
        """``T^T x``."""
        x = self.free * x
        multipliers = self.multipliers([_dot(response, x) for response in self.responses])
        for row, multiplier in zip(self.rows, multipliers):
            x = x - self.free * row * multiplier
        return self.inverse * self.total(x) / self.mass

    def variance(self, variance: Tensor) -> Tensor:
        """``diag(T C T^T)`` of a diagonal C.

        With v the variance of a group's average, ``(1 - Q b S^-1 b)^2 v`` from the group itself and ``b S^-1 N S^-1 b``
        from the others. Both are formed from sums over the others, which leaves what is fixed at exactly 0.
        """
        own = self.free * self.total(variance * self.inverse.square()) / self.mass.square()
        if not self.rows:
            return own
        pairs = [self.responses[i] * self.responses[j] * self.mass for i, j in self._pairs]
        rest = [self._others(pair) + self._idle(i, j) for pair, (i, j) in zip(pairs, self._pairs)]
        noise = [self._others(pair * own * self.mass) for pair in pairs]
        if len(self.rows) == 1:
            return own * (rest[0] / self.gram[0]).square() + noise[0] * (self.responses[0] / self.gram[0]).square()
        determinant = self.gram[0] * self.gram[2] - self.gram[1].square()
        kept = (rest[0] * rest[2] - rest[1].square()).clamp(min=0) / determinant
        a, b = self.multipliers(self.responses)
        return own * kept.square() + (a * (a * noise[0] + 2 * b * noise[1]) + b * b * noise[2]).clamp(min=0)

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(len(self.rows)) for j in range(i, len(self.rows))]

    def _idle(self, i: int, j: int) -> Tensor | float:
        return (~self.binds[i]).to(self.inverse) if i == j else 0.0

    def _others(self, x: Tensor) -> Tensor:
        """Sums over the other groups of x, which is constant on groups: never own minus own."""
        x = x * (self.first == torch.arange(x.shape[-1], device=x.device))
        before = torch.nn.functional.pad(x.cumsum(-1)[..., :-1], (1, 0))
        after = torch.nn.functional.pad(x.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))
        return (before + after).gather(-1, self.first.expand(x.shape))


def project_points(
    shape: str,
    z: Tensor,  # (*lead, nx), float64
    weight: Tensor,  # (*lead, nx)
    amount: Tensor | None,  # (*lead,), as the next three
    lower: Tensor | None = None,
    upper: Tensor | None = None,
    mass: Tensor | None = None,
    row: Tensor | None = None,  # (*lead, nx)
    most: Tensor | None = None,  # (*lead,)
) -> tuple[Tensor, Pooling, Tensor]:
    """Projected profiles with their gradients, their tangent, and residual and gap (*lead, 2) of the row.

    All arguments broadcast with z. The values are the kernels', feasible to rounding; the gradients are those of the
    closed form on the groups that were found.
    """
    numbers = (amount, lower, upper, mass, mass if most is None else most)
    vectors = (z, weight) if row is None else (z, weight, row)
    lead = broadcast(*[x.shape[:-1] for x in vectors], *[x.shape for x in numbers if x is not None])
    top = weight.detach().amax(-1, keepdim=True)
    weight = torch.where(top > 0, torch.maximum(weight, SMALLEST * top), 1.0)
    line = z.new_empty(*z.shape[:-1], 0) if row is None else row
    points, weights, lines = (_numpy(x, lead, x.shape[-1]) for x in (z, weight, line))
    ends = zip(numbers, (0.0, -torch.inf, torch.inf, 0.0, 0.0))
    limits, lows, highs, *masses = (_numpy(z.new_tensor(end) if x is None else x, lead) for x, end in ends)
    from probhard.solvers import pooling  # it loads numba, which only these shapes need

    found = pooling.solve(SHAPES.index(shape), points, weights, limits, lows, highs, lines, *masses)
    tensors = [torch.from_numpy(x).to(z.device) for x in found]
    value, first, side, edge, binds, residual = (x.reshape(*lead, x.shape[-1]) for x in tensors)
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
        self.shape, self.slices, self.weight = shape, slices, weight
        double = [None if x is None else x.to(torch.float64) for x in (amount, lower, upper, mass, most, row)]
        self.amount, self.lower, self.upper, self.mass, self.most, self.row = double
        if self.row is not None and self.row.dim() > 1:
            self.row = self.row.unsqueeze(-2)

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        points, weight = (x.to(torch.float64).unflatten(-1, (self.slices, -1)) for x in (z, self.weight.variance))
        numbers = (self.amount, self.lower, self.upper, self.mass)
        value, pooled, residual = project_points(self.shape, points, weight, *numbers, self.row, self.most)
        stats = stats_of(value, residual, z.dtype)
        return Solution(rounded(value, z.dtype, self.lower, self.upper).flatten(-2), PooledTangent(pooled), stats)


class FieldTangent(Differential):
    """A tangent over fields (*lead, slices, nx) that are flattened to (*lead, n)."""

    lead: torch.Size  # (*lead, slices, nx)

    @abstractmethod
    def apply_field(self, x: Tensor) -> Tensor:
        """``T x`` for x (*samples, *lead, slices, nx)."""

    @abstractmethod
    def transpose_field(self, x: Tensor) -> Tensor:
        """``T^T x``."""

    @abstractmethod
    def variance_field(self, variance: Tensor) -> Tensor:
        """``diag(T C T^T)`` of a diagonal C."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.lead[:-2], self.lead[-2] * self.lead[-1]))

    def apply(self, x: Tensor) -> Tensor:
        return self.apply_field(self._field(x)).flatten(-2).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        return self.transpose_field(self._field(x)).flatten(-2).to(x.dtype)

    def variance(self, cov: Covariance) -> Tensor:
        if isinstance(cov, Diagonal):
            return self.variance_field(self._field(cov.variance)).flatten(-2).to(cov.dtype)
        if isinstance(cov, LowRank):
            own, columns = self.variance(Diagonal(cov.diagonal_part)), cov.factor.movedim(-1, 0)
            return own + self._squares(columns, len(cov.shape))
        eye = torch.eye(cov.root_size, dtype=cov.dtype, device=cov.device)
        return self._squares(cov.root(eye.reshape(-1, *[1] * (len(cov.shape) - 1), cov.root_size)), len(cov.shape))

    def _field(self, x: Tensor) -> Tensor:
        return x.to(torch.float64).unflatten(-1, tuple(self.lead[-2:]))

    def _squares(self, columns: Tensor, dims: int) -> Tensor:
        """Sum of the squares of ``T r`` over the columns r of a root, (columns, *batch, n)."""
        missing = max(0, len(self.shape) - dims)
        columns = columns.reshape(columns.shape[0], *[1] * missing, *columns.shape[1:])
        return self.apply(columns).square().sum(0)


class PooledTangent(FieldTangent):
    """The tangent of pooled profiles, each on its own."""

    def __init__(self, pooled: Pooling) -> None:
        self.pooled, self.lead = pooled, pooled.first.shape

    def apply_field(self, x: Tensor) -> Tensor:
        return self.pooled.apply(x)

    def transpose_field(self, x: Tensor) -> Tensor:
        return self.pooled.transpose(x)

    def variance_field(self, variance: Tensor) -> Tensor:
        return self.pooled.variance(variance)


def stats_of(value: Tensor, residual: Tensor, dtype: torch.dtype) -> Stats:
    """Status of fields (*lead, slices, nx) from residuals and gaps (*lead, slices, 2)."""
    good = (residual[..., 0] <= TOLERANCE[dtype]) & (residual[..., 1] <= ATTAINED[dtype])
    converged = (good & value.detach().isfinite().all(-1)).all(-1)
    return Stats(torch.ones_like(converged, dtype=torch.int64), residual[..., 0].amax(-1).to(dtype), converged)


def rounded(value: Tensor, dtype: torch.dtype, lower: Tensor | None, upper: Tensor | None) -> Tensor:
    """Values (*lead, slices, nx) in the caller's precision, clipped to the bounds as they are rounded to it."""
    if value.dtype == dtype:
        return value
    value = value.to(dtype)
    low, high = (None if x is None else x.detach().to(dtype).unsqueeze(-1) for x in (lower, upper))
    inside = value.detach()
    inside = inside if low is None else torch.maximum(inside, low)
    inside = inside if high is None else torch.minimum(inside, high)
    return value + (inside - value.detach())


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _numpy(x: Tensor, lead: torch.Size, *event: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A contiguous float64 array, the leading dimensions flattened to one."""
    x = x.detach().to("cpu", torch.float64).expand((*lead, *event))
    return x.reshape((lead.numel(), *event)).contiguous().numpy()
