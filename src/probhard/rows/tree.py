"""Rows that form a forest: two sweeps, O(n), no fill and no cancellation.

Every variable lies in at most two rows, and two rows that share a variable are parent and child. The upward sweep runs
leaves first. A row tells its shared variable x what its other variables imply: variance ``V' = V / c_x^2`` with
``V = sum_i a_i^2 v_i``. Combined with the weight of x this gives ``v_x = w_x V' / (w_x + V')``. The downward sweep runs
roots first and computes each multiplier from the parent's. This is Gaussian elimination on ``A W A^T``, leaves first.
The main case is a hierarchy in which each aggregate is the sum of its direct children.

For ``diag(P S P^T)`` write ``u_i = k_i m_i + o_i``. Here m_i depends on the subtree of variable i and o_i on the rest,
so the two are independent. Both variances are sums of squares and pass down the tree.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple, cast

import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util import jit
from probhard._util.tensors import broadcast, divide, plain, safe_sqrt, segment_sum
from probhard.rows._kernels import fixed_sweeps, sweeps
from probhard.rows._kernels import tree as tree_kernels
from probhard.rows.base import Factor, Mapped
from probhard.rows.levels import Level, inside_variables, levels_of
from probhard.rows.maps import SparseMap


class Tree(Mapped):
    """A forest of rows; build it with ``Tree.find``.

    Args:
        matrix: The rows A, (q, n).
        levels: Their levels, roots first.
    """

    def __init__(self, matrix: sp.csr_array, levels: tuple[Level, ...]) -> None:
        super().__init__(SparseMap(matrix))
        self.levels = levels
        inside = torch.cat(inside_variables(levels))
        outside = torch.ones(self.variables, dtype=torch.bool).index_fill(0, inside, False).nonzero().squeeze(-1)
        self.outside = outside  # variables in no row
        self.order = torch.argsort(torch.cat([inside, outside]))
        self.row_order = torch.argsort(torch.cat([level.row for level in levels]))

    @classmethod
    def find(cls, matrix: sp.csr_array) -> Tree | None:
        """The forest of these rows.

        Args:
            matrix: The rows A, (q, n).

        Returns:
            The forest, or None if the rows form none or one that is too deep.
        """
        levels = levels_of(matrix)
        return None if levels is None else cls(matrix, levels)

    @property
    def algorithm(self) -> str:
        return f"tree of {self.row_count} rows in {len(self.levels)} levels, two sweeps"

    @cached_property
    def kernel_tables(self) -> sweeps.Tables:
        """The rows as the kernels read them, leaves first."""
        levels = self.levels[::-1]
        inside = inside_variables(self.levels)[::-1]
        order = [torch.argsort(level.segment, stable=True) for level in levels]
        count = torch.cat([torch.bincount(level.segment, minlength=len(level.row)) for level in levels])
        up = [level.up if depth else torch.full_like(level.row, -1) for depth, level in enumerate(self.levels)][::-1]
        parts = (
            torch.cat([count.new_zeros(1), count.cumsum(0)]),
            torch.cat([level.row for level in levels]),
            torch.cat(up),
            torch.cat([level.up_coefficient.double() for level in levels]),
            torch.cat([variables[at] for variables, at in zip(inside, order)]),
            torch.cat([level.coefficient.double()[at] for level, at in zip(levels, order)]),
        )
        return cast(sweeps.Tables, tuple(part.numpy() for part in parts))

    def factor(self, weight: Tensor) -> TreeFactor:
        return TreeFactor(self, weight)

    def plain_moments(self, z: Tensor, weight: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The oblique moments by torch, for points z and weights (*batch, n) and right-hand sides b (..., q)."""
        factor = self.factor(weight)
        return factor.swept(z, b), safe_sqrt(factor.variance())


class Messages(NamedTuple):
    """Results of the upward sweep, one tensor per level."""

    inside: list[Tensor]  # a_i^2 v_i of the inside variables, (*batch, deeper + p)
    total: list[Tensor]  # V, (*batch, k)
    pivot: list[Tensor]  # (*batch, k): V at a root, c^2 w + V elsewhere


