"""Projection on a polyhedron under a metric that couples variables, or with rows that differ in the batch.

With ``W = R R^T`` the point is ``u = z + R e`` and e has unit cost. A row j of the parts becomes
``j R e + s = d - j z`` with an auxiliary variable s. A bounded variable becomes the row ``u_i - R_i e = z_i``. All rows
are dense, so each element costs the cube of their number. Faces are computed and differentiated as in ``polyhedral``.
"""

from __future__ import annotations

import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard._util.tensors import broadcast, matvec
from probhard.constraints.shapes import SLACK
from probhard.errors import InfeasibleError, ProbhardError
from probhard.laws.covariance import Covariance, Diagonal
from probhard.laws.distribution import LocationScale
from probhard.laws.marginals import CensoredMarginals
from probhard.projection.base import Options, Projector, Solution, Stats
from probhard.projection.checked import feasible, finished, within
from probhard.projection.diagnosis import check_capacity, empty_set
from probhard.projection.last_resort import completed
from probhard.projection.lifting import joined, linear_costs, right_sides
from probhard.projection.parts import Parts
from probhard.projection.polyhedral import FaceProjector, censored_laws
from probhard.rows.dense import DenseRows
from probhard.rows.dense import DenseRowsFactor as Factor
from probhard.solvers import active_set
from probhard.solvers.quadratic import HELD, Faces, QuadraticProblem
from probhard.tangent import Differential


