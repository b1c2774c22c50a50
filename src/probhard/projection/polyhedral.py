"""Projection on a polyhedron: find the face that the nearest point lies on, then project on that face in closed form.

The solvers say on which side of its bounds every variable ends; they work without gradients. What is differentiated
is one linear projection with the variables at their bounds held there (weight 0, value the bound), so value, gradients
in points, weights, right-hand sides and bounds, and the exact first-order covariance all come from the tangent of
equalities. At a kink, where a variable touches its bound without being pressed on it, it counts as free under bounds
alone and under active sets, as held where one multiplier per row is searched for (so that a vertex has no variance).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from probhard._util.tensors import broadcast
from probhard.errors import InfeasibleError, ProbhardError
from probhard.laws.censored import CensoredMarginals
from probhard.laws.covariance import Covariance, Diagonal
from probhard.laws.distribution import LocationScale
from probhard.projection.base import Options, Projector, Solution, Stats
from probhard.projection.diagnosis import check_capacity, empty_set, matrix_of
from probhard.projection.lifting import joined, lift, linear_costs, right_sides, without_complement
from probhard.projection.linear import LinearProjector
from probhard.projection.parts import Parts
from probhard.rows.disjoint import DisjointRows
from probhard.rows.sparse import SparseRows
from probhard.rows.system import LinearSystem
from probhard.solvers import active_set, single_row
from probhard.solvers.quadratic import HELD, Faces, QuadraticProblem
from probhard.tangent import DiagonalTangent, Differential

ROUNDING = 1e-15
SPREAD = 1e-8  # weight of a held variable in the sparse factor's variances, which are differences of large numbers
FLOOR = 1e-12  # smallest weight that may move a row, relative to the largest


class FaceProjector(Projector):
    """Bounds, rows and shapes with shared rows, under a diagonal weight."""

    def __init__(self, parts: Parts, weight: Diagonal, options: Options) -> None:
        self.parts, self.options = parts, options
        self.weight = weight.variance.to(torch.float64)
        self.lifting = lift(parts)
        system = self.lifting.system
        self.system = None if system is None else without_complement(system).at(self.weight)
        like = self.weight.new_empty(0)
        self.bounds = parts.bounds(like)
        sides = right_sides(parts, like)
        self.right = joined(sides) if sides else like
        self.costs = linear_costs(parts, like)
        if options.validate:
            check_capacity(parts, like)
        self.moments_from = "censored" if parts.bounded_only else "monte-carlo"
        self.has_equalities = parts.linear is not None

    def censored(self, base: LocationScale) -> CensoredMarginals:
        return censored_laws(self.parts, base, Diagonal(self.weight), self.options)

    @property
    def extra(self) -> int:
        """Number of auxiliary variables."""
        return self.lifting.extra

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        if self.system is None:
            return self._clipped(z)
        point, weight, natural, lower, upper, right = self._data(z.to(torch.float64))
        lead = point.shape[:-1]
        n = self.parts.variables
        if self.system.core is None and self.system.pins is not None:
            # Known values are all the rows there are: bounds of width 0.
            known, pinned = self.system.substitute(point, right)[0], self.system.pins.variable
            lower, upper = (x.index_copy(-1, pinned, known[..., pinned]) for x in (lower, upper))
        faces = self._faces(point, weight, natural, lower, upper, right)
        side = faces.side.reshape(*lead, -1)
        free = side == 0
        bound = torch.where(side < 0, lower, upper)
        held = torch.where(free, point, torch.where(torch.isfinite(bound), bound, 0.0))
        if self.extra:  # auxiliary centres at their values, so that their proximal cost is nothing
            centre = faces.value.reshape(*lead, -1)[..., n:]
            if self.costs is not None:
                centre = centre - weight[..., n:] * joined(self.costs)
            held = torch.cat([held[..., :n], torch.where(free[..., n:], centre, held[..., n:])], -1)
        tangent = self._tangent(free, weight, natural)
        value = held
        if tangent is not None:
            value = tangent.project(held, right)
            again = torch.where(free, value, held)  # one refinement: held variables keep their bounds exactly
            value = torch.where(free, tangent.project(again, right), held)
        found = value[..., :n]
        if self.parts.box is not None:
            found = within(found, point[..., :n], lower[..., :n], upper[..., :n])

        def spread() -> DiagonalTangent | None:
            exact = tangent is None or not isinstance(tangent.core, SparseRows)
            return tangent if exact else self._tangent(free, weight, natural, SPREAD)

        return self.parts.finished(
            z, found, FaceTangent(self, tangent, spread, free), faces.steps.reshape(lead), faces.done.reshape(lead)
        )

    def _clipped(self, z: Tensor) -> Solution:
        """Bounds alone: every variable for itself, in the precision of z."""
        lower, upper = self.parts.bounds(z)
        z = z.expand(broadcast(z.shape, self.weight.shape))
        below, above = z < lower, z > upper
        if self.parts.box is not None:
            # a bound may be one number for all, so widths are looked at before it is expanded
            above = above | (self.parts.box.lower == self.parts.box.upper).to(z.device)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (z, lower, upper)):
            value = torch.where(below, lower, torch.where(above, upper, z))  # no gradient where a width is 0
        else:
            value = torch.clamp(z, lower, upper)
        count = torch.ones(value.shape[:-1], dtype=torch.int64, device=z.device)
        tangent = FaceTangent(self, None, lambda: None, ~(below | above))
        return self.parts.finished(z, value, tangent, count, count > 0)

    def explain(self, z: Tensor, stats: Stats) -> ProbhardError | None:
        bad = torch.nonzero(~stats.converged)
        at = tuple(int(i) for i in bad[0])
        _, _, _, lower, upper, right = self._data(z.detach().to(torch.float64))
        lower, upper = lower[at], upper[at]
        where = f" in batch element {at}" if at else ""
        if self.system is None:
            return None
        found = empty_set(self.parts, matrix_of(self.system), right[at], lower, upper)
        if found is None:
            return None
        what, why, fix = found
        return InfeasibleError(what + where + ".", why, fix)

    def _data(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Points, weights, natural weights, bounds and right-hand sides over all leading dimensions."""
        n, (lower, upper) = self.parts.variables, self.bounds
        lead = broadcast(*(x.shape[:-1] for x in (z, self.weight, lower, upper, self.right)))
        weight = self.weight
        if self.system is not None and self.system.held is not None:
            weight = weight.index_fill(-1, self.system.held, 0.0)
        natural = torch.maximum(weight, FLOOR * weight.amax(-1, keepdim=True)).detach()
        if self.extra:
            own = self.lifting.natural(natural)
            stiff = own * self.lifting.stiffness.to(own)
            natural, weight = torch.cat([natural, own], -1), torch.cat([weight, stiff], -1)
            zeros = z.new_zeros(*lead, self.extra)
            z = torch.cat([z.expand(*lead, n), zeros], -1)
            lower = torch.cat([lower.expand(*lead, n), zeros], -1)
            upper = torch.cat([upper.expand(*lead, n), zeros + torch.inf], -1)
        size = n + self.extra
        z, weight, natural, lower, upper = (x.expand(*lead, size) for x in (z, weight, natural, lower, upper))
        return z, weight, natural, lower, upper, self.right.expand(*lead, self.right.shape[-1])

    @torch.no_grad()
    def _faces(
        self, point: Tensor, weight: Tensor, natural: Tensor, lower: Tensor, upper: Tensor, right: Tensor
    ) -> Faces:
        size = point.shape[-1]
        assert self.system is not None
        if self.system.core is None:
            side = (point > upper).to(torch.int8) - (point < lower).to(torch.int8)
            side = torch.where(lower == upper, torch.ones_like(side), side)
            count = torch.ones(point.shape[:-1], dtype=torch.int64, device=point.device)
            return Faces(side, point.clamp(lower, upper), count, count > 0, right)
        if self.system.pins is not None:
            pinned = self.system.pins.variable
            point, right = self.system.substitute(point, right)
            weight = weight.index_fill(-1, pinned, 0.0)
            lower, upper = lower.index_fill(-1, pinned, -torch.inf), upper.index_fill(-1, pinned, torch.inf)
        else:
            point, right = self.system.substitute(point, right)
        costed = linear = None
        if self.extra:
            costed = torch.arange(size, device=point.device) < self.parts.variables
        if self.costs is not None:
            costs = joined(self.costs)
            linear = torch.cat([costs.new_zeros(*costs.shape[:-1], self.parts.variables), costs], -1)
            linear = linear.expand(*point.shape[:-1], size).reshape(-1, size)
        data = [x.reshape(-1, x.shape[-1]) for x in (right, point, weight, natural, lower, upper)]
        problem = QuadraticProblem(
            self.system.core, data[0], data[1], data[2], data[3], data[4], data[5], costed, linear
        )
        if isinstance(self.system.core, DisjointRows) and self.costs is None:
            return single_row.solve(problem)
        return active_set.solve(problem)

    def _tangent(self, free: Tensor, weight: Tensor, natural: Tensor, held: float = HELD) -> DiagonalTangent | None:
        if self.system is None or self.system.core is None:
            return None
        system = LinearSystem.__new__(LinearSystem)
        system.__dict__ = {**vars(self.system), "held": None}
        return DiagonalTangent(system, Diagonal(torch.where(free, weight, held * natural)))


