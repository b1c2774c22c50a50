"""The levels of a forest of rows, built from a sparse matrix.

Two rows are neighbours if they share a variable. The rows form a forest if every variable lies in at most two rows and
the graph of neighbours has no cycle. Each tree is rooted at its centre, which keeps the number of levels small.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.tensors import OnDevice

DEEPEST = 64  # with more levels than this, the sweeps are too sequential to pay


@dataclass(eq=False)
class Level(OnDevice):
    """The rows at one depth.

    A row's inside variables are all but the one that it shares with its parent. They are listed as [shared with deeper
    rows, private].
    """

    row: Tensor  # (k,) row numbers
    up: Tensor  # (k,) the variable shared with the parent row; -1 at the roots
    up_coefficient: Tensor  # (k,) its coefficient; 1 at the roots
    private: Tensor  # (p,) variables that lie in one of these rows alone
    segment: Tensor  # (deeper + p,) index, from 0 to k - 1, of the row of each inside variable
    coefficient: Tensor  # (deeper + p,) of the inside variables
    deeper: int  # number of rows one level down, and so of shared inside variables


def levels_of(matrix: sp.csr_array) -> tuple[Level, ...] | None:
    """The levels of a forest of rows, roots first.

    Args:
        matrix: The rows A, (q, n).

    Returns:
        One ``Level`` per depth, or None if the rows form no forest or one deeper than ``DEEPEST``.
    """
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
    return _levels(matrix, depth, parent)


def inside_variables(levels: tuple[Level, ...]) -> list[Tensor]:
    """The inside variables (deeper + p,) of each level: those that deeper rows send up, then the private ones."""
    none = torch.empty(0, dtype=torch.int64)
    shared = [*(level.up for level in levels[1:]), none]
    return [torch.cat([up, level.private]) for up, level in zip(shared, levels)]


def _parents(graph: sp.csr_array) -> tuple[np.ndarray, np.ndarray] | None:
    """Depth and parent (-1 at a root) of every row, rooted at the centres; None for a cycle or a deep forest."""
    rows = graph.shape[0]
    number = np.arange(rows)
    degree = np.diff(graph.indptr).astype(np.int64)
    neighbours = graph.astype(np.int64) @ number  # at a row of degree 1, this sum is its only neighbour
    parent = np.full(rows, -1, dtype=np.int64)
    peeled: list[np.ndarray] = []
    remaining = np.ones(rows, dtype=bool)
    while remaining.any():
        leaves = np.flatnonzero(remaining & (degree <= 1))
        if len(leaves) == 0 or len(peeled) == DEEPEST:
            return None
        hanging = leaves[degree[leaves] == 1]
        above = neighbours[hanging]
        last_pair = (degree[above] == 1) & (hanging < above)  # only these two rows remain: the first becomes the root
        hanging, above = hanging[~last_pair], above[~last_pair]
        parent[hanging] = above
        remaining[leaves] = False
        np.subtract.at(degree, above, 1)
        np.subtract.at(neighbours, above, hanging)
        peeled.append(leaves)
    depth = np.zeros(rows, dtype=np.int64)
    for leaves in reversed(peeled):
        below = leaves[parent[leaves] >= 0]
        depth[below] = depth[parent[below]] + 1
    return depth, parent


def _levels(matrix: sp.csr_array, depth: np.ndarray, parent: np.ndarray) -> tuple[Level, ...]:
    """Sort the rows by depth, and their variables into shared and private ones."""
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
