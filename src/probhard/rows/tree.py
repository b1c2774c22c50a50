"""Rows that form a forest: two sweeps, O(n), no fill and no cancellation.

Every variable lies in at most two rows, and two rows that share a variable are parent and child. Leaves first, a
row sends its shared variable x the message that the row's other variables imply: variance ``V / c_x^2`` with
``V = sum_i a_i^2 v_i``; combined with x's own weight it gives ``v_x = w_x V' / (w_x + V')``. Roots first, the
multipliers follow from the parents'. Coherent hierarchies written locally (a node is the sum of its direct
children) are the main case; the sweeps are Gaussian elimination on ``A W A^T`` in that order.

For ``diag(P S P^T)`` write ``u_i = k_i m_i + o_i``: m_i is what the subtree says of variable i and o_i what the rest
says, independent of it. Both variances are sums of squares and pass down the tree.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util import jit
from probhard._util.tensors import OnDevice, broadcast, divide, plain, safe_sqrt, segment_sum
from probhard.rows._kernels import fixed_sweeps, sweeps
from probhard.rows._kernels import tree as tree_kernels
from probhard.rows.base import Factor, Mapped
from probhard.rows.maps import SparseMap

DEEPEST = 64  # beyond this many levels the sweeps are too sequential to pay


@dataclass(eq=False)
class Level(OnDevice):
    """The rows at one depth. Inside variables come as [shared with deeper rows, private]."""

    row: Tensor  # (k,) row numbers
    up: Tensor  # (k,) the variable shared with the parent row; empty at the roots
    up_coefficient: Tensor  # (k,)
    private: Tensor  # (p,) variables of these rows alone
    segment: Tensor  # (deeper + p,) which of the k rows an inside variable belongs to
    coefficient: Tensor  # (deeper + p,)
    deeper: int  # number of rows one level down = number of shared inside variables


class Tree(Mapped):
    """A forest of rows; build it with ``Tree.find``."""

    def __init__(self, matrix: sp.csr_array, levels: tuple[Level, ...]) -> None:
        super().__init__(SparseMap(matrix))
        self.levels = levels
        inside = torch.cat([torch.cat([_ups(levels, depth), level.private]) for depth, level in enumerate(levels)])
        outside = torch.ones(self.variables, dtype=torch.bool).index_fill(0, inside, False).nonzero().squeeze(-1)
        self.outside = outside  # variables in no row
        self.order = torch.argsort(torch.cat([inside, outside]))
        self.row_order = torch.argsort(torch.cat([level.row for level in levels]))

    @classmethod
    def find(cls, matrix: sp.csr_array) -> Tree | None:
        """The forest of a matrix, or None if its rows do not form one (or one too deep)."""
        count = np.diff(matrix.tocsc().indptr)
        if count.max(initial=0) > 2:
            return None
        pattern = sp.csr_array((np.ones(matrix.nnz), matrix.indices, matrix.indptr), shape=matrix.shape)
        graph = sp.csr_array(pattern @ pattern.T)
        graph.setdiag(0)
        graph.eliminate_zeros()
        if graph.nnz and graph.data.max() > 1:  # two rows share two variables: a cycle
            return None
        parents = _parents(graph)
        if parents is None:
            return None
        depth, parent = parents
        return cls(matrix, _levels(matrix, depth, parent))

    @property
    def algorithm(self) -> str:
        return f"tree of {self.row_count} rows in {len(self.levels)} levels, two sweeps"

    @cached_property
    def kernel_tables(self) -> sweeps.Tables:
        """What the kernels need to know of the rows, leaves first."""
        levels = self.levels[::-1]
        inside = [torch.cat([_ups(self.levels, d), level.private]) for d, level in enumerate(self.levels)][::-1]
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
        """The oblique moments by torch."""
        factor = self.factor(weight)
        return factor.swept(z, b), safe_sqrt(factor.variance())


class Messages(NamedTuple):
    """What the upward sweep leaves, level by level."""

    inside: list[Tensor]  # a_i^2 v_i of the inside variables
    total: list[Tensor]  # V, (*batch, k)
    pivot: list[Tensor]  # the row's pivot: V at a root, c^2 w + V elsewhere


class TreeFactor(Factor):
    """The sweeps for one weight; the upward one of batched weights, which kernels may not need, waits for its use."""

    conditioned = False

    def __init__(self, tree: Tree, weight: Tensor) -> None:
        self.structure = self.tree = tree
        self.weight = weight
        self._messages = self._upward() if weight.dim() == 1 else None
        self.gains: fixed_sweeps.Gains | None = None  # coefficients for the kernels, where the weight is fixed
        if jit.AVAILABLE and weight.dim() == 1 and not weight.requires_grad and plain(weight):
            self.gains = fixed_sweeps.gains(tree.kernel_tables, weight.double().numpy())

    @property
    def messages(self) -> Messages:
        """Message variances and shares."""
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
        """Whether the compiled sweeps serve these points: as many weights as points, on a CPU, in eager mode."""
        if not (jit.AVAILABLE and plain(z)):  # before shapes are compared, which would fix a dynamic size
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
        """Both sweeps on the values themselves, by torch: sums come out coherent whatever the range of the weights."""
        levels = self.tree.levels
        shape = broadcast(z.shape[:-1], b.shape[:-1], self.weight.shape[:-1])
        z, b = z.expand(*shape, -1), b.expand(*shape, -1)
        heard: list[Tensor] = [z] * len(levels)
        gap: list[Tensor] = [b] * len(levels)  # what the messages leave of a row's right-hand side
        message = z[..., :0]
        for d in reversed(range(len(levels))):
            level = levels[d]
            heard[d] = torch.cat([message, z.index_select(-1, level.private)], -1)
            total = segment_sum(level.coefficient * heard[d], level.segment, len(level.row))
            gap[d] = b.index_select(-1, level.row) - total
            if d:
                own = z.index_select(-1, level.up)
                weight = level.up_coefficient * self.weight.index_select(-1, level.up)
                mixed = divide(self.total[d] * own + weight * gap[d], self.pivot[d])
                message = torch.where(self.pivot[d] > 0, mixed, own)
        values: list[Tensor] = []
        for d, level in enumerate(levels):
            left = gap[d] if d == 0 else gap[d] - level.up_coefficient * values[-1][..., : len(level.row)]
            share = divide(self.inside[d], self.total[d].index_select(-1, level.segment)) / level.coefficient
            values.append(heard[d] + share * left.index_select(-1, level.segment))
        values.append(z.index_select(-1, self.tree.outside))
        return torch.cat(values, -1).index_select(-1, self.tree.order)

    def variance(self, s: Tensor | None = None) -> Tensor:
        s = self.weight if s is None else s
        s = s.expand(broadcast(s.shape, self.weight.shape))
        heard = self._heard(s)
        variances: list[Tensor] = []
        keep = rest = s[..., :0]
        for d, level in enumerate(self.tree.levels):
            square = level.coefficient.square()
            spread = segment_sum(square * heard[d], level.segment, len(level.row))
            if d:
                own = level.up_coefficient.square() * self.weight.index_select(-1, level.up)
                known = keep * divide(own, self.pivot[d])
                above = keep * divide(self.total[d], self.pivot[d])
                above = above.square() * s.index_select(-1, level.up) + rest
                above = level.up_coefficient.square() * above
            else:
                known = above = torch.zeros_like(spread)
            at = level.segment
            total = self.total[d].index_select(-1, at)
            left = (total - self.inside[d]).clamp(min=0) + known.index_select(-1, at) * self.inside[d]
            keep = torch.where(total > 0, divide(left, total), 1.0)
            others = (spread.index_select(-1, at) - square * heard[d]).clamp(min=0)
            others = (1 - known).square().index_select(-1, at) * others + above.index_select(-1, at)
            rest = divide(self.inside[d], total).square() / square * others
            variances.append(keep.square() * heard[d] + rest)
            keep, rest = keep[..., : level.deeper], rest[..., : level.deeper]
        variances.append(s.index_select(-1, self.tree.outside))
        return torch.cat(variances, -1).index_select(-1, self.tree.order)

    def _heard(self, s: Tensor) -> list[Tensor]:
        """Variances of the upward messages m_i, per level."""
        levels = self.tree.levels
        heard: list[Tensor] = [s] * len(levels)
        message = s[..., :0]
        for d in reversed(range(len(levels))):
            level = levels[d]
            heard[d] = torch.cat([message, s.index_select(-1, level.private)], -1)
            if d:
                spread = segment_sum(level.coefficient.square() * heard[d], level.segment, len(level.row))
                own = level.up_coefficient * self.weight.index_select(-1, level.up)
                message = divide(self.total[d], self.pivot[d]).square() * s.index_select(-1, level.up)
                message = message + divide(own, self.pivot[d]).square() * spread
        return heard

    def pivots(self) -> Tensor:
        if plain(self.weight) and bool((self.weight > 0).all()):
            return self.weight  # then all pivots are positive
        return torch.cat(self.pivot, -1)


def _ups(levels: tuple[Level, ...], depth: int) -> Tensor:
    """The shared inside variables at a depth: those that the rows one level deeper send up."""
    return levels[depth + 1].up if depth + 1 < len(levels) else torch.empty(0, dtype=torch.int64)


def _parents(graph: sp.csr_array) -> tuple[np.ndarray, np.ndarray] | None:
    """Depth and parent (-1 at a root) of every row, rooted at the centres; None for a cycle or a deep forest."""
    rows = graph.shape[0]
    number = np.arange(rows)
    degree = np.diff(graph.indptr).astype(np.int64)
    neighbours = graph.astype(np.int64) @ number  # for a row of degree 1: the number of its only neighbour
    parent = np.full(rows, -1, dtype=np.int64)
    peeled: list[np.ndarray] = []
    left = np.ones(rows, dtype=bool)
    while left.any():
        leaves = np.flatnonzero(left & (degree <= 1))
        if len(leaves) == 0 or len(peeled) == DEEPEST:
            return None
        hanging = leaves[degree[leaves] == 1]
        to = neighbours[hanging]
        last_pair = (degree[to] == 1) & (hanging < to)  # two rows left: the first is the root
        hanging, to = hanging[~last_pair], to[~last_pair]
        parent[hanging] = to
        left[leaves] = False
        np.subtract.at(degree, to, 1)
        np.subtract.at(neighbours, to, hanging)
        peeled.append(leaves)
    depth = np.zeros(rows, dtype=np.int64)
    for leaves in reversed(peeled):
        below = leaves[parent[leaves] >= 0]
        depth[below] = depth[parent[below]] + 1
    return depth, parent


def _levels(matrix: sp.csr_array, depth: np.ndarray, parent: np.ndarray) -> tuple[Level, ...]:
    """Sort the rows by depth and their variables into shared and private ones."""
    rows, _ = matrix.shape
    entries = matrix.tocoo()
    entry_row, entry_variable, value = entries.coords[0], entries.coords[1], entries.data
    columns = matrix.tocsc()
    first = columns.indices[columns.indptr[:-1].clip(max=matrix.nnz - 1)]
    count = np.diff(columns.indptr)
    second = np.where(count == 2, columns.indices[(columns.indptr[:-1] + 1).clip(max=matrix.nnz - 1)], -1)
    other = np.where(entry_row == first[entry_variable], second[entry_variable], first[entry_variable])
    shared = count[entry_variable] == 2
    upward = shared & (parent[entry_row] == other)
    up, up_coefficient = np.full(rows, -1, dtype=np.int64), np.ones(rows)
    up[entry_row[upward]], up_coefficient[entry_row[upward]] = entry_variable[upward], value[upward]
    value_inside = sp.csr_array((value[~upward], (entry_row[~upward], entry_variable[~upward])), shape=matrix.shape)
    by_depth = [np.flatnonzero(depth == d) for d in range(depth.max(initial=0) + 1)]
    by_depth.append(np.empty(0, dtype=np.int64))
    levels = []
    for here, below in itertools.pairwise(by_depth):
        position = np.full(rows, -1, dtype=np.int64)
        position[here] = np.arange(len(here))
        alone = ~shared & np.isin(entry_row, here)
        owner = np.concatenate([position[parent[below]], position[entry_row[alone]]])
        inside = np.concatenate([up[below], entry_variable[alone]])
        coefficient = value_inside[here[owner], inside] if len(inside) else np.empty(0)
        levels.append(
            Level(
                row=torch.from_numpy(here),
                up=torch.from_numpy(up[here]),
                up_coefficient=torch.from_numpy(up_coefficient[here]),
                private=torch.from_numpy(entry_variable[alone].astype(np.int64)),
                segment=torch.from_numpy(owner.astype(np.int64)),
                coefficient=torch.from_numpy(np.asarray(coefficient, dtype=np.float64).ravel()),
                deeper=len(below),
            )
        )
    return tuple(levels)
