"""Hierarchies written locally: a node equals the sum of its direct children, not of all its bottoms.

The rows ``[I | -S]`` say that every aggregate is the sum of its bottom series; with one child set per aggregate they
become ``u_i - sum_{c in children(i)} u_c = b_i - sum b_c``, q sparse rows with the same solutions. Trees stay trees;
crossed hierarchies get small blocks. A child set is a partition of the aggregate's bottoms by nodes below it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from probhard._util.jit import compiled

Index = NDArray[np.integer[Any]]
Mask = NDArray[np.bool_]

COMPILED = 100_000  # entries of S from which its loops are compiled


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
    order = np.lexsort((below, -size[below], above))
    above, below = above[order], below[order]
    start = np.searchsorted(above, np.arange(aggregates + 1))
    chosen, single = np.zeros(len(below), dtype=np.bool_), np.zeros(summation.nnz, dtype=np.bool_)
    # to load the first compiled function takes longer than the plain one needs for a small hierarchy
    partition = _partition if summation.nnz > COMPILED else getattr(_partition, "py_func", _partition)
    partition(summation.indptr, summation.indices, start, below, chosen, single)
    row = np.concatenate([above[chosen], np.repeat(np.arange(aggregates), size)[single]])
    node = np.concatenate([below[chosen], summation.indices[single] + aggregates])
    return sp.csr_array((np.ones(len(row)), (row, node)), shape=(aggregates, aggregates + bottoms))


@compiled
def _partition(pointer: Index, bottom: Index, start: Index, below: Index, chosen: Mask, single: Mask) -> None:
    """Mark the children of every aggregate among the nodes below it, largest first, and the bottoms that they leave."""
    owner = np.full(bottom.max() + 1, -1)  # the last aggregate that a child covers each bottom for
    for i in range(len(pointer) - 1):
        left = pointer[i + 1] - pointer[i]
        for k in range(start[i], start[i + 1]):
            first, last = pointer[below[k]], pointer[below[k] + 1]
            fits = last - first <= left
            t = first
            while fits and t < last:
                fits = owner[bottom[t]] != i
                t += 1
            if fits:
                chosen[k] = True
                left -= last - first
                for t in range(first, last):
                    owner[bottom[t]] = i
            if left == 0:
                break
        for t in range(pointer[i], pointer[i + 1]):
            single[t] = owner[bottom[t]] != i


def _strictly_below(summation: sp.csr_array, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (i, j) of aggregates with j's bottoms among i's; equal sets count from the earlier to the later."""
    overlap = sp.coo_array(summation @ summation.T)
    i, j, shared = overlap.coords[0], overlap.coords[1], overlap.data
    inside = (shared == size[j]) & ((size[j] < size[i]) | ((size[j] == size[i]) & (j > i)))
    return i[inside], j[inside]


def child_rows(matrix: sp.csr_array) -> tuple[sp.csr_array, sp.csr_array] | None:
    """Child rows and the map T of right-hand sides (``b' = T b``) for ``[I | -S]``; None for other matrices."""
    summation = summation_block(matrix)
    if summation is None:
        return None
    aggregates = summation.shape[0]
    children = child_sets(summation)
    identity = sp.eye_array(aggregates, matrix.shape[1], format="csr")
    transform = sp.eye_array(aggregates, format="csr") - children[:, :aggregates]
    return sp.csr_array(identity - children), sp.csr_array(transform)
