"""The rows of polyhedral parts and their reduction under a weight, without branches on numbers.

    E = W A^T (A W A^T)^-1,     S = (I - E A) W,     K = C S C^T,

for equalities ``A u = b`` and rows ``C u`` in intervals and L1 balls. Everything is differentiable and can be traced.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard._util.tensors import broadcast, matvec
from probhard.constraints.l1_ball import L1Ball
from probhard.constraints.shapes import Shape, profiles
from probhard.constraints.variation import TotalVariation
from probhard.laws.covariance import Covariance, Diagonal
from probhard.projection.lifting import joined
from probhard.projection.parts import Parts
from probhard.rows.dense import cholesky_solve
from probhard.solvers.splitting import L1Block, SplitProblem

REFINED = 3  # steps onto the equalities, the first of them inexact by a ridge
RIDGE = 1e-13  # relative to A W A^T, for rows that repeat others; refined away


@dataclass(frozen=True)
class IteratedRows:
    """The rows of all parts in float64."""

    equal: Tensor  # A, (*batch, q, n)
    right: Tensor  # b, (*batch, q)
    unequal: Tensor  # C: rows G, bounds, profiles, then rows of L1 balls, (*batch, m, n)
    lower: Tensor  # (*batch, m)
    upper: Tensor  # (*batch, m)
    blocks: tuple[L1Block, ...]

    @classmethod
    def of(cls, parts: Parts, like: Tensor) -> IteratedRows:
        """The rows, cached with the plan if the data are constant."""
        known: IteratedRows | None = (parts.kept or {}).get((cls, like.device))
        if known is not None:
            return known
        n = parts.variables
        eye = torch.eye(n, dtype=like.dtype, device=like.device)
        equal, right = eye[:0], like.new_zeros(0)
        if parts.linear is not None:
            equal, right = parts.linear.system.map.at(like).dense(), parts.linear.b.to(like)
        rows, lower, upper = [], [], []
        for part in parts.inequalities:
            rows.append(part.prepared.map.at(like).dense())
            upper.append(part.d.to(like))
            lower.append(torch.full_like(upper[-1].detach(), -torch.inf))
        if parts.box is not None:
            low, high = parts.bounds(like)
            rows.append(eye)
            lower.append(low)
            upper.append(high)
        for shape in parts.shapes:
            if shape.only_rows:  # the excess is linear in u
                rows.append(shape.excess(eye).mT)
                upper.append(like.new_zeros(rows[-1].shape[-2]))
                lower.append(torch.full_like(upper[-1], -torch.inf))
        count = sum(part.shape[-2] for part in rows)
        blocks: list[L1Block] = []
        for shape in parts.shapes:
            for matrix, center, radius in _balls(shape, eye):
                rows.append(matrix)
                blocks.append(L1Block(count, count + len(matrix), center, radius))
                count += len(matrix)
                lower.append(like.new_full((len(matrix),), -torch.inf))
                upper.append(like.new_full((len(matrix),), torch.inf))
        batch = broadcast(*(part.shape[:-2] for part in rows))
        unequal = torch.cat([part.expand(*batch, *part.shape[-2:]) for part in rows], -2)
        made = cls(equal, right, unequal, joined(lower), joined(upper), tuple(blocks))
        if parts.kept is not None:
            parts.kept[cls, like.device] = made
        return made


def _balls(shape: Shape, eye: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows (k, n), centers (*batch, k) and radii (*batch,) of the L1 balls of a shape."""
    if isinstance(shape, L1Ball):
        center = eye.new_zeros(eye.shape[-1]) if shape.center is None else shape.center.to(eye)
        return [(eye, center.expand(*center.shape[:-1], eye.shape[-1]), shape.radius.to(eye))]
    if isinstance(shape, TotalVariation):
        steps = profiles(eye, shape.slices).diff(dim=-1).movedim(0, -1)  # (slices, width - 1, n)
        bounds = shape.per_slice_amounts(eye)
        return [(step, step.new_zeros(len(step)), bounds[..., i]) for i, step in enumerate(steps.unbind(0))]
    return []


class IteratedReduction:
    """The equalities eliminated under a weight, with differentiable products and no branches.

    Args:
        rows: The rows.
        weight: W, over (*batch, n).
        held: Variables that do not move, or None.
    """

    def __init__(self, rows: IteratedRows, weight: Covariance, held: Tensor | None) -> None:
        self.rows = rows
        columns = _weighted(weight, rows.unequal, held)  # W C^T
        self.gain: Tensor | None = None
        if rows.equal.shape[-2]:
            self.gain = _weighted(weight, rows.equal, held)  # W A^T
            gram = rows.equal @ self.gain
            top = gram.detach().diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=TINY)
            eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
            self.lower = torch.linalg.cholesky_ex(gram + RIDGE * top[..., None, None] * eye).L
        with torch.no_grad():
            size = (rows.unequal * columns.mT).sum(-1).clamp(min=TINY)
            for block in rows.blocks:  # one scale for each ball
                inner = size[..., block.start : block.stop]
                same = inner.mean(-1, keepdim=True).expand(inner.shape)
                size = torch.cat([size[..., : block.start], same, size[..., block.stop :]], -1)
            self.scale = size.rsqrt()  # (*batch, m)
        if self.gain is not None:
            for _ in range(REFINED):
                columns = columns - self.gain @ torch.cholesky_solve(rows.equal @ columns, self.lower)
        self.columns = columns * self.scale.unsqueeze(-2)  # S C^T, (*batch, n, m)
        self.matrix = rows.unequal * self.scale.unsqueeze(-1)  # C, (*batch, m, n)
        gram = self.matrix @ self.columns
        self.gram = 0.5 * (gram + gram.mT)

    def lift(self, r: Tensor) -> Tensor:
        """``E r``, (..., n), for residuals r (..., q)."""
        assert self.gain is not None
        return matvec(self.gain, cholesky_solve(self.lower, r))

    def nearest(self, z: Tensor, right: Tensor) -> Tensor:
        """Points z (*lead, n) moved onto the equalities."""
        if self.gain is None:
            return z
        for _ in range(REFINED):
            z = z - self.lift(matvec(self.rows.equal, z) - right)
        return z

    def project(self, x: Tensor) -> Tensor:
        """``P x``, (..., n)."""
        return x if self.gain is None else x - self.lift(matvec(self.rows.equal, x))

    def project_transpose(self, x: Tensor) -> Tensor:
        """``P^T x``, (..., n)."""
        if self.gain is None:
            return x
        return x - matvec(self.rows.equal.mT, cholesky_solve(self.lower, matvec(self.gain.mT, x)))

    def problem(self, value: Tensor) -> SplitProblem:
        """The problem of the multipliers for values ``C u0`` (*lead, m), scaled."""
        rows = self.rows
        blocks = []
        for block in rows.blocks:
            scale = self.scale[..., block.start : block.stop]
            blocks.append(L1Block(block.start, block.stop, scale * block.center, scale[..., 0] * block.radius))
        return SplitProblem(self.gram, value, self.scale * rows.lower, self.scale * rows.upper, tuple(blocks))


def _weighted(weight: Covariance, rows: Tensor, held: Tensor | None) -> Tensor:
    """``W R^T``, (*batch, n, k), for rows R (*batch, k, n)."""
    if isinstance(weight, Diagonal):
        values = weight.variance if held is None else weight.variance.index_fill(-1, held, 0.0)
        return rows.mT * values.unsqueeze(-1)
    root = weight.root_matrix()
    root = root if held is None else root.index_fill(-2, held, 0.0)
    return root @ (rows @ root).mT
