"""Hierarchies written locally: a node equals the sum of its direct children, not of all its bottoms.

The rows ``[I | -S]`` say that every aggregate is the sum of its bottom series; with one child set per aggregate they
become ``u_i - sum_{c in children(i)} u_c = b_i - sum b_c``, q sparse rows with the same solutions. Trees stay trees;
crossed hierarchies get small blocks. A child set is a partition of the aggregate's bottoms by nodes below it.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp


def summation_block(matrix: sp.csr_array) -> sp.csr_array | None:
    """The S of rows ``[I | -S]`` with 0/1 entries (aggregates first), or None for any other matrix."""
    rows, variables = matrix.shape
    if variables <= rows:
        return None
    left = matrix[:, :rows]
    if left.nnz != rows or not (left.diagonal() == 1).all():
        return None
    right = sp.csr_array(-matrix[:, rows:])
    return right if right.nnz and (right.data == 1).all() else None


def child_sets(summation: sp.csr_array) -> sp.csr_array:
    """Children of each aggregate: a 0/1 matrix (q, n) over all nodes, aggregates first.

    Args:
        summation: S without its identity block, (q, bottoms), entries 0 or 1.

    Returns:
        One partition of each aggregate's bottoms into the largest nodes below it.
    """
    aggregates, bottoms = summation.shape
    size = np.diff(summation.indptr)
    above, below = _strictly_below(summation, size)
    chosen_row: list[np.ndarray] = []
    chosen_node: list[np.ndarray] = []
    order = np.lexsort((below, -size[below], above))
    above, below = above[order], below[order]
    start = np.searchsorted(above, np.arange(aggregates + 1))
    covered = np.full(bottoms, -1, dtype=np.int64)
    for i in range(aggregates):
        mine = summation.indices[summation.indptr[i] : summation.indptr[i + 1]]
        children = []
        left = size[i]
        for j in below[start[i] : start[i + 1]]:
            if left == 0:
                break
            theirs = summation.indices[summation.indptr[j] : summation.indptr[j + 1]]
            if size[j] <= left and not (covered[theirs] == i).any():
                covered[theirs] = i
                children.append(j)
                left -= size[j]
        single = mine[covered[mine] != i] + aggregates
        nodes = np.concatenate([np.asarray(children, dtype=np.int64), single])
        chosen_row.append(np.full(len(nodes), i))
        chosen_node.append(nodes)
    row, node = np.concatenate(chosen_row), np.concatenate(chosen_node)
    return sp.csr_array((np.ones(len(row)), (row, node)), shape=(aggregates, aggregates + bottoms))


def _strictly_below(summation: sp.csr_array, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (i, j) of aggregates with j's bottoms among i's; equal sets count from the earlier to the later."""
    overlap = sp.coo_array(summation @ summation.T)
    i, j, shared = overlap.coords[0], overlap.coords[1], overlap.data
    inside = (shared == size[j]) & ((size[j] < size[i]) | ((size[j] == size[i]) & (j > i)))
    return i[inside], j[inside]


def local_rows(matrix: sp.csr_array) -> tuple[sp.csr_array, sp.csr_array] | None:
    """Local rows and the map T of right-hand sides (``b' = T b``) for ``[I | -S]``; None for other matrices."""
    summation = summation_block(matrix)
    if summation is None:
        return None
    aggregates = summation.shape[0]
    children = child_sets(summation)
    identity = sp.eye_array(aggregates, matrix.shape[1], format="csr")
    transform = sp.eye_array(aggregates, format="csr") - children[:, :aggregates]
    return sp.csr_array(identity - children), sp.csr_array(transform)
