"""One row per block of variables, and rows that mix a few columns of all blocks.

``J = M + sum_k C_k N_k``: M holds in row j the values of block j, N_k those of a few columns of it, and C_k mixes the
blocks (a conservation law whose mass is that of one slice and whose fluxes are summed over time). Products cost O(n),
and

    J W J^T = diag(a) + sum_k (C_k diag(b_k) + diag(b_k) C_k^T + C_k diag(d_k) C_k^T)

comes from sums over blocks: ``a = M W M^T``, ``b_k = N_k W M^T``, ``d_k = N_k W N_k^T``; different k touch different
columns. Likewise ``diag(J^T X J)`` of any X (q, q) needs its diagonal, those of ``X C_k`` and of ``C_k^T X C_k``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from probhard.rows.base import Factor, Structure
from probhard.rows.dense import cholesky_solve


@dataclass(frozen=True)
class Mixed:
    """Columns ``start, ..., start + c - 1`` of every block, and how blocks mix."""

    start: int
    values: Tensor  # (*batch, q, c)
    mixing: Tensor  # C, (*batch, q, q)


class BlockRows(Structure):
    """Rows over q consecutive blocks of equal width, after some variables that no row touches.

    Args:
        values: M, (*batch, q, width).
        mixed: The N_k and C_k, over different columns.
        before: Number of variables before the first block.
    """

    double = True

    def __init__(self, values: Tensor, mixed: tuple[Mixed, ...], before: int = 0) -> None:
        self.values, self.mixed, self.before = values, mixed, before
        self.row_count, self.width = values.shape[-2:]
        self.variables = before + self.row_count * self.width

    @property
    def batch_dims(self) -> int:
        return self.values.dim() - 2

    @property
    def constant(self) -> bool:
        return False

    @property
    def algorithm(self) -> str:
        return f"dense Cholesky of {self.row_count} x {self.row_count}, rows by blocks"

    def apply(self, x: Tensor) -> Tensor:
        blocks = self._blocks(x)
        found = (self.values * blocks).sum(-1)
        for part in self.mixed:
            own = (part.values * blocks[..., part.start : part.start + part.values.shape[-1]]).sum(-1)
            found = found + (part.mixing @ own.unsqueeze(-1)).squeeze(-1)
        return found

    def transpose(self, y: Tensor) -> Tensor:
        found = self.values * y.unsqueeze(-1)
        for part in self.mixed:
            pulled = part.values * (part.mixing.mT @ y.unsqueeze(-1))
            after = self.width - part.start - pulled.shape[-1]
            found = found + pad(pulled, (part.start, after))
        return pad(found.flatten(-2), (self.before, 0))

    def factor(self, weight: Tensor) -> BlockRowsFactor:
        return BlockRowsFactor(self, weight)

    def dense(self) -> Tensor:
        eye = torch.eye(self.row_count, dtype=self.values.dtype, device=self.values.device)
        found = eye.unsqueeze(-1) * self.values.unsqueeze(-3)  # (*batch, row, block, width)
        for part in self.mixed:
            columns = part.mixing.unsqueeze(-1) * part.values.unsqueeze(-3)
            after = self.width - part.start - columns.shape[-1]
            found = found + pad(columns, (part.start, after))
        return pad(found.flatten(-2), (self.before, 0))

    def magnitude(self, x: Tensor) -> Tensor:
        sizes = tuple(Mixed(part.start, part.values.abs(), part.mixing.abs()) for part in self.mixed)
        return BlockRows(self.values.abs(), sizes, self.before).apply(x.abs())

    def at(self, like: Tensor) -> BlockRows:
        if self.values.dtype == like.dtype and self.values.device == like.device:
            return self
        parts = tuple(Mixed(p.start, p.values.to(like), p.mixing.to(like)) for p in self.mixed)
        return BlockRows(self.values.to(like), parts, self.before)

    def _blocks(self, x: Tensor) -> Tensor:
        return x[..., self.before :].unflatten(-1, (self.row_count, self.width))

    def schur(self, weight: Tensor) -> Tensor:
        """``J W J^T``, (*batch, q, q)."""
        blocks = self._blocks(weight)
        pushed = self.values * blocks
        found = torch.diag_embed((pushed * self.values).sum(-1))
        for part in self.mixed:
            columns = slice(part.start, part.start + part.values.shape[-1])
            cross = part.mixing * (pushed[..., columns] * part.values).sum(-1).unsqueeze(-2)
            own = (blocks[..., columns] * part.values.square()).sum(-1).unsqueeze(-2)
            found = found + cross + cross.mT + (part.mixing * own) @ part.mixing.mT
        return found

    def quadratic(self, x: Tensor) -> Tensor:
        """``diag(J^T X J)``, (*batch, n), for symmetric X (*batch, q, q)."""
        found = self.values.square() * x.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        for part in self.mixed:
            own, width = self.values.narrow(-1, part.start, part.values.shape[-1]), part.values.shape[-1]
            pushed = x @ part.mixing
            cross = pushed.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            square = (part.mixing * pushed).sum(-2).unsqueeze(-1)
            extra = part.values * (2 * own * cross + part.values * square)
            found = found + pad(extra, (part.start, self.width - part.start - width))
        return pad(found.flatten(-2), (self.before, 0))


class BlockRowsFactor(Factor):
    """``L L^T = J W J^T``."""

    structure: BlockRows

    def __init__(self, structure: BlockRows, weight: Tensor) -> None:
        self.structure, self.weight = structure, weight
        self.lower, self.info = torch.linalg.cholesky_ex(structure.schur(weight))

    def solve(self, r: Tensor) -> Tensor:
        return cholesky_solve(self.lower, r)

    def variance(self, s: Tensor | None = None) -> Tensor:
        inverse = torch.cholesky_inverse(self.lower)
        share = self.weight * self.structure.quadratic(inverse)
        if s is None:
            return (self.weight * (1 - share)).clamp(min=0)
        middle = inverse @ self.structure.schur(s) @ inverse
        return (s * (1 - 2 * share) + self.weight.square() * self.structure.quadratic(middle)).clamp(min=0)

    def pivots(self) -> Tensor:
        regular = (self.info == 0).unsqueeze(-1)
        return torch.where(regular, self.lower.diagonal(dim1=-2, dim2=-1), 0.0)
