"""Hierarchies as local sums: each aggregate equals the sum of its direct children.

The rows ``[I | -S]`` make every aggregate the sum of its bottom series. With one child set per aggregate they become
``u_i - sum_{c in children(i)} u_c = b_i - sum b_c``: q sparse rows with the same solutions. Trees stay trees; crossed
hierarchies get small blocks. A child set partitions the aggregate's bottoms into nodes below it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from probhard._util.jit import compiled

Index = NDArray[np.integer[Any]]
Mask = NDArray[np.bool_]

COMPILED = 100_000  # with at least this many entries of S, the loops are compiled


def summation_block(matrix: sp.csr_array) -> sp.csr_array | None:
    """The S of rows ``[I | -S]``.

    Args:
        matrix: Rows, (q, n), aggregates first.

    Returns:
        S with entries 0 or 1, (q, n - q), or None for any other matrix.
    """
    rows, variables = matrix.shape
    if variables <= rows:
        return None
    left = matrix[:, :rows]
    if left.nnz != rows or not (left.diagonal() == 1).all():
        return None
    right = sp.csr_array(-matrix[:, rows:])
    return right if right.nnz and (right.data == 1).all() else None


def child_sets(summation: sp.csr_array) -> sp.csr_array:
    """Children of each aggregate.

    Args:
        summation: S without its identity block, (q, bottoms), entries 0 or 1.

    Returns:
        A 0/1 matrix (q, n) over all nodes, aggregates first: for each aggregate, the largest nodes below it that
        partition its bottoms.
    """
    aggregates, bottoms = summation.shape
    size = np.diff(summation.indptr)
    above, below = strictly_below(summation, size)
    order = np.lexsort((below, -size[below], above))
    above, below = above[order], below[order]
    start = np.searchsorted(above, np.arange(aggregates + 1))
    chosen, single = np.zeros(len(below), dtype=np.bool_), np.zeros(summation.nnz, dtype=np.bool_)
    # for a small hierarchy, loading the first compiled function takes longer than plain Python
    partition = _partition if summation.nnz > COMPILED else getattr(_partition, "py_func", _partition)
    partition(summation.indptr, summation.indices, start, below, chosen, single)
    row = np.concatenate([above[chosen], np.repeat(np.arange(aggregates), size)[single]])
    node = np.concatenate([below[chosen], summation.indices[single] + aggregates])
    return sp.csr_array((np.ones(len(row)), (row, node)), shape=(aggregates, aggregates + bottoms))


@compiled
def _partition(pointer: Index, bottom: Index, start: Index, below: Index, chosen: Mask, single: Mask) -> None:
    """Mark the children of each aggregate, largest first, and the bottoms that no child covers."""
    owner = np.full(bottom.max() + 1, -1)  # of each bottom: the last aggregate with a child that covers it
    for i in range(len(pointer) - 1):
        uncovered = pointer[i + 1] - pointer[i]
        for k in range(start[i], start[i + 1]):
            first, last = pointer[below[k]], pointer[below[k] + 1]
            fits = last - first <= uncovered
            t = first
            while fits and t < last:
                fits = owner[bottom[t]] != i
                t += 1
            if fits:
                chosen[k] = True
                uncovered -= last - first
                for t in range(first, last):
                    owner[bottom[t]] = i
            if uncovered == 0:
                break
        for t in range(pointer[i], pointer[i + 1]):
            single[t] = owner[bottom[t]] != i


def strictly_below(summation: sp.csr_array, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (i, j) of aggregates such that i holds all bottoms of j; of equal sets, the earlier one is i."""
    overlap = sp.coo_array(summation @ summation.T)
    i, j, shared = overlap.coords[0], overlap.coords[1], overlap.data
    inside = (shared == size[j]) & ((size[j] < size[i]) | ((size[j] == size[i]) & (j > i)))
    return i[inside], j[inside]


def child_rows(matrix: sp.csr_array) -> tuple[sp.csr_array, sp.csr_array] | None:
    """Rewrite rows ``[I | -S]`` as sums over children.

    Args:
        matrix: Rows, (q, n), aggregates first.

    Returns:
        The new rows (q, n) and the map T (q, q) of right-hand sides, ``b' = T b``; None for other matrices.
    """
    summation = summation_block(matrix)
    if summation is None:
        return None
    aggregates = summation.shape[0]
    children = child_sets(summation)
    identity = sp.eye_array(aggregates, matrix.shape[1], format="csr")
    transform = sp.eye_array(aggregates, format="csr") - children[:, :aggregates]
    return sp.csr_array(identity - children), sp.csr_array(transform)