def censored_laws(parts: Parts, base: LocationScale, weight: Covariance, options: Options) -> CensoredMarginals:
    """The law projected on the linear equalities, if there are any, its marginals clipped at the bounds."""
    loc, scale = base.loc, base.marginals.scale
    if parts.linear is not None:
        _, loc, scale, _ = LinearProjector(parts.linear, weight.to(loc.dtype), options).moments(loc, base.cov)
    lower, upper = parts.bounds(loc)
    return CensoredMarginals(loc, scale, base.family, lower, upper, validate_args=False)


def within(u: Tensor, z: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Values clipped to their bounds, and put on a bound that is within the rounding of ``z - w p``; gradients stay.

    So bounds hold exactly, and sums of zeros are zero.
    """
    with torch.no_grad():
        fixed, size = u.clamp(lower, upper), z.abs().mul_(ROUNDING)
        for bound in (lower, upper):
            gap = (u - bound).abs_()
            close = (gap <= torch.add(size, bound.abs(), alpha=ROUNDING)).logical_and_(gap < torch.inf)
            fixed = torch.where(close, bound, fixed)
        shift = fixed.sub_(u)
    return u + shift


class FaceTangent(Differential):
    """The tangent of the face: inputs and outputs of held variables are 0, the rest is the tangent of the rows."""

    def __init__(
        self,
        projector: FaceProjector,
        inner: DiagonalTangent | None,
        spread: Callable[[], DiagonalTangent | None],
        free: Tensor,
    ) -> None:
        self.inner, self.spread, self.free, self.variables = inner, spread, free, projector.parts.variables
        self.extra = projector.extra

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.free.shape[:-1], self.variables))

    def apply(self, x: Tensor) -> Tensor:
        if self.inner is None:
            return torch.where(self.free, x, 0.0)
        found = self.inner.apply(self._padded(x))
        return self._cut(found).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        if self.inner is None:
            return torch.where(self.free, x, 0.0)
        return self._cut(self.inner.transpose(self._padded(x))).to(x.dtype)

    def variance(self, cov: Covariance) -> Tensor:
        if isinstance(cov, Diagonal):
            if self.inner is None:
                return torch.where(self.free, cov.variance, 0.0)
            rows = self.spread()
            assert rows is not None
            return self._cut(rows.variance(Diagonal(self._padded(cov.variance)))).to(cov.dtype)
        if self.inner is None:
            return torch.where(self.free, cov.diagonal(), 0.0)
        return super().variance(cov)

    def _padded(self, x: Tensor) -> Tensor:
        """Free inputs, auxiliary ones 0."""
        x = x.to(torch.float64)
        if self.extra:
            x = torch.cat([x, x.new_zeros(*x.shape[:-1], self.extra)], -1)
        return torch.where(self.free, x, 0.0)

    def _cut(self, x: Tensor) -> Tensor:
        return torch.where(self.free, x, 0.0)[..., : self.variables]
