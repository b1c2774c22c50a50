"""Projection on shared dense rows and bounds, in terms of the multipliers of the inequalities.

    A u = b,     l <= C u <= h,     u = u0 - S C^T y,

with u0 the projection on the equalities (``rows.reduction``) and y from ``solvers.pivoting``. One constant metric has
one factor of the equalities for all batches. Weights of single elements have one Cholesky factor each, and K only
where the equalities alone leave a row violated.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from probhard._util.lru import Recent
from probhard._util.numerics import TOLERANCE, WEIGHT_FLOOR
from probhard._util.tensors import broadcast, checking
from probhard.errors import ProbhardError
from probhard.laws.covariance import Covariance, Dense, Diagonal, LowRank
from probhard.laws.distribution import LocationScale
from probhard.laws.marginals import CensoredMarginals
from probhard.projection import near_rows
from probhard.projection.base import Options, Projector, Solution, Stats
from probhard.projection.checked import finished, within
from probhard.projection.coupled import CoupledProjector
from probhard.projection.diagnosis import check_capacity
from probhard.projection.lifting import lift, shared
from probhard.projection.parts import Parts
from probhard.projection.polyhedral import FaceProjector, censored_laws
from probhard.projection.reduced_rows import ReducedRows
from probhard.projection.reduced_tangent import ReducedTangent, on_face
from probhard.rows.dense import DenseRows
from probhard.rows.reduction import BatchedReduction, Reduction, SharedReduction
from probhard.solvers import pivoting
from probhard.solvers.pivoting import DualProblem, Sides

ACCURATE = 0.1  # violation above which a point is refined, relative to what is tolerated
_KNOWN: Recent[SharedReduction] = Recent()


def reduced(parts: Parts, weight: Covariance, options: Options) -> ReducedProjector | None:
    """The projector, or None if these parts or this weight have another method.

    Args:
        parts: The parts of a constraint.
        weight: W, over (*batch, n).
        options: Options of the layer.

    Raises:
        InfeasibleError: The bounds make a row infeasible and ``options.validate`` is set.
    """
    if not checking() or not _dense(parts):
        return None
    constant = len(weight.shape) == 1 and not weight.diagonal().requires_grad
    if isinstance(weight, Diagonal):
        variance = weight.variance
        if bool((variance <= WEIGHT_FLOOR * variance.amax(-1, keepdim=True)).any()):
            return None  # variables that do not move
    elif not constant or not isinstance(weight, LowRank | Dense):
        return None
    like = torch.empty(0, dtype=torch.float64, device=weight.device)
    rows = ReducedRows.of(parts, like)
    if not len(rows.unequal) or not rows.pays(constant):  # bounds of an empty batch, or infinite ones
        return None
    reduction: Reduction
    if constant:
        reduction = _shared(parts, rows, weight)
        if not reduction.regular:
            return None
    else:
        assert isinstance(weight, Diagonal)
        reduction = BatchedReduction(rows.equal, rows.unequal, rows.bounded, weight.variance.detach().to(like))
    return ReducedProjector(parts, weight, options, rows, reduction)


def _dense(parts: Parts) -> bool:
    """Whether the rows are shared, dense and without a structure of their own."""
    if parts.only_equalities or not parts.polyhedral or parts.shapes or parts.semicontinuous or not shared(parts):
        return False
    system = lift(parts).system
    return system is not None and system.held is None and isinstance(system.core, DenseRows)


def _shared(parts: Parts, rows: ReducedRows, weight: Covariance) -> SharedReduction:
    """The reduction for one constant weight, from an LRU cache by value."""
    if isinstance(weight, LowRank):
        values: tuple[Tensor, ...] = (weight.factor, weight.diagonal_part)
    else:
        values = (weight.scale_tril,) if isinstance(weight, Dense) else (weight.diagonal(),)
    objects = [] if parts.linear is None else [parts.linear.system]
    key = (
        parts.variables,
        (*objects, *(part.prepared for part in parts.inequalities)),
        parts.linear is None,
        rows.bounded.numpy(force=True).tobytes(),
        weight.device,
        tuple((tuple(x.shape), x.dtype, x.numpy(force=True).tobytes()) for x in values),
    )
    root = weight.to(torch.float64)
    return _KNOWN.get(key, lambda: SharedReduction(rows.equal, rows.unequal, root.root_matrix()))


class ReducedProjector(Projector):
    """Projects on shared dense rows and bounds under a weight with a reduction.

    Args:
        parts: The parts of the constraint: linear equalities, inequalities and bounds.
        weight: W, over (*batch, n).
        options: Options of the layer.
        rows: The rows of the parts.
        reduction: Their equalities, eliminated under the weight.

    Raises:
        InfeasibleError: The bounds make a row infeasible and ``options.validate`` is set.
    """

    def __init__(
        self, parts: Parts, weight: Covariance, options: Options, rows: ReducedRows, reduction: Reduction
    ) -> None:
        self.parts, self.weight, self.options, self.rows, self.reduction = parts, weight, options, rows, reduction
        self.moments_from = "censored" if parts.bounded_only else "monte-carlo"
        self.has_equalities = parts.linear is not None
        if options.validate and not (parts.kept or {}).get(ReducedProjector):
            check_capacity(parts, rows.equal.new_empty(0))
            if parts.kept is not None:
                parts.kept[ReducedProjector] = True

    def projected_shape(self, base: LocationScale) -> torch.Size:
        batch = broadcast(base.loc.shape[:-1], self.weight.shape[:-1], self.parts.batch_shape)
        return torch.Size((*batch, self.parts.variables))

    def censored(self, base: LocationScale) -> CensoredMarginals:
        return censored_laws(self.parts, base, self.weight, self.options)

    def explain(self, z: Tensor, stats: Stats) -> ProbhardError | None:
        return self._general.explain(z, stats)

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        rows, reduction = self.rows, self.reduction
        point = z.to(torch.float64)
        lead = broadcast(*(x.shape[:-1] for x in (point, rows.right, rows.lower, rows.upper)), reduction.batch)
        point = point.expand(*lead, self.parts.variables)
        base = reduction.nearest(point, rows.right)
        value = reduction.image(base)
        lower, upper = (reduction.scale * x for x in (rows.lower, rows.upper))
        sides, active, moves = self._sides(point, base, value, lower, upper)
        y, side = sides.multiplier.reshape(value.shape), active.side
        bound = torch.where(side == 0, 0.0, torch.where(side < 0, lower, upper))
        traced = torch.is_grad_enabled() and (value.requires_grad or bound.requires_grad)
        if traced and self.trained is None:
            y, moves = active.solve(value - bound), None
        u = base - (reduction.push(y) if moves is None else moves)
        tangent = active
        if self.trained is not None:
            tangent = ReducedTangent(lambda: self.traced, side, active.fixed, active.elements, active.owner)
            if torch.is_grad_enabled():
                face = on_face(self.trained, point, rows.right, bound, active)
                u = face + (u - face).detach()
        u = self._placed(u, point, side)
        status = sides.steps.reshape(lead), sides.done.reshape(lead)
        solution = finished(self.parts, z, u, tangent, *status)
        fine = solution.stats.residual <= ACCURATE * TOLERANCE[z.dtype]
        if bool((fine & solution.stats.converged).all()):
            return solution
        with torch.no_grad():  # once more from u, whose numbers may be much smaller than those of z
            again = reduction.nearest(u, rows.right)
            again = self._placed(again - reduction.push(active.solve(reduction.image(again) - bound)), point, side)
            shift = torch.where(fine.unsqueeze(-1), 0.0, again - u)
        return self._or_other(z, finished(self.parts, z, u + shift, tangent, *status))

    def _or_other(self, z: Tensor, solution: Solution) -> Solution:
        """The solution, or that of all rows with their auxiliary variables where only this one converges."""
        converged = solution.stats.converged
        if bool(converged.all()):
            return solution
        other = self._general.solve(z)
        return other if bool((other.stats.converged | ~converged).all()) else solution

    @property
    def _general(self) -> Projector:
        make = FaceProjector if isinstance(self.weight, Diagonal) else CoupledProjector
        return make(self.parts, self.weight, self.options)  # type: ignore[arg-type]

    @cached_property
    def trained(self) -> Tensor | None:
        """The diagonal of W if it requires gradients, (*batch, n)."""
        own = isinstance(self.weight, Diagonal) and self.weight.variance.requires_grad
        return self.weight.diagonal().to(torch.float64) if own else None

    @cached_property
    def traced(self) -> Reduction:
        """The reduction with the gradients of its weight."""
        if self.trained is None:
            return self.reduction
        return BatchedReduction(self.rows.equal, self.rows.unequal, self.rows.bounded, self.trained)

    def _sides(
        self, point: Tensor, base: Tensor, value: Tensor, lower: Tensor, upper: Tensor
    ) -> tuple[Sides, ReducedTangent, Tensor | None]:
        """Sides, tangents and, if known, moves ``S C^T y`` without gradients of the weight.

        K is formed only for elements with a violated row, and among few rows where few can be active.
        """
        lead, m, reduction = value.shape[:-1], value.shape[-1], self.reduction
        flat = [x.detach().expand(value.shape).reshape(-1, m) for x in (value, lower, upper)]
        outside = ((flat[0] > flat[2]) | (flat[0] < flat[1]) | (flat[1] == flat[2])).any(-1)
        number = reduction.numbers(lead)
        index = outside.nonzero().squeeze(-1)
        elements, found = torch.unique(number.index_select(0, index), return_inverse=True)
        elements = elements if len(elements) else number[:1]
        owner = torch.zeros_like(number).index_copy(0, index, found)
        steps = torch.ones_like(number)
        sides = Sides(torch.zeros_like(flat[0], dtype=torch.int8), torch.zeros_like(flat[0]), steps, steps > 0)
        gram, moves = None, None
        if len(index):
            size = self._size(point, base).reshape(-1, m)
            rank = self.parts.variables - len(self.rows.equal)
            problem = DualProblem(value.new_empty(0, m, m), owner, flat[0], flat[1], flat[2], size, rank).select(index)
            own = len(index) == len(elements) and isinstance(reduction, BatchedReduction)
            rows = near_rows.near_rows(problem) if own else None
            if rows is None:
                gram = reduction.gram(elements)
                part = pivoting.solve(replace(problem, gram=gram))
            else:
                part, moved = near_rows.solve(problem, reduction.select(elements), rows)
                moves = base.new_zeros(len(number), base.shape[-1]).index_copy(0, index, moved).reshape(base.shape)
            sides = sides.placed(index, part)
        side = sides.side.reshape(value.shape)
        return sides, ReducedTangent(lambda: reduction, side, self._fixed(side), elements, owner, gram), moves

    @torch.no_grad()
    def _size(self, point: Tensor, base: Tensor) -> Tensor:
        """Size of the terms of each row, (*lead, m)."""
        return self.reduction.scale * ((point.abs() + base.abs()) @ self.rows.unequal.abs().mT)

    def _placed(self, u: Tensor, point: Tensor, side: Tensor) -> Tensor:
        """Points with held and pinned variables exactly at their values, and the others within their bounds."""
        bounded, rows = self.rows.bounded, self.rows
        if len(bounded):
            last = slice(side.shape[-1] - len(bounded), None)
            held = side[..., last]
            bound = torch.where(held < 0, rows.lower[..., last], rows.upper[..., last])
            ends = torch.where(held != 0, bound, u.index_select(-1, bounded))
            u = within(u.index_copy(-1, bounded, ends), point, *self.parts.bounds(u))
        linear = self.parts.linear
        if linear is not None and linear.system.pins is not None:
            pins = linear.system.pins.at(u)
            u = u.index_copy(-1, pins.variable, pins.values(linear.b.to(u)).expand(*u.shape[:-1], -1))
        return u

    def _fixed(self, side: Tensor) -> Tensor:
        """Variables (*lead, n) that are held at a bound or fixed by the equalities, for sides (*lead, m)."""
        fixed = self.reduction.determined.expand(*side.shape[:-1], self.parts.variables)
        bounded = self.rows.bounded
        if not len(bounded):
            return fixed
        held = side[..., side.shape[-1] - len(bounded) :] != 0
        return fixed.index_copy(-1, bounded, held | fixed.index_select(-1, bounded))