class TreeFactor(Factor):
    """The sweeps for one weight (*batch, n).

    With a batched weight the upward sweep is deferred, because the kernels may not need it.
    """

    conditioned = False

    def __init__(self, tree: Tree, weight: Tensor) -> None:
        self.structure = self.tree = tree
        self.weight = weight
        self._messages = self._upward() if weight.dim() == 1 else None
        self.gains: fixed_sweeps.Gains | None = None  # the kernels' coefficients for a fixed weight
        if jit.AVAILABLE and weight.dim() == 1 and not weight.requires_grad and plain(weight):
            self.gains = fixed_sweeps.gains(tree.kernel_tables, weight.double().numpy())

    @property
    def messages(self) -> Messages:
        """The upward sweep, computed on first use."""
        if self._messages is None:
            self._messages = self._upward()
        return self._messages

    def _upward(self) -> Messages:
        weight, levels = self.weight, self.tree.levels
        messages = Messages(*([weight] * len(levels) for _ in range(3)))
        ups = weight[..., :0]
        for d in reversed(range(len(levels))):
            level = levels[d]
            square = level.coefficient.square() * torch.cat([ups, weight.index_select(-1, level.private)], -1)
            messages.inside[d] = square
            messages.total[d] = messages.pivot[d] = segment_sum(square, level.segment, len(level.row))
            if d:
                own = level.up_coefficient.square() * weight.index_select(-1, level.up)
                messages.pivot[d] = messages.total[d] + own
                ups = divide(weight.index_select(-1, level.up) * messages.total[d], messages.pivot[d])
        return messages

    @property
    def inside(self) -> list[Tensor]:
        """``a_i^2 v_i`` of the inside variables, level by level."""
        return self.messages.inside

    @property
    def total(self) -> list[Tensor]:
        """V of the rows, level by level."""
        return self.messages.total

    @property
    def pivot(self) -> list[Tensor]:
        """Pivots of the rows, level by level."""
        return self.messages.pivot

    def moments(self, z: Tensor, b: Tensor, s: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if s is not None or not self._fused(z, b):
            return super().moments(z, b, s)
        return cast(tuple[Tensor, Tensor], sweeps.Moments.apply(z, self.weight, b, self.tree))

    def _fused(self, z: Tensor, b: Tensor) -> bool:
        """Whether the compiled sweeps apply: one weight per point, on a CPU, in eager mode."""
        if not (jit.AVAILABLE and plain(z)):  # first, since comparing shapes would fix a dynamic size
            return False
        return z.shape == self.weight.shape and b.dtype == z.dtype == self.weight.dtype and z.numel() > 0

    def scale(self, s: Tensor | None = None) -> Tensor:
        s = self.weight if s is None else s
        if s.numel() and plain(s) and self.gains is not None:
            return cast(Tensor, tree_kernels.Scale.apply(s, (self,)))
        return super().scale(s)

    def solve(self, r: Tensor) -> Tensor:
        levels = self.tree.levels
        deficit: list[Tensor] = [r] * len(levels)
        message = r[..., :0]
        for d in reversed(range(len(levels))):
            level = levels[d]
            deficit[d] = -r.index_select(-1, level.row)
            if level.deeper:
                shared, segment = level.coefficient[: level.deeper], level.segment[: level.deeper]
                deficit[d] = deficit[d] - segment_sum(shared * message, segment, len(level.row))
            if d:
                own = level.up_coefficient * self.weight.index_select(-1, level.up)
                message = divide(own * deficit[d], self.pivot[d])
        multiplier = [divide(-deficit[0], self.pivot[0])]
        for d in range(1, len(levels)):
            level, above = levels[d], levels[d - 1]
            from_parent = multiplier[-1].index_select(-1, above.segment[: above.deeper])
            push = level.up_coefficient * self.weight.index_select(-1, level.up)
            push = push * above.coefficient[: above.deeper] * from_parent
            multiplier.append(divide(-(deficit[d] + push), self.pivot[d]))
        return torch.cat(multiplier, -1).index_select(-1, self.tree.row_order)

    def project(self, z: Tensor, b: Tensor) -> Tensor:
        if self.gains is not None and z.numel() and z.dtype == b.dtype and plain(z):
            shape = broadcast(z.shape[:-1], b.shape[:-1], self.weight.shape[:-1])
            return cast(Tensor, tree_kernels.Project.apply(z.expand(*shape, -1), b, self))
        return (
            cast(Tensor, sweeps.Moments.apply(z, self.weight, b, self.tree)[0])
            if self._fused(z, b)
            else self.swept(z, b)
        )

    def swept(self, z: Tensor, b: Tensor) -> Tensor:
        """Project by both sweeps in torch; rows hold to rounding whatever the range of the weights.

        Args:
            z: Points, (*samples, *batch, n).
            b: Right-hand sides, (..., q).

        Returns:
            The nearest points, (*samples, *batch, n).
        """
        levels = self.tree.levels
        shape = broadcast(z.shape[:-1], b.shape[:-1], self.weight.shape[:-1])
        z, b = z.expand(*shape, -1), b.expand(*shape, -1)
        means: list[Tensor] = [z] * len(levels)
        gap: list[Tensor] = [b] * len(levels)  # right-hand side minus the row's inside sum
        message = z[..., :0]
        for d in reversed(range(len(levels))):
            level = levels[d]
            means[d] = torch.cat([message, z.index_select(-1, level.private)], -1)
            total = segment_sum(level.coefficient * means[d], level.segment, len(level.row))
            gap[d] = b.index_select(-1, level.row) - total
            if d:
                own = z.index_select(-1, level.up)
                weight = level.up_coefficient * self.weight.index_select(-1, level.up)
                mixed = divide(self.total[d] * own + weight * gap[d], self.pivot[d])
                message = torch.where(self.pivot[d] > 0, mixed, own)
        values: list[Tensor] = []
        for d, level in enumerate(levels):
            remainder = gap[d] if d == 0 else gap[d] - level.up_coefficient * values[-1][..., : len(level.row)]
            share = divide(self.inside[d], self.total[d].index_select(-1, level.segment)) / level.coefficient
            values.append(means[d] + share * remainder.index_select(-1, level.segment))
        values.append(z.index_select(-1, self.tree.outside))
        return torch.cat(values, -1).index_select(-1, self.tree.order)

    def variance(self, s: Tensor | None = None) -> Tensor:
        s = self.weight if s is None else s
        s = s.expand(broadcast(s.shape, self.weight.shape))
        subtree = self._subtree_variances(s)
        variances: list[Tensor] = []
        keep = outer = s[..., :0]
        for d, level in enumerate(self.tree.levels):
            square = level.coefficient.square()
            spread = segment_sum(square * subtree[d], level.segment, len(level.row))
            if d:
                own = level.up_coefficient.square() * self.weight.index_select(-1, level.up)
                known = keep * divide(own, self.pivot[d])
                above = keep * divide(self.total[d], self.pivot[d])
                above = above.square() * s.index_select(-1, level.up) + outer
                above = level.up_coefficient.square() * above
            else:
                known = above = torch.zeros_like(spread)
            at = level.segment
            total = self.total[d].index_select(-1, at)
            staying = (total - self.inside[d]).clamp(min=0) + known.index_select(-1, at) * self.inside[d]
            keep = torch.where(total > 0, divide(staying, total), 1.0)
            others = (spread.index_select(-1, at) - square * subtree[d]).clamp(min=0)
            others = (1 - known).square().index_select(-1, at) * others + above.index_select(-1, at)
            outer = divide(self.inside[d], total).square() / square * others
            variances.append(keep.square() * subtree[d] + outer)
            keep, outer = keep[..., : level.deeper], outer[..., : level.deeper]
        variances.append(s.index_select(-1, self.tree.outside))
        return torch.cat(variances, -1).index_select(-1, self.tree.order)

    def _subtree_variances(self, s: Tensor) -> list[Tensor]:
        """Variances of m_i, the part that the subtree implies, one tensor per level."""
        levels = self.tree.levels
        variances: list[Tensor] = [s] * len(levels)
        message = s[..., :0]
        for d in reversed(range(len(levels))):
            level = levels[d]
            variances[d] = torch.cat([message, s.index_select(-1, level.private)], -1)
            if d:
                spread = segment_sum(level.coefficient.square() * variances[d], level.segment, len(level.row))
                own = level.up_coefficient * self.weight.index_select(-1, level.up)
                message = divide(self.total[d], self.pivot[d]).square() * s.index_select(-1, level.up)
                message = message + divide(own, self.pivot[d]).square() * spread
        return variances

    def pivots(self) -> Tensor:
        if plain(self.weight) and bool((self.weight > 0).all()):
            return self.weight  # positive weights make all pivots positive
        return torch.cat(self.pivot, -1)