class CoupledProjector(Projector):
    """Projects on bounds, rows and shapes under any weight, with dense rows.

    Args:
        parts: The parts of the constraint, all polyhedral.
        weight: W, over (*batch, n).
        options: Options of the layer.

    Raises:
        InfeasibleError: The bounds make a row infeasible and ``options.validate`` is set.
    """

    def __init__(self, parts: Parts, weight: Covariance, options: Options) -> None:
        self.parts, self.options, self.weight = parts, options, weight
        self.moments_from = "censored" if parts.bounded_only else "monte-carlo"
        self.has_equalities = parts.linear is not None
        weight = weight.to(torch.float64)
        eye = torch.eye(weight.root_size, dtype=torch.float64, device=weight.device)
        root = weight.root(eye.reshape(-1, *[1] * (len(weight.shape) - 1), weight.root_size))
        self.root = root.movedim(0, -1)  # R, (*batch, n, r)
        if parts.linear is not None and parts.linear.system.held is not None:
            self.root = self.root.index_fill(-2, parts.linear.system.held.to(self.root.device), 0.0)
        self._stack(self.root.new_empty(0))
        if options.validate:
            check_capacity(parts, self.root.new_empty(0))

    def _stack(self, like: Tensor) -> None:
        """Stack the rows, right-hand sides and bounds of all parts."""
        parts, n = self.parts, self.parts.variables
        lower, upper = parts.bounds(like)
        bounded = (torch.isfinite(lower) | torch.isfinite(upper)).reshape(-1, n).any(0).nonzero().squeeze(-1)
        on_u: list[Tensor] = []
        own: list[Tensor | None] = []
        sides = right_sides(parts, like)
        if parts.linear is not None:
            rows, redundancy = parts.linear.A.to(like), parts.linear.system.redundancy
            if redundancy is not None:
                kept = torch.from_numpy(redundancy.others).to(like.device)
                rows, sides[0] = rows.index_select(-2, kept), sides[0].index_select(-1, kept)
            on_u.append(rows)
            own.append(None)
        stiffness = []
        for part in parts.inequalities:
            on_u.append(part.prepared.map.at(like).dense())
            own.append(torch.eye(part.prepared.map.row_count).to(like))
            stiffness.append(torch.full((part.prepared.map.row_count,), SLACK).to(like))
        for shape in parts.shapes:
            lifted = shape.lifted(n)
            on_u.append(torch.from_numpy(lifted.on_u.toarray()).to(like))
            own.append(torch.from_numpy(lifted.own.toarray()).to(like))
            stiffness.append(torch.from_numpy(lifted.stiffness).to(like))
        on_u.append(torch.eye(n).to(like).index_select(0, bounded))
        own.append(-torch.eye(len(bounded)).to(like))
        stiffness.append(torch.full((len(bounded),), SLACK).to(like))
        sides.append(like.new_zeros(len(bounded)))
        shape_ = broadcast(*(rows.shape[:-2] for rows in on_u))
        self.matrix = torch.cat([rows.expand(*shape_, *rows.shape[-2:]) for rows in on_u], -2)  # (*batch, p, n)
        self.own = torch.block_diag(*(like.new_zeros(r.shape[-2], 0) if o is None else o for r, o in zip(on_u, own)))
        self.stiffness = torch.cat(stiffness)
        self.owner = self.own.abs().argmax(0) if len(self.own) else torch.zeros(0, dtype=torch.int64)
        self.right = joined(sides)
        self.bounded, self.lower, self.upper = bounded, lower, upper
        self.costs = linear_costs(parts, like)

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        if not self.matrix.shape[-2]:  # no rows and no bounds
            return FaceProjector(self.parts, Diagonal(self.weight.diagonal()), self.options).solve(z)
        return completed(self.parts, self.weight, z, self._solved)

    def _solved(self, z: Tensor) -> Solution:
        point = z.to(torch.float64)
        shapes = (point, self.right, self.lower, self.upper)
        lead = broadcast(*(x.shape[:-1] for x in shapes), self.root.shape[:-2], self.matrix.shape[:-2])
        point = point.expand(*lead, self.parts.variables)
        rotated = self.matrix @ self.root  # (*batch, p, r)
        matrix = torch.cat([rotated, self.own.expand(*rotated.shape[:-2], *self.own.shape)], -1)
        right = self.right - matvec(self.matrix, point)
        costs, extra = rotated.shape[-1], self.own.shape[-1]
        lower, upper = self._bounds(lead, costs)
        natural = self._natural(rotated.detach())
        stiff = torch.cat([natural[..., :costs], natural[..., costs:] * self.stiffness], -1)
        centre = torch.zeros_like(lower)
        faces = self._faces(matrix, right, centre, stiff, natural, lower, upper)
        side = faces.side.reshape(*lead, faces.side.shape[-1])
        free, bound = side == 0, torch.where(side < 0, lower, upper)
        around = faces.value.reshape(*lead, faces.value.shape[-1])[..., costs:]
        if self.costs is not None:
            around = around - stiff[..., costs:] * joined([*self.costs, around.new_zeros(len(self.bounded))])
        middle = torch.cat([centre[..., :costs], around], -1)
        held = torch.where(free, middle, torch.where(torch.isfinite(bound), bound, 0.0))
        factor = DenseRows(matrix).factor(torch.where(free, stiff, HELD * natural))
        value = factor.project(held, right)
        for _ in range(4):  # bounds that repeat a row make M nearly singular
            value = factor.project(torch.where(free, value, held), right)
        u = point + matvec(self.root, value[..., :costs])
        if len(self.bounded):
            last = slice(-len(self.bounded), None)
            ends = torch.where(free[..., last], u.index_select(-1, self.bounded), held[..., last])
            u = u.index_copy(-1, self.bounded, ends)
        u = within(u, point, self.lower, self.upper)
        found = point + matvec(self.root, faces.value.reshape(*lead, faces.value.shape[-1])[..., :costs])
        u = feasible(self.parts, point, u, found.detach().clamp(self.lower, self.upper))
        tangent = CoupledTangent(self, factor, free, extra)
        return finished(self.parts, z, u, tangent, faces.steps.reshape(lead), faces.done.reshape(lead))

    def projected_shape(self, base: LocationScale) -> torch.Size:
        batch = broadcast(base.loc.shape[:-1], self.weight.shape[:-1], self.parts.batch_shape)
        return torch.Size((*batch, self.parts.variables))

    def censored(self, base: LocationScale) -> CensoredMarginals:
        return censored_laws(self.parts, base, self.weight, self.options)

    def explain(self, z: Tensor, stats: Stats) -> ProbhardError | None:
        at = tuple(int(i) for i in torch.nonzero(~stats.converged)[0])
        lead = stats.converged.shape
        rows = self.matrix.detach().expand(*lead, *self.matrix.shape[-2:])[at]
        matrix = torch.cat([rows, self.own], -1)
        lower, upper = (x[at] for x in self._bounds(lead, self.parts.variables))
        right = self.right.detach().expand(*lead, self.right.shape[-1])[at]
        reason = empty_set(self.parts, sp.csr_array(matrix.cpu().numpy()), right, lower, upper)
        where = f" in batch element {at}" if at else ""
        return None if reason is None else InfeasibleError(reason[0] + where + ".", *reason[1:])

    def _bounds(self, lead: torch.Size, costs: int) -> tuple[Tensor, Tensor]:
        slacks = self.own.shape[-1] - len(self.bounded)
        free = self.own.new_full((*lead, costs), torch.inf)
        zero = self.own.new_zeros((*lead, slacks))
        ends = [x.index_select(-1, self.bounded).expand(*lead, -1) for x in (self.lower, self.upper)]
        return torch.cat([-free, zero, ends[0]], -1), torch.cat([free, zero + torch.inf, ends[1]], -1)

    def _natural(self, rotated: Tensor) -> Tensor:
        """Weights: 1 for e, and for auxiliary variables those of their rows."""
        sums = rotated.square().sum(-1)
        sums = torch.where(sums > 0, sums, sums.amax(-1, keepdim=True)).clamp(min=TINY)
        ones = sums.new_ones(*sums.shape[:-1], rotated.shape[-1])
        return torch.cat([ones, sums.index_select(-1, self.owner)], -1)

    @torch.no_grad()
    def _faces(self, matrix: Tensor, right: Tensor, centre: Tensor, *data: Tensor) -> Faces:
        lead, size = centre.shape[:-1], centre.shape[-1]
        costed = torch.arange(size, device=centre.device) < size - self.own.shape[-1]
        linear = None
        if self.costs is not None:
            ends = centre.new_zeros(int(costed.sum())), centre.new_zeros(len(self.bounded))
            linear = joined([ends[0], *self.costs, ends[1]]).expand(*lead, size).reshape(-1, size)
        flat = [x.expand(*lead, x.shape[-1]).reshape(-1, x.shape[-1]) for x in (right, centre, *data)]
        rows = matrix.detach().expand(*lead, *matrix.shape[-2:]).reshape(-1, *matrix.shape[-2:])
        weight, natural, lower, upper = flat[2:]
        problem = QuadraticProblem(DenseRows(rows), flat[0], flat[1], weight, natural, lower, upper, costed, linear)
        return active_set.solve(problem)


