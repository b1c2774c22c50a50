"""Crossed hierarchies, such as stores by products: ``S = S1 (Kronecker) S2`` up to the order of the nodes.

If the weights have the same form, ``W = W1 (Kronecker) W2``, the projections along the two axes commute:

    P = (P1 (Kronecker) I) (I (Kronecker) P2).

The squared entries of P factor in the same way. So points and variances are swept along one axis, then along the other.
The rows of an axis are one small tree for each node of the other axis, so this takes O(n); a Cholesky factor of
``A W A^T`` would fill in. Equal weights have this form, and so do numbers of bottom series. Other weights, and
right-hand sides other than 0, use the Cholesky factor.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util import jit
from probhard._util.tensors import OnDevice, broadcast, checking, plain, safe_sqrt
from probhard.rows._kernels import tree as tree_kernels
from probhard.rows.base import Factor, Structure
from probhard.rows.children import child_rows, summation_block
from probhard.rows.tree import Tree, TreeFactor

AGREE = 1e-9  # largest difference from the general projection, relative to a random point


class Crossing(OnDevice):
    """The rows along each axis; build it with ``find``.

    Args:
        axes: One forest per axis.
    """

    def __init__(self, axes: tuple[Tree, ...]) -> None:
        self.axes = axes

    @classmethod
    def find(cls, matrix: sp.csr_array) -> Crossing | None:
        """The crossing of trees behind rows ``[I | -S]``.

        Args:
            matrix: Rows, (q, n), aggregates first.

        Returns:
            The crossing, or None if the rows form none.
        """
        rows = _rows_by_axis(matrix)
        trees = [] if rows is None else [Tree.find(axis) for axis in rows]
        return cls(tuple(tree for tree in trees if tree is not None)) if trees and None not in trees else None

    def factor(self, structure: Structure, weight: Tensor) -> CrossedFactor | None:
        """The factor by sweeps along the axes.

        Args:
            structure: The same rows with a factor for any weight.
            weight: W, (n,).

        Returns:
            The factor, or None unless W is a fixed, positive Kronecker product along the axes.
        """
        if weight.dim() != 1 or weight.requires_grad or not checking() or not bool((weight > 0).all()):
            return None
        candidate = CrossedFactor(structure, weight, tuple(axis.factor(weight) for axis in self.at(weight).axes))
        point = torch.randn(len(weight), generator=torch.Generator().manual_seed(0), dtype=weight.dtype)
        point, zero = weight.sqrt() * point.to(weight), weight.new_zeros(structure.row_count)
        error = (candidate.project(point, zero) - candidate.general.project(point, zero)) / weight.sqrt()
        return candidate if float(error.abs().max()) <= AGREE else None


class CrossedFactor(Factor):
    """``A W A^T`` for rows and weights that cross: sweeps along one axis after the other."""

    def __init__(self, structure: Structure, weight: Tensor, axes: tuple[TreeFactor, ...]) -> None:
        self.structure, self.weight, self.axes = structure, weight, axes
        self.general = structure.factor(weight)

    conditioned = False

    @property
    def _compiled(self) -> bool:
        return jit.AVAILABLE and all(axis.gains is not None for axis in self.axes)

    def solve(self, r: Tensor) -> Tensor:
        return self.general.solve(r)

    def project(self, z: Tensor, b: Tensor) -> Tensor:
        if not checking() or b.requires_grad or bool((b != 0).any()):
            return self.general.project(z, b)
        z = z.expand(*broadcast(z.shape[:-1], b.shape[:-1]), -1)
        if z.numel() and plain(z) and self._compiled:
            return cast(Tensor, tree_kernels.Chain.apply(z, self.axes))
        for axis in self.axes:
            z = axis.project(z, z.new_zeros(axis.tree.row_count))
        return z

    def scale(self, s: Tensor | None = None) -> Tensor:
        s = self.weight if s is None else s
        if s.numel() and plain(s) and self._compiled:
            return cast(Tensor, tree_kernels.Scale.apply(s, self.axes))
        return safe_sqrt(self.variance(s))

    def quick_scale(self, s: Tensor) -> Tensor | None:
        return self.scale(s).to(s.dtype)

    def variance(self, s: Tensor | None = None) -> Tensor:
        s = self.weight if s is None else s
        for axis in self.axes:
            s = axis.variance(s)
        return s

    def pivots(self) -> Tensor:
        return self.weight


def _rows_by_axis(matrix: sp.csr_array) -> list[sp.csr_array] | None:
    """Rows along each axis, over all n variables; a tree is a single axis."""
    upper, children = summation_block(matrix), child_rows(matrix)
    if upper is None or children is None:
        return None
    if Tree.find(children[0]) is not None:
        return [children[0]]
    axes = split(sp.csr_array(sp.vstack([upper, sp.eye_array(upper.shape[1], format="csr")])))
    if axes is None:
        return None
    small, large = (_rows_by_axis(_rows(summation)) for summation in (axes.small, axes.large))
    if small is None or large is None:
        return None
    lines = [sp.kron(axis, sp.eye_array(axes.large.shape[0]), format="csr") for axis in small]
    lines += [sp.kron(sp.eye_array(axes.small.shape[0]), axis, format="csr") for axis in large]
    return [sp.csr_array(rows)[:, np.argsort(axes.order)] for rows in lines]


class Axes(NamedTuple):
    """The summation matrices of two hierarchies, aggregates first, and the order of the nodes on their grid."""

    small: sp.csr_array
    large: sp.csr_array
    order: np.ndarray  # (small nodes * large nodes,)


def _rows(summation: sp.csr_array) -> sp.csr_array:
    """``[I | -S]`` of a summation matrix whose last rows are the identity."""
    nodes, bottoms = summation.shape
    identity = sp.eye_array(nodes - bottoms, format="csr")
    return sp.csr_array(sp.hstack([identity, -summation[: nodes - bottoms]]))


def split(summation: sp.csr_array) -> Axes | None:
    """Split a complete crossing into two hierarchies.

    A bottom's row and column in the grid of bottoms are nodes themselves ("all products of this store"). All candidate
    pairs of nodes through the first bottom are tried. A result is compared with S entry by entry.

    Args:
        summation: S, (n, m), entries 0 or 1.

    Returns:
        The two axes, or None if S is no complete crossing.
    """
    size = np.diff(summation.indptr)
    bottoms = summation.shape[1]
    through = sp.csc_array(summation)[:, [0]].indices
    for across in through:
        for along in through:
            if size[across] <= size[along] and size[across] * size[along] == bottoms and size[across] > 1:
                axes = _split(summation, size, across, along)
                if axes is not None:
                    return axes
    return None


def _split(summation: sp.csr_array, size: np.ndarray, across: int, along: int) -> Axes | None:
    """The crossing whose grid of bottoms has ``across`` as first column and ``along`` as first row, or None."""
    row, column = _lines(summation, size, across, size[along]), _lines(summation, size, along, size[across])
    if row is None or column is None:
        return None
    small, large = _Axis(summation, row, size[across]), _Axis(summation, column, size[along])
    total = np.flatnonzero(size == len(row))
    if len(total) != 1 or small.kinds * large.kinds > len(size) or not np.array_equal(small.size * large.size, size):
        return None  # some node is not a rectangle of the grid
    small.arrange(large.kind == large.kind[total])
    large.arrange(small.kind == small.kind[total])
    pair = small.kind * large.kinds + large.kind
    copies = large.copies[large.kind]
    if not np.array_equal(np.bincount(pair)[pair], small.copies[small.kind] * copies):
        return None
    sequence = np.argsort(pair, kind="stable")
    position = np.empty_like(sequence)  # among the nodes with the same bottoms
    position[sequence] = np.arange(len(pair)) - np.searchsorted(pair[sequence], pair[sequence])
    place = small.node(position // copies) * large.matrix.shape[0] + large.node(position % copies)
    grid = sp.csr_array(sp.kron(small.matrix, large.matrix, format="csr"))
    if not np.array_equal(np.sort(place), np.arange(grid.shape[0])):
        return None
    if (grid[place][:, row * size[along] + column] != summation).nnz:
        return None
    return Axes(small.matrix, large.matrix, np.argsort(place))


def _lines(summation: sp.csr_array, size: np.ndarray, base: int, length: int) -> np.ndarray | None:
    """For every bottom, the bottom of ``base`` on its line; None if some bottom is on no line.

    A line is a node of this length that meets ``base`` once.
    """
    bottoms = summation.shape[1]
    on = summation.indices[summation.indptr[base] : summation.indptr[base + 1]]
    inside, position = np.zeros(bottoms), np.zeros(bottoms)
    inside[on], position[on] = 1.0, np.arange(len(on))
    nodes = np.flatnonzero((size == length) & (summation @ inside == 1))
    line = np.full(bottoms, -1, dtype=np.int64)
    line[summation[nodes].indices] = np.repeat((summation @ position)[nodes].astype(np.int64), length)
    return line if (line >= 0).all() else None


class _Axis:
    """One axis of a crossing: its kinds of nodes, told apart by their coordinates, and the number of each kind."""

    def __init__(self, summation: sp.csr_array, line: np.ndarray, count: int) -> None:
        members = sp.csr_array((np.ones(len(line)), (np.arange(len(line)), line)), shape=(len(line), count))
        shadow = sp.csr_array(summation @ members)  # the coordinates that each node holds
        shadow.data[:] = 1.0
        self.size = np.diff(shadow.indptr)
        # sums of random names tell sets apart; ``_split`` compares the result with S, so a collision does no harm
        names = np.random.default_rng(0).integers(1, 2**40, count)
        sums = sp.csr_array(shadow, dtype=np.int64) @ names
        _, first, self.kind = np.unique(sums, return_index=True, return_inverse=True)
        self.patterns, self.kinds = shadow[first], len(first)

    def arrange(self, alone: np.ndarray) -> None:
        """Count the nodes of each kind and number them, aggregates first.

        Args:
            alone: Mask of the nodes that hold all of the other axis.
        """
        self.copies = np.bincount(self.kind[alone], minlength=self.kinds)
        kind = np.repeat(np.arange(self.kinds), self.copies)
        last = np.append(kind[1:] != kind[:-1], True)
        bottom = last & (np.diff(self.patterns.indptr)[kind] == 1)  # the last of equal nodes
        order = np.lexsort((self.patterns.indices[self.patterns.indptr[kind]], bottom))
        self.matrix = self.patterns[kind[order]]
        self._number = np.argsort(order)
        self._start = np.concatenate([[0], np.cumsum(self.copies)[:-1]])

    def node(self, position: np.ndarray) -> np.ndarray:
        """The number on this axis of every node, from its position among equal nodes."""
        return self._number[self._start[self.kind] + position]
