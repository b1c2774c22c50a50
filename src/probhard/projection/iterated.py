"""Projection on polyhedral sets by a fixed number of branch-free iterations, for compilation and export.

    u = u0 - S C^T y,     u0 = z - E (A z - b),     E = W A^T (A W A^T)^-1,     S = (I - E A) W,     K = C S C^T.

Equalities ``A u = b`` are eliminated. The multipliers y of ``C u`` in intervals and L1 balls come from
``solvers.splitting``. Gradients are those of the face that was found. The result is not exact, so it carries its
residual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probhard._util.numerics import TINY, TOLERANCE
from probhard._util.tensors import broadcast, matvec
from probhard.constraints.l1_ball import L1Ball
from probhard.constraints.shapes import Shape
from probhard.constraints.variation import TotalVariation
from probhard.errors import ParameterError
from probhard.laws.covariance import Covariance
from probhard.laws.distribution import LocationScale
from probhard.laws.marginals import CensoredMarginals
from probhard.projection.base import Options, Projector, Solution, Stats
from probhard.projection.iterated_rows import IteratedReduction, IteratedRows
from probhard.projection.parts import Parts
from probhard.projection.polyhedral import censored_laws
from probhard.solvers.splitting import Face, SplitProblem, iterate, polished, relaxation
from probhard.tangent.base import Differential

STATIONARY = {torch.float64: 1e-9, torch.float32: 1e-5}  # relative error of the multipliers
ROUNDING = 8.0  # times the precision: how far a point may be moved to its bound


def iterated(parts: Parts) -> bool:
    """Whether parts need iterations: not equalities alone, nor bounds alone, which are traced exactly.

    Args:
        parts: The parts of a constraint.

    Raises:
        ParameterError: A part is not polyhedral, or is a cost.
    """
    if parts.only_equalities and parts.nonlinear is None:
        return False
    if not parts.polyhedral or parts.semicontinuous or not all(map(_suits, parts.shapes)):
        raise ParameterError(
            f"DPPL(iterations=...) got {parts.constraint!r}.",
            "Its iterations are for linear rows, bounds, monotone and convex profiles, L1 balls and total variation.",
            "Use the exact layer, without iterations.",
        )
    return parts.linear is not None or not parts.bounded_only


def _suits(shape: Shape) -> bool:
    return shape.only_rows or isinstance(shape, L1Ball | TotalVariation)


class IteratedProjector(Projector):
    """Projects on polyhedral parts by a fixed number of iterations.

    Args:
        parts: The parts of the constraint.
        weight: W, over (*batch, n).
        options: Options of the layer.
    """

    def __init__(self, parts: Parts, weight: Covariance, options: Options) -> None:
        assert options.iterations is not None
        self.parts, self.weight, self.options, self.iterations = parts, weight, options, options.iterations
        self.moments_from = "censored" if parts.bounded_only else "monte-carlo"
        self.has_equalities = parts.linear is not None
        wide = weight.to(torch.float64)
        self.rows = IteratedRows.of(parts, torch.empty(0, dtype=torch.float64, device=weight.device))
        held = None if parts.linear is None else parts.linear.system.held
        self.reduction = IteratedReduction(self.rows, wide, None if held is None else held.to(weight.device))
        with torch.no_grad():
            self.relaxation = relaxation(self.reduction.gram)

    def projected_shape(self, base: LocationScale) -> torch.Size:
        batch = broadcast(base.loc.shape[:-1], self.weight.shape[:-1], self.parts.batch_shape)
        return torch.Size((*batch, self.parts.variables))

    def censored(self, base: LocationScale) -> CensoredMarginals:
        return censored_laws(self.parts, base, self.weight, self.options)

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        rows, reduction = self.rows, self.reduction
        shapes = [x.shape[:-1] for x in (z, rows.right, rows.lower, rows.upper, reduction.scale)]
        shapes += [block.radius.shape for block in rows.blocks] + [block.center.shape[:-1] for block in rows.blocks]
        lead = broadcast(*shapes)
        point = z.to(torch.float64).expand(*lead, self.parts.variables)
        base = reduction.nearest(point, rows.right)
        problem = reduction.problem(matvec(reduction.matrix, base))
        with torch.no_grad():
            y, face, error = polished(problem, iterate(problem, self.relaxation, self.iterations))
            u = reduction.nearest(base - matvec(reduction.columns, y), rows.right)
            rest = face.solve(problem.gram, matvec(reduction.matrix, u))  # what rounding left
            u = reduction.nearest(u - matvec(reduction.columns, rest), rows.right)
        if torch.is_grad_enabled():
            traced = base - matvec(reduction.columns, face.solve(problem.gram, problem.value))
            u = u + (traced - traced.detach())
        u = self._placed(u.to(z.dtype), z)
        with torch.no_grad():
            stats = self._stats(z, u, error, problem.value)
        return Solution(u, IteratedTangent(reduction, problem, face), stats)

    def _placed(self, u: Tensor, z: Tensor) -> Tensor:
        """Points moved to a bound within rounding; gradients are unchanged."""
        if self.parts.box is None:
            return u
        with torch.no_grad():
            near = ROUNDING * torch.finfo(u.dtype).eps * _size(z, u)
            placed = u
            for bound in (self.parts.box.lower.to(u), self.parts.box.upper.to(u)):
                placed = torch.where((u - bound).abs() <= near, bound, placed)
            shift = placed - u
        return u + shift

    def _stats(self, z: Tensor, u: Tensor, error: Tensor, value: Tensor) -> Stats:
        parts, size = self.parts, _size(z, u)
        residual = u.new_zeros(u.shape[:-1])
        for part in (parts.linear, parts.box, *parts.inequalities, *parts.shapes):
            if part is not None:
                residual = torch.maximum(residual, part.relative_violation(u, size))
        residual = residual.nan_to_num(torch.inf)
        scale = torch.maximum(value.abs(), 1e-6 * size * self.reduction.scale).amax(-1).clamp(min=TINY)
        stationary = error <= STATIONARY[z.dtype] * scale
        steps = torch.full_like(residual, self.iterations, dtype=torch.int64)
        return Stats(steps, residual, stationary & (residual <= TOLERANCE[z.dtype]))


def _size(z: Tensor, u: Tensor) -> Tensor:
    return torch.maximum(z.abs().amax(-1, keepdim=True), u.abs().amax(-1, keepdim=True))


class IteratedTangent(Differential):
    """``(I - S C_a^T K_aa^-1 C_a) P`` on the face a, factored by each product.

    Args:
        reduction: The equalities, eliminated.
        problem: The problem of the multipliers.
        face: The face.
    """

    def __init__(self, reduction: IteratedReduction, problem: SplitProblem, face: Face) -> None:
        self.reduction, self.problem, self.face = reduction, problem, face

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.face.side.shape[:-1], self.reduction.rows.unequal.shape[-1]))

    def apply(self, x: Tensor) -> Tensor:
        moved = self.reduction.project(x.to(torch.float64))
        return (moved - matvec(self.reduction.columns, self._solve(matvec(self.reduction.matrix, moved)))).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float64)
        moved = wide - matvec(self.reduction.matrix.mT, self._solve(matvec(self.reduction.columns.mT, wide)))
        return self.reduction.project_transpose(moved).to(x.dtype)

    def _solve(self, t: Tensor) -> Tensor:
        """The multipliers of directions t (..., *lead, m)."""
        return self.face.directions.solve(self.problem.gram, t)