class CoupledTangent(Differential):
    """``x - R (W_F B^T M^-1 J x)_e``, the tangent of the active rows under any weight.

    Args:
        projector: The projector.
        factor: The factor of ``M = B W_F B^T``.
        free: Which variables (e, s) are free, (*lead, N) bool.
        extra: Number of auxiliary variables s.
    """

    def __init__(self, projector: CoupledProjector, factor: Factor, free: Tensor, extra: int) -> None:
        self.projector, self.factor, self.free = projector, factor, free
        self.costs = free.shape[-1] - extra

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.free.shape[:-1], self.projector.parts.variables))

    def apply(self, x: Tensor) -> Tensor:
        double = x.to(torch.float64)
        pulled = self.factor.structure.transpose(self.factor.solve(matvec(self.projector.matrix, double)))
        moved = matvec(self.projector.root, (self.factor.weight * pulled)[..., : self.costs])
        return self._masked(double - moved).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        double = self._masked(x.to(torch.float64))
        turned = matvec(self.projector.root.mT, double)
        padded = torch.cat([turned, turned.new_zeros(*turned.shape[:-1], self.free.shape[-1] - self.costs)], -1)
        solved = self.factor.solve(self.factor.structure.apply(self.factor.weight * padded))
        return (double - matvec(self.projector.matrix.mT, solved)).to(x.dtype)

    def _masked(self, x: Tensor) -> Tensor:
        """0 for variables at their bounds."""
        bounded = self.projector.bounded
        if not len(bounded):
            return x
        free = self.free[..., -len(bounded) :].to(x.dtype).expand(*x.shape[:-1], len(bounded))
        return x.index_copy(-1, bounded, x.index_select(-1, bounded) * free)
