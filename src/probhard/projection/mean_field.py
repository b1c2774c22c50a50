"""Moments of a law projected on a polyhedron, by the mean field of its rows (``laws.mean_field``).

    A u = b,     l <= C u <= h,     u = u0 - S C^T y,     K = C S C^T,     V = C U C^T,

with u0 the projection on the equalities, ``S = P W`` and ``U = P Sigma P^T`` (``rows.reduction`` has the same letters).
A bounded variable is a row of its own: its marginal is the law of its cavity field, clipped at the bounds. The others
are not clipped. With the response ``R = S C^T G`` and the noise N of the rows they have

    E u = u0 - S C^T E y,        Var u = diag(U - 2 R C U + R (V + N) R^T).

No point is projected. Parallel rows are merged to one row with two bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.numerics import TINY, floored
from probhard._util.tensors import broadcast, checking, safe_sqrt
from probhard.laws.covariance import Covariance, Diagonal
from probhard.laws.distribution import LocationScale
from probhard.laws.marginals import CensoredMarginals
from probhard.laws.mean_field import Fields, Rows, mean_field
from probhard.laws.tails import TAILS, unit_variance
from probhard.projection.lifting import shared
from probhard.projection.merged_rows import MergedRows
from probhard.projection.parts import Parts

MOST_ROWS = 64  # rows up to which "auto" takes this rule
FIXED = 1e-12  # variance of a row after the equalities, relative to before, at which they fix it


@dataclass(frozen=True)
class MeanField:
    """The rule for one constraint and one weight.

    Args:
        parts: The parts of the constraint.
        weight: W, over (*batch, n).
        oblique: Whether W is the covariance of the law that is projected.
    """

    parts: Parts
    weight: Covariance
    oblique: bool

    @property
    def served(self) -> bool:
        """Whether the set has the rule: a polyhedron whose rows interact, all shared by the batch."""
        parts = self.parts
        if parts.only_equalities or not parts.polyhedral or parts.semicontinuous or not shared(parts):
            return False
        if not all(shape.only_rows for shape in parts.shapes):
            return False
        if parts.linear is not None and parts.linear.system.held is not None:
            return False
        alone = parts.linear is None and not parts.inequalities and not parts.shapes
        return not (alone and isinstance(self.weight, Diagonal))  # bounds alone: clipped marginals are exact

    @property
    def cheap(self) -> bool:
        """Whether "auto" takes the rule."""
        parts = self.parts
        rows = sum(part.prepared.map.row_count for part in parts.inequalities)
        rows += sum(shape.lifted(parts.variables).on_u.shape[0] for shape in parts.shapes)
        return rows + parts.variables * (parts.box is not None) <= MOST_ROWS and parts.variables <= 4 * MOST_ROWS

    def fits(self, base: LocationScale) -> bool:
        """Whether the law has one family with a finite variance for all variables."""
        own, unit = base.family._parameter_shape(), unit_variance(base.family)
        finite = bool(torch.isfinite(unit).all()) if isinstance(unit, Tensor) else math.isfinite(unit)
        return not own and finite and base.family.name in TAILS

    def laws(self, base: LocationScale) -> CensoredMarginals:
        """The marginals of the projected law, batch (*batch, n)."""
        problem = _Problem.of(self.parts, self.weight, base, self.oblique)
        fields = mean_field(problem.flat(), base.family)
        loc, scale = problem.placed(fields)
        lower, upper = self.parts.bounds(base.loc)
        loc, scale = loc.to(base.loc.dtype), scale.to(base.loc.dtype)
        if checking() and not bool(torch.isfinite(scale.square()).all()):  # a mean without a variance is unknown, too
            known = torch.isfinite(scale.square()).all(-1, keepdim=True)
            loc, scale = (torch.where(known, x, torch.nan) for x in (loc, scale))
        return CensoredMarginals(loc, scale, base.family, lower, upper, validate_args=False)


@dataclass(frozen=True)
class _Problem:
    """The rows of a law without their equalities, scaled to unit K."""

    rows: MergedRows
    batch: torch.Size
    loc: Tensor  # u0, (*batch, n)
    spread: Tensor  # diagonal of U, (*batch, n)
    pushed: Tensor  # S C^T, (*batch, n, r)
    columns: Tensor  # U C^T, (*batch, n, r)
    gram: Tensor  # K, (*batch, r, r)
    cov: Tensor  # V, (*batch, r, r)
    scale: Tensor  # what rows are multiplied by, (*batch, r)
    fixed: Tensor  # rows that the equalities fix, (*batch, r) bool

    @classmethod
    def of(cls, parts: Parts, weight: Covariance, base: LocationScale, oblique: bool) -> _Problem:
        loc = base.loc.to(torch.float64)
        rows = MergedRows.of(parts, loc.new_empty(0))
        batch = broadcast(*(x.shape[:-1] for x in (loc, rows.right, rows.lower)), weight.shape[:-1])
        whole = _matrix(weight)
        free, gain = whole, None  # S and E
        if len(rows.equal):
            images = rows.equal @ whole
            factor = torch.linalg.cholesky_ex(images @ rows.equal.mT).L
            half = torch.linalg.solve_triangular(factor, images, upper=False)
            free = whole - half.mT @ half
            gain = torch.linalg.solve_triangular(factor.mT, half, upper=True).mT
            loc = loc - ((loc @ rows.equal.mT - rows.right).unsqueeze(-2) @ gain.mT).squeeze(-2)
        pushed = rows.times(free)
        gram = rows.times(pushed.mT)
        spread, columns, cov = free, pushed, gram
        if not oblique:
            spread = _matrix(base.cov)
            if gain is not None:
                spread = spread - gain @ (rows.equal @ spread)
                spread = spread - (spread @ rows.equal.mT) @ gain.mT
            columns = rows.times(spread)
            cov = rows.times(columns.mT)
        with torch.no_grad():
            own = gram.diagonal(dim1=-2, dim2=-1)
            before = rows.times(rows.times(whole).mT).diagonal(dim1=-2, dim2=-1)
            fixed = own <= FIXED * before
            scale = torch.where(fixed, 0.0, own.clamp(min=TINY).rsqrt())
        diagonal = spread.diagonal(dim1=-2, dim2=-1)
        return cls(rows, batch, loc, diagonal, pushed, columns, gram, cov, scale, fixed)

    def flat(self) -> Rows:
        """The rows, scaled, for all elements of the batch."""
        rows, both = self.rows, self.scale.unsqueeze(-1) * self.scale.unsqueeze(-2)
        matrices = [self.gram] if self.cov is self.gram else [self.gram, self.cov]
        matrices = [x * both + torch.diag_embed(self.fixed.to(x)) for x in matrices]
        loc = self.scale * rows.times(self.loc.unsqueeze(-2)).squeeze(-2)
        lower, upper = self.scale * rows.lower, self.scale * rows.upper
        lower = torch.where(self.fixed, -torch.inf, lower)
        upper = torch.where(self.fixed, torch.inf, upper)
        count, total = loc.shape[-1], self.batch.numel()
        vectors = [x.expand(*self.batch, count).reshape(total, count) for x in (loc, lower, upper)]
        gram, *own = (x.expand(*self.batch, count, count).reshape(total, count, count) for x in matrices)
        return Rows(vectors[0], gram, *vectors[1:], *own)

    def placed(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """Locations and scales (*batch, n): those of fields for variables that count as rows, else of the law of u."""
        n, first = self.loc.shape[-1], len(self.rows.dense)
        loc, scale = self._unclipped(fields)
        variable = torch.cat([self.rows.units.new_full((first,), n), self.rows.units])  # of every row; n for none
        target = torch.where(fields.used, variable[fields.index], n).reshape(*self.batch, fields.index.shape[-1])
        size = 1 / self._chosen(self.scale.unsqueeze(-2), fields).squeeze(-2).clamp(min=TINY)
        found = []
        for whole, own in ((loc, fields.loc), (scale, fields.scale)):
            padded = torch.nn.functional.pad(whole, (0, 1))
            found.append(padded.scatter(-1, target, size * own.reshape(size.shape))[..., :n])
        return found[0], found[1]

    def _unclipped(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """Means and scales (*batch, n) of all variables without clipping; not computed where none is asked for."""
        n = self.loc.shape[-1]
        mean, variance = self.loc.expand(*self.batch, n), self.spread.expand(*self.batch, n)
        every = not len(self.rows.rest) and fields.index.shape[-1] == self.scale.shape[-1]
        every = every and (not checking() or bool(fields.used.all()))
        if every or not fields.index.shape[-1]:
            return mean, safe_sqrt(variance)
        multiplier, response, cov = (x.reshape(*self.batch, *x.shape[1:]) for x in fields.multipliers())
        scale = self.scale.unsqueeze(-2)
        pushed = self._chosen(self.pushed * scale, fields)
        columns = pushed if self.columns is self.pushed else self._chosen(self.columns * scale, fields)
        mean = mean - (pushed @ multiplier.unsqueeze(-1)).squeeze(-1)
        moved = pushed @ response
        change = (moved * (moved @ cov - 2 * columns)).sum(-1)
        return mean, safe_sqrt((variance + change).clamp(min=0))

    def _chosen(self, x: Tensor, fields: Fields) -> Tensor:
        """The columns (*batch, i, k) of the rows that count, of x (*batch, i, r); 0 for the others."""
        index = fields.index.reshape(*self.batch, 1, fields.index.shape[-1])
        used = fields.used.reshape(index.shape)
        x = x.expand(*self.batch, *x.shape[-2:])
        return torch.where(used, x.gather(-1, index.expand(*x.shape[:-1], index.shape[-1])), 0.0)


def _matrix(cov: Covariance) -> Tensor:
    """The matrix of a covariance in float64, (*batch, n, n), with a floor under its variances."""
    double = cov.to(torch.float64)
    if isinstance(double, Diagonal):
        return torch.diag_embed(floored(double.variance))
    root = double.root_matrix()
    return root @ root.mT
