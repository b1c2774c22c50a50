"""Projection on a polyhedron: find the face of the nearest point, then project on that face in closed form.

The solvers return the side of its bounds that each variable ends on, without gradients. On that face the projection is
linear: held variables have weight 0 and the value of their bound. Values, gradients and the first-order covariance come
from the tangent of equalities. A variable that touches its bound with multiplier 0 counts as free. Under ``single_row``
it counts as held, so that a vertex has no variance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.numerics import equal_bounds, floored
from probhard._util.tensors import broadcast
from probhard.errors import InfeasibleError, ProbhardError
from probhard.laws.covariance import Covariance, Diagonal
from probhard.laws.distribution import LocationScale
from probhard.laws.marginals import CensoredMarginals
from probhard.projection.base import Options, Projector, Solution, Stats
from probhard.projection.checked import feasible, finished, within
from probhard.projection.diagnosis import empty_set, matrix_of
from probhard.projection.l1_search import search
from probhard.projection.last_resort import completed
from probhard.projection.lifting import Polyhedron, polyhedron
from probhard.projection.linear import LinearProjector
from probhard.projection.parts import Parts
from probhard.rows.disjoint import DisjointRows
from probhard.rows.sparse import SparseRows
from probhard.solvers import single_row
from probhard.solvers.quadratic import HELD, Faces, QuadraticProblem
from probhard.tangent.base import Differential
from probhard.tangent.linear import DiagonalTangent

SPREAD = 1e-8  # weight of a held variable for the variances of a sparse factor, which are differences of large numbers


@dataclass(frozen=True)
class Points:
    """Points with auxiliary variables, their weights and bounds, (*lead, n + extra)."""

    z: Tensor
    weight: Tensor
    natural: Tensor  # weights, at least the floor; of auxiliary variables like those of their rows
    lower: Tensor
    upper: Tensor
    right: Tensor  # (*lead, rows)


class FaceProjector(Projector):
    """Projects on bounds, rows and shapes with shared rows, under a diagonal weight.

    Args:
        parts: The parts of the constraint, all polyhedral.
        weight: W, over (*batch, n).
        options: Options of the layer; with ``validate``, an empty set raises an InfeasibleError.
    """

    def __init__(self, parts: Parts, weight: Diagonal, options: Options) -> None:
        self.parts, self.options = parts, options
        self.weight = weight.variance.to(torch.float64)
        known: Polyhedron | None = (parts.kept or {}).get((Polyhedron, self.weight.device, options.validate))
        self.set = polyhedron(parts, self.weight.new_empty(0), options.validate) if known is None else known
        self.extra = self.set.lifting.extra  # number of auxiliary variables
        self.moments_from = "censored" if self.set.bounded_only else "monte-carlo"
        self.has_equalities = parts.linear is not None

    def projected_shape(self, base: LocationScale) -> torch.Size:
        batch = broadcast(base.loc.shape[:-1], self.weight.shape[:-1], self.parts.batch_shape)
        return torch.Size((*batch, self.parts.variables))

    def censored(self, base: LocationScale) -> CensoredMarginals:
        return censored_laws(self.parts, base, Diagonal(self.weight), self.options)

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        if self.set.system is None:
            return self._clipped(z)
        if not self.options.last_resort:
            return self._solved(z)
        return completed(self.parts, Diagonal(self.weight), z, self._solved)

    def _solved(self, z: Tensor) -> Solution:
        points = self._points(z.to(torch.float64))
        faces = self._faces(points)
        lead, n = points.z.shape[:-1], self.parts.variables
        side = faces.side.reshape(*lead, faces.side.shape[-1])
        free = side == 0
        held = self._held(points, faces, side)
        tangent = self._tangent(free, points)
        value = held
        if tangent is not None:
            value = tangent.project(held, points.right)
            again = torch.where(free, value, held)  # one refinement step: held variables stay exactly at their bounds
            value = torch.where(free, tangent.project(again, points.right), held)
        value = value[..., :n]
        if self.parts.box is not None:
            value = within(value, points.z[..., :n], points.lower[..., :n], points.upper[..., :n])

        def spread() -> DiagonalTangent | None:
            exact = tangent is None or not isinstance(tangent.core, SparseRows)
            return tangent if exact else self._tangent(free, points, SPREAD)

        value = feasible(
            self.parts, points.z[..., :n], value, faces.value.reshape(*lead, faces.value.shape[-1])[..., :n]
        )
        steps, done = faces.steps.reshape(lead), faces.done.reshape(lead)
        return finished(self.parts, z, value, FaceTangent(self, tangent, spread, free), steps, done)

    def _clipped(self, z: Tensor) -> Solution:
        """Bounds alone, variable by variable, in the precision of z."""
        lower, upper = self.parts.bounds(z)
        z = z.expand(broadcast(z.shape, self.weight.shape))
        below, above = z < lower, z > upper
        if self.parts.box is not None:
            # compared before they are expanded, since a bound may be one number
            above = above | equal_bounds(self.parts.box.lower, self.parts.box.upper).to(z.device)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (z, lower, upper)):
            value = torch.where(below, lower, torch.where(above, upper, z))  # no gradient between equal bounds
        else:
            value = torch.clamp(z, lower, upper)
        count = torch.ones(value.shape[:-1], dtype=torch.int64, device=z.device)
        tangent = FaceTangent(self, None, lambda: None, ~(below | above))
        return finished(self.parts, z, value, tangent, count, count > 0)

    def explain(self, z: Tensor, stats: Stats) -> ProbhardError | None:
        at = tuple(int(i) for i in torch.nonzero(~stats.converged)[0])
        if self.set.system is None:
            return None
        points = self._points(z.detach().to(torch.float64))
        reason = empty_set(self.parts, matrix_of(self.set.system), points.right[at], points.lower[at], points.upper[at])
        where = f" in batch element {at}" if at else ""
        return None if reason is None else InfeasibleError(reason[0] + where + ".", *reason[1:])

    def _points(self, z: Tensor) -> Points:
        n, set_, weight = self.parts.variables, self.set, self.weight
        lower, upper, right = set_.lower, set_.upper, set_.right
        lead = broadcast(z.shape[:-1], weight.shape[:-1], lower.shape[:-1], upper.shape[:-1], right.shape[:-1])
        system = set_.system
        if system is not None and system.held is not None:
            weight = weight.index_fill(-1, system.held, 0.0)
        natural = floored(weight).detach()
        if self.extra:
            own = set_.lifting.natural(natural)
            stiff = own * set_.lifting.stiffness.to(own)
            natural, weight = torch.cat([natural, own], -1), torch.cat([weight, stiff], -1)
            zeros = z.new_zeros(*lead, self.extra)
            z = torch.cat([z.expand(*lead, n), zeros], -1)
            lower = torch.cat([lower.expand(*lead, n), zeros], -1)
            upper = torch.cat([upper.expand(*lead, n), zeros + torch.inf], -1)
        if system is not None and system.core is None and system.pins is not None:
            # all rows are known values: equal bounds
            known, pinned = system.substitute(z.expand(*lead, -1), right)[0], system.pins.variable
            lower, upper = (x.expand(*lead, -1).index_copy(-1, pinned, known[..., pinned]) for x in (lower, upper))
        size = (*lead, n + self.extra)
        z, weight, natural, lower, upper = (x.expand(size) for x in (z, weight, natural, lower, upper))
        return Points(z, weight, natural, lower, upper, right.expand(*lead, right.shape[-1]))

    @torch.no_grad()
    def _faces(self, points: Points) -> Faces:
        system = self.set.system
        assert system is not None
        z, weight, lower, upper = points.z, points.weight, points.lower, points.upper
        if system.core is None:
            side = (z > upper).to(torch.int8) - (z < lower).to(torch.int8)
            side = torch.where(equal_bounds(lower, upper), torch.ones_like(side), side)
            count = torch.ones(z.shape[:-1], dtype=torch.int64, device=z.device)
            return Faces(side, z.clamp(lower, upper), count, count > 0, points.right)
        z, right = system.substitute(z, points.right)
        if system.pins is not None:
            pinned = system.pins.variable
            weight = weight.index_fill(-1, pinned, 0.0)
            lower, upper = lower.index_fill(-1, pinned, -torch.inf), upper.index_fill(-1, pinned, torch.inf)
        size, costed, linear = z.shape[-1], None, None
        if self.extra:
            costed = torch.arange(size, device=z.device) < self.parts.variables
        if self.set.costs is not None:
            costs = self.set.costs
            linear = torch.cat([costs.new_zeros(*costs.shape[:-1], self.parts.variables), costs], -1)
            linear = linear.expand(*z.shape[:-1], size).reshape(-1, size)
        flat = (x.reshape(-1, x.shape[-1]) for x in (right, z, weight, points.natural, lower, upper))
        right, z, weight, natural, lower, upper = flat
        problem = QuadraticProblem(system.core, right, z, weight, natural, lower, upper, costed, linear)
        if isinstance(system.core, DisjointRows) and self.set.costs is None:
            return single_row.solve(problem)
        return search(self.parts, problem)

    def _held(self, points: Points, faces: Faces, side: Tensor) -> Tensor:
        """The points with held variables at their bounds and auxiliary ones, which cost nothing, at their values."""
        n, bound = self.parts.variables, torch.where(side < 0, points.lower, points.upper)
        held = torch.where(side == 0, points.z, torch.where(torch.isfinite(bound), bound, 0.0))
        if not self.extra:
            return held
        centre = faces.value.reshape(held.shape)[..., n:]
        if self.set.costs is not None:
            centre = centre - points.weight[..., n:] * self.set.costs
        return torch.cat([held[..., :n], torch.where(side[..., n:] == 0, centre, held[..., n:])], -1)

    def _tangent(self, free: Tensor, points: Points, held: float = HELD) -> DiagonalTangent | None:
        system = self.set.lifting.face
        if system is None or system.core is None:
            return None
        return DiagonalTangent(system, Diagonal(torch.where(free, points.weight, held * points.natural)))


def censored_laws(parts: Parts, base: LocationScale, weight: Covariance, options: Options) -> CensoredMarginals:
    """Marginals of the base law projected on the linear equalities, if any, clipped at the bounds."""
    loc, scale = base.loc, None
    if parts.linear is not None:
        _, loc, scale, _ = LinearProjector(parts.linear, weight.to(loc.dtype), options).moments(loc, base.cov)
    lower, upper = (-torch.inf, torch.inf) if parts.box is None else (parts.box.lower.to(loc), parts.box.upper.to(loc))
    scale = base.marginals.scale if scale is None else scale
    return CensoredMarginals(loc, scale, base.family, lower, upper, validate_args=False)


class FaceTangent(Differential):
    """The tangent of a face: that of the rows (``inner``), with 0 for all but the free variables (*lead, N)."""

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
        return self._cut(self.inner.apply(self._padded(x))).to(x.dtype)

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
        """Inputs (*lead, N): 0 for held and auxiliary variables."""
        x = x.to(torch.float64)
        if self.extra:
            x = torch.cat([x, x.new_zeros(*x.shape[:-1], self.extra)], -1)
        return torch.where(self.free, x, 0.0)

    def _cut(self, x: Tensor) -> Tensor:
        return torch.where(self.free, x, 0.0)[..., : self.variables]
