"""One row per block of variables, and rows that mix a few columns of all blocks.

``J = M + sum_k C_k N_k``. Row j of M holds the values of block j, row j of N_k those of a few of its columns, and C_k
mixes the blocks. An example is a conservation law: the mass belongs to one slice, the fluxes are summed over time.
Products cost O(n), and

    J W J^T = diag(a) + sum_k (C_k diag(b_k) + diag(b_k) C_k^T + C_k diag(d_k) C_k^T)

needs only sums over blocks: ``a = M W M^T``, ``b_k = N_k W M^T``, ``d_k = N_k W N_k^T``. Different k use different
columns. ``diag(J^T X J)`` for X (q, q) needs the diagonals of X, of ``X C_k`` and of ``C_k^T X C_k``.
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
    """N_k, the columns ``start, ..., start + c - 1`` of every block, and C_k, which mixes the blocks."""

    start: int
    values: Tensor  # N_k, (*batch, q, c)
    mixing: Tensor  # C_k, (*batch, q, q)


class BlockRows(Structure):
    """Rows over q consecutive blocks of equal width; variables before the first block are in no row.

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
        image = (self.values * blocks).sum(-1)
        for mix in self.mixed:
            own = (mix.values * blocks[..., mix.start : mix.start + mix.values.shape[-1]]).sum(-1)
            image = image + (mix.mixing @ own.unsqueeze(-1)).squeeze(-1)
        return image

    def transpose(self, y: Tensor) -> Tensor:
        entries = self.values * y.unsqueeze(-1)
        for mix in self.mixed:
            pulled = mix.values * (mix.mixing.mT @ y.unsqueeze(-1))
            after = self.width - mix.start - pulled.shape[-1]
            entries = entries + pad(pulled, (mix.start, after))
        return pad(entries.flatten(-2), (self.before, 0))

    def factor(self, weight: Tensor) -> BlockRowsFactor:
        return BlockRowsFactor(self, weight)

    def dense(self) -> Tensor:
        eye = torch.eye(self.row_count, dtype=self.values.dtype, device=self.values.device)
        matrix = eye.unsqueeze(-1) * self.values.unsqueeze(-3)  # (*batch, row, block, width)
        for mix in self.mixed:
            columns = mix.mixing.unsqueeze(-1) * mix.values.unsqueeze(-3)
            after = self.width - mix.start - columns.shape[-1]
            matrix = matrix + pad(columns, (mix.start, after))
        return pad(matrix.flatten(-2), (self.before, 0))

    def magnitude(self, x: Tensor) -> Tensor:
        absolute = tuple(Mixed(mix.start, mix.values.abs(), mix.mixing.abs()) for mix in self.mixed)
        return BlockRows(self.values.abs(), absolute, self.before).apply(x.abs())

    def at(self, like: Tensor) -> BlockRows:
        if self.values.dtype == like.dtype and self.values.device == like.device:
            return self
        mixed = tuple(Mixed(mix.start, mix.values.to(like), mix.mixing.to(like)) for mix in self.mixed)
        return BlockRows(self.values.to(like), mixed, self.before)

    def _blocks(self, x: Tensor) -> Tensor:
        return x[..., self.before :].unflatten(-1, (self.row_count, self.width))

    def schur(self, weight: Tensor) -> Tensor:
        """``J W J^T``, (*batch, q, q), for weights (*batch, n)."""
        blocks = self._blocks(weight)
        pushed = self.values * blocks
        matrix = torch.diag_embed((pushed * self.values).sum(-1))
        for mix in self.mixed:
            columns = slice(mix.start, mix.start + mix.values.shape[-1])
            cross = mix.mixing * (pushed[..., columns] * mix.values).sum(-1).unsqueeze(-2)
            own = (blocks[..., columns] * mix.values.square()).sum(-1).unsqueeze(-2)
            matrix = matrix + cross + cross.mT + (mix.mixing * own) @ mix.mixing.mT
        return matrix

    def quadratic(self, x: Tensor) -> Tensor:
        """``diag(J^T X J)``, (*batch, n), for symmetric X (*batch, q, q)."""
        diagonal = self.values.square() * x.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        for mix in self.mixed:
            own, width = self.values.narrow(-1, mix.start, mix.values.shape[-1]), mix.values.shape[-1]
            pushed = x @ mix.mixing
            cross = pushed.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            square = (mix.mixing * pushed).sum(-2).unsqueeze(-1)
            extra = mix.values * (2 * own * cross + mix.values * square)
            diagonal = diagonal + pad(extra, (mix.start, self.width - mix.start - width))
        return pad(diagonal.flatten(-2), (self.before, 0))


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
