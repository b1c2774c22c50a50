"""Projection of a tree in pieces: messages from the subtrees to the top, and back.

The constraint is sums over a tree, the weight is ``W = diag(w)``, and the series are independent with variances s. The
tree is cut at some nodes r. The upward message of a subtree with projector P_r about its root (a Schur complement) is

    m = (P_r z)_r,      v = (P_r W P_r^T)_rr,      y = (P_r S P_r^T)_rr.

The top, with m, v, y as the values of its leaves, gives the roots' values x and their v* and y* in the same way. Given
x, subtrees are independent: a subtree's points are projected with its root held at x. For the variances, the rest of
the tree acts as one more forecast of the root, of variance E and independent of the subtree. Merged with the root's own
it gives

    1/w' = 1/w + 1/E,    1/E = 1/v* - 1/v,    s' = w'^2 (s / w^2 + (y* - a^2 y) / v*^2),    a = v* / v,

with which the subtree is projected alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch

from probhard.constraints import Hierarchy
from probhard.forecasting.reconciliation.reconcile import CHUNK
from probhard.metric import DiagonalMetric
from probhard.projection.layer import DPPL
from probhard.rows.children import child_sets


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of a tree: some roots with all nodes below them, or the top with these roots as leaves.

    Args:
        nodes: Numbers of the k nodes in the whole tree, aggregates first, (k,).
        summation: Summation matrix of the piece, (k, bottoms).
        roots: Positions of the roots in ``nodes``, (r,).
        above: Positions of the roots in the nodes of the top, (r,).
    """

    nodes: np.ndarray
    summation: sp.csr_array
    roots: np.ndarray
    above: np.ndarray


@dataclass(frozen=True, eq=False)
class NodeValues:
    """Points, weights and variances of k nodes.

    Args:
        points: The mean and the draws, (S, H, k) each.
        weight: Diagonal w of the metric's weight, (k,) or (H, k).
        variance: Variances s of the forecasts, (H, k), if known.
    """

    points: tuple[np.ndarray, ...]
    weight: np.ndarray
    variance: np.ndarray | None

    def at(self, nodes: np.ndarray) -> NodeValues:
        """Return a copy of the values of ``nodes``, given by position, (j,)."""
        variance = None if self.variance is None else self.variance[..., nodes]
        return NodeValues(tuple(z[..., nodes] for z in self.points), self.weight[..., nodes], variance)

    def put(self, nodes: np.ndarray, values: NodeValues) -> None:
        """Overwrite the values of ``nodes``, given by position, (j,)."""
        for target, source in zip(self.points, values.points):
            target[..., nodes] = source
        self.weight[..., nodes] = values.weight
        if self.variance is not None:
            self.variance[..., nodes] = values.variance

    def projected(self, piece: Piece, held: np.ndarray | tuple[()] = ()) -> NodeValues:
        """Project onto the sums of a piece.

        Args:
            piece: The piece with these k nodes.
            held: Positions of nodes that keep their points, (j,); the variances treat them as free.

        Returns:
            Projected points and the variances of both laws, N(0, W) and N(0, diag(s)).
        """
        layer, free = (
            DPPL(DiagonalMetric(torch.from_numpy(self.weight)), on_failure="raise"),
            Hierarchy(piece.summation),
        )
        constraint = Hierarchy(piece.summation, immutable=[int(node) for node in held]) if len(held) else free
        projections = []
        for points in self.points:
            chunks = np.array_split(points, min(len(points), -(-points.size // CHUNK)))
            values = [layer.project(torch.from_numpy(chunk), constraint).value.numpy() for chunk in chunks]
            projections.append(np.concatenate(values))

        def variance(own: np.ndarray) -> np.ndarray:
            scale = torch.from_numpy(np.sqrt(own))
            return layer((torch.zeros_like(scale), scale), free).variance.numpy()

        own = None if self.variance is None else variance(self.variance)
        return NodeValues(tuple(projections), variance(self.weight), own)


def upward(work: tuple[Piece, NodeValues]) -> NodeValues:
    """Return the messages m, v, y of subtrees about their r roots."""
    piece, values = work
    return values.projected(piece).at(piece.roots)


def downward(work: tuple[Piece, NodeValues]) -> NodeValues:
    """Project subtrees whose roots are known; return the values of all k nodes."""
    piece, values = work
    return values.projected(piece, piece.roots)


def merged(own: NodeValues, message: NodeValues, known: NodeValues) -> NodeValues:
    """Merge the roots' own values with the rest of the tree.

    Args:
        own: Values z, w, s of r roots.
        message: Upward messages m, v, y of their subtrees.
        known: Values x, v*, y* after the projection of the top.

    Returns:
        Values x, w', s'.
    """
    outside = (1 / known.weight - 1 / message.weight).clip(min=0.0)
    weight = 1 / (1 / own.weight + outside)
    if own.variance is None or message.variance is None or known.variance is None:
        return NodeValues(known.points, weight, None)
    rest = known.variance - np.square(known.weight / message.weight) * message.variance
    rest = rest.clip(min=0.0) / np.square(known.weight)
    return NodeValues(known.points, weight, np.square(weight) * (own.variance / np.square(own.weight) + rest))


def cut(hierarchy: Hierarchy, parent: np.ndarray, pieces: int) -> tuple[Piece, list[Piece]]:
    """Cut a tree into its top and pieces of similar size.

    Args:
        hierarchy: Plain sums of a tree or forest with n nodes.
        parent: Parent of every node, -1 for a root, (n,).
        pieces: Approximate number of pieces.

    Returns:
        The top, and the pieces below it.
    """
    summation, aggregates = hierarchy.summation, hierarchy.aggregates
    depth, ancestor = np.zeros_like(parent), parent
    while (ancestor >= 0).any():
        depth += ancestor >= 0
        ancestor = np.where(ancestor >= 0, parent[ancestor], -1)
    levels = [np.flatnonzero(depth == d) for d in range(1, depth.max() + 1)]
    size = np.ones_like(parent)  # nodes at and below each node
    for level in reversed(levels):
        np.add.at(size, parent[level], size[level])
    large = size > min(max(1, len(parent) // pieces), size.max() - 1)
    below_large = (parent < 0) | large[parent]
    roots = np.flatnonzero(~large & below_large & (np.arange(len(parent)) < aggregates))
    last = np.cumsum(size[roots])
    number = np.full_like(parent, -1)  # piece of each node
    number[roots] = (last - size[roots]) * pieces // max(1, last.max(initial=0))
    for level in levels:
        number[level] = np.where(number[level] < 0, number[parent[level]], number[level])
    leaves = np.flatnonzero((number < 0) & ~large)
    leaves = np.sort(np.concatenate([leaves, roots]))
    nodes = np.concatenate([np.flatnonzero(large), leaves])
    first = summation.indices[summation.indptr[leaves]]  # one bottom node stands for each leaf
    none = np.empty(0, dtype=np.int64)
    top = Piece(nodes, sp.csr_array(summation[nodes][:, first]), none, none)
    position = np.empty_like(parent)
    position[nodes] = np.arange(len(nodes))
    subtrees = []
    order = np.argsort(number, kind="stable")
    for nodes in np.split(order, np.flatnonzero(np.diff(number[order])) + 1):
        if number[nodes[0]] >= 0:
            bottoms = nodes[nodes >= aggregates] - aggregates
            own_roots = np.flatnonzero(np.isin(nodes, roots))
            matrix = sp.csr_array(summation[nodes][:, bottoms])
            subtrees.append(Piece(nodes, matrix, own_roots, position[nodes[own_roots]]))
    return top, subtrees


def parents(hierarchy: Hierarchy) -> np.ndarray | None:
    """Return the parent of every node, -1 for a root, (n,); None unless the hierarchy is plain sums of a tree."""
    if hierarchy.system.held is not None or (hierarchy.summation.data != 1).any():
        return None
    row, child = child_sets(sp.csr_array(hierarchy.summation[: hierarchy.aggregates])).nonzero()
    if len(np.unique(child)) < len(child):
        return None
    parent = np.full(hierarchy.variables, -1, dtype=np.int64)
    parent[child] = row
    return parent
