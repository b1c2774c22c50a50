"""Dependent rows of a sparse matrix, by elimination with partial pivoting.

Rows are scaled to norm 1 and eliminated one at a time, ``A^T = L U`` column by column. For row ``a`` with the earlier
independent rows in L and U,

    x = L^-1 a,     pivot = max |x_i| over variables i without a pivot.

If the pivot is at most ``RANK_TOLERANCE``, the row depends on the earlier ones with coefficients ``c = U^-1 x``.
Rows of one variable come first, so that they are kept; the others follow in a fill-reducing order.

Small pivots are not the only sign of dependence. So the smallest singular value of the independent rows is estimated
by inverse iteration, and if it is within the tolerance, the row with the largest coefficient in its singular vector
is dropped, too. Finally ``A[dependent] = C A[independent]`` is checked. Small and dense matrices use a pivoted QR
factor instead (``presolve.dependent_rows``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg
from numpy.typing import NDArray

from probhard._util.jit import Array, compiled
from probhard.rows.presolve import RANK_TOLERANCE, dependent_rows

Index = NDArray[np.int64]

DENSE_ENTRIES = 250_000  # up to this many entries, zeros included, a pivoted QR factor is quick enough
DENSE_SHARE = 0.2  # ... and it also serves a larger share of non-zero entries
CHECKED = 1e-7  # largest error of the combination of rows of norm 1
GRAPH_LIMIT = 30_000_000  # up to this many entries of A A^T, its graph orders the rows
NEGLIGIBLE = 1e-9  # coefficients up to this size are rounding
COMPILED = 300_000  # with at least this many multiplications, the loops are compiled
HIDDEN = 64  # largest number of dependent rows that no small pivot shows


@dataclass(frozen=True)
class Redundancy:
    """Rows that depend on others: ``A[dependent] = combination @ A[others]``."""

    dependent: np.ndarray  # row numbers, (d,)
    others: np.ndarray  # row numbers, (q - d,)
    combination: sp.csr_array  # (d, q - d)


class Factors(NamedTuple):
    """``A^T = L U`` for the rows of A in some order; L itself is not needed again."""

    start: Index  # (q + 1,) where the entries of each column of U start
    above: Index  # steps of the entries above the diagonal; of dependent rows too
    value: Array  # their values
    pivot: Array  # (q,) pivot of each row, 0 for dependent rows
    step: Index  # (q,) number of each row among the independent ones, -1 for dependent rows


class Loops(NamedTuple):
    """The loops of this file, compiled or not."""

    eliminate: Callable[..., Any]
    solve: Callable[..., Any]
    back_substitute: Callable[..., Any]

    @classmethod
    def of(cls, work: float) -> Loops:
        """Compiled loops if they save more time than loading them takes."""
        loops = (_eliminate, _solve, _back_substitute)
        return cls(*(loops if work > COMPILED else (getattr(loop, "py_func", loop) for loop in loops)))


def find_redundancy(matrix: sp.csr_array) -> Redundancy | None:
    """Find dependent rows.

    Args:
        matrix: A, (q, n).

    Returns:
        The dependent rows; None if there are none.
    """
    rows, variables = matrix.shape
    if rows * variables <= DENSE_ENTRIES or matrix.nnz > DENSE_SHARE * rows * variables:
        return _by_orthogonal_factor(matrix)
    norm = np.sqrt(matrix.multiply(matrix).sum(1))
    norm[norm == 0] = 1.0
    scaled = sp.csr_array(sp.diags_array(1 / norm) @ matrix)
    order, work = _order(scaled)
    loops = Loops.of(work)
    for forced in range(HIDDEN):
        ordered = sp.csr_array(scaled[order])
        factors = Factors(*loops.eliminate(*_arrays(ordered), variables, rows - forced, RANK_TOLERANCE))
        kept, dropped = np.flatnonzero(factors.step >= 0), np.flatnonzero(factors.step < 0)
        vector, independent = _smallest(factors, kept, loops), sp.csr_array(ordered[kept])
        if not len(kept) or np.linalg.norm(independent.T @ vector) > RANK_TOLERANCE:
            break
        worst = kept[np.abs(vector).argmax()]
        order = np.append(np.delete(order, worst), order[worst])
    else:
        return _by_orthogonal_factor(matrix)
    if not len(dropped):
        return None
    start, index, value = loops.back_substitute(*factors[:4], kept, dropped, NEGLIGIBLE)
    shape = (len(dropped), len(kept))
    combination = sp.csr_array((value[: start[-1]], index[: start[-1]], start), shape=shape)
    if abs(ordered[dropped] - combination @ independent).max() > CHECKED:
        return _by_orthogonal_factor(matrix)
    dependent, others = order[dropped], order[kept]
    combination = sp.csr_array(sp.diags_array(norm[dependent]) @ combination @ sp.diags_array(1 / norm[others]))
    by_row, by_column = np.argsort(dependent), np.argsort(others)
    return Redundancy(dependent[by_row], others[by_column], sp.csr_array(combination[by_row][:, by_column]))


def _by_orthogonal_factor(matrix: sp.csr_array) -> Redundancy | None:
    independent, dependent, combination = dependent_rows(matrix.toarray())
    return Redundancy(dependent, independent, sp.csr_array(combination)) if len(dependent) else None


def _order(matrix: sp.csr_array) -> tuple[Index, float]:
    """Rows of one variable, then the others in an order that keeps the fill of ``A A^T`` low.

    Returns:
        The order of the rows, and an estimate of the number of multiplications.
    """
    rows, counts = matrix.shape[0], np.diff(matrix.indptr)
    shared = np.bincount(matrix.indices, minlength=matrix.shape[1]).astype(np.float64)
    order, work = np.argsort(counts, kind="stable"), np.inf
    if (shared**2).sum() <= GRAPH_LIMIT:
        pattern = sp.csr_array((np.ones(matrix.nnz), matrix.indices, matrix.indptr), shape=matrix.shape)
        graph = sp.csc_array(pattern @ pattern.T)
        graph = sp.csc_array(graph + sp.diags_array(graph.sum(0) + 1.0))  # dominant: no pivoting
        options = {"SymmetricMode": True}
        factor = scipy.sparse.linalg.splu(graph, "MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options)
        order = np.empty(rows, dtype=np.int64)
        order[factor.perm_c] = np.arange(rows)
        work = float((np.diff(factor.L.indptr).astype(np.float64) ** 2).sum())
    return order[np.argsort(counts[order] > 1, kind="stable")].astype(np.int64), work


def _arrays(matrix: sp.csr_array) -> tuple[Index, Index, Array]:
    return matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64), matrix.data


@compiled
def _eliminate(
    pointer: Index, column: Index, data: Array, variables: int, free: int, tolerance: float
) -> tuple[Index, Index, Array, Array, Index]:
    """Eliminate rows in their order; those from number ``free`` on are dependent whatever their pivots."""
    rows = len(pointer) - 1
    below_start, above_start = np.zeros(rows + 1, np.int64), np.zeros(rows + 1, np.int64)
    below_index, below = np.empty(4 * len(column) + variables, np.int64), np.empty(4 * len(column) + variables)
    above_index, above = np.empty(4 * len(column) + rows, np.int64), np.empty(4 * len(column) + rows)
    pivot, step = np.zeros(rows), np.full(rows, -1)
    owner, seen = np.full(variables, -1), np.full(variables, -1)  # step of each pivot variable; last row to reach it
    x = np.zeros(variables)
    stack, place = np.empty(variables, np.int64), np.empty(variables, np.int64)
    reached, loose = np.empty(variables, np.int64), np.empty(variables, np.int64)
    rank = 0
    for r in range(rows):
        finished, open_count = 0, 0
        for t in range(pointer[r], pointer[r + 1]):  # depth-first search for the steps that act on this row
            if seen[column[t]] == r:
                continue
            depth = 0
            stack[0], seen[column[t]] = column[t], r
            place[0] = below_start[owner[column[t]]] if owner[column[t]] >= 0 else 0
            while depth >= 0:
                i = stack[depth]
                k = owner[i]
                if k < 0:
                    loose[open_count] = i
                    open_count += 1
                    depth -= 1
                    continue
                p = place[depth]
                while p < below_start[k + 1] and seen[below_index[p]] == r:
                    p += 1
                place[depth] = p + 1
                if p == below_start[k + 1]:
                    reached[finished] = i
                    finished += 1
                    depth -= 1
                else:
                    depth += 1
                    stack[depth], seen[below_index[p]] = below_index[p], r
                    after = owner[below_index[p]]
                    place[depth] = below_start[after] if after >= 0 else 0
        for t in range(pointer[r], pointer[r + 1]):
            x[column[t]] = data[t]
        if above_start[r] + finished > len(above):
            above_index = np.concatenate((above_index, np.empty(len(above) + finished, np.int64)))
            above = np.concatenate((above, np.empty(len(above) + finished)))
        end = above_start[r]
        for f in range(finished - 1, -1, -1):
            i = reached[f]
            value, k = x[i], owner[i]
            x[i] = 0.0
            if value == 0.0:
                continue
            above_index[end], above[end] = k, value
            end += 1
            for p in range(below_start[k], below_start[k + 1]):
                x[below_index[p]] -= below[p] * value
        above_start[r + 1] = end
        largest, best = 0.0, -1
        for f in range(open_count):
            if abs(x[loose[f]]) > largest:
                largest, best = abs(x[loose[f]]), loose[f]
        if largest > tolerance and r < free:
            if below_start[rank] + open_count > len(below):
                below_index = np.concatenate((below_index, np.empty(len(below) + open_count, np.int64)))
                below = np.concatenate((below, np.empty(len(below) + open_count)))
            end = below_start[rank]
            for f in range(open_count):
                i = loose[f]
                if i != best and abs(x[i]) > 1e-15:
                    below_index[end], below[end] = i, x[i] / x[best]
                    end += 1
            below_start[rank + 1] = end
            pivot[r], step[r], owner[best] = x[best], rank, rank
            rank += 1
        for f in range(open_count):
            x[loose[f]] = 0.0
    return above_start, above_index, above, pivot, step


def _smallest(factors: Factors, kept: Index, loops: Loops) -> Array:
    """A vector y of norm 1 for which ``A[kept]^T y`` is nearly as short as possible, by inverse iteration with U."""
    vector = np.random.default_rng(0).standard_normal(len(kept))
    for _ in range(3):
        loops.solve(*factors[:4], kept, vector)
        vector /= max(np.linalg.norm(vector), np.finfo(np.float64).tiny)
    return vector


@compiled
def _solve(start: Index, index: Index, value: Array, pivot: Array, kept: Index, y: Array) -> None:
    """``y <- (U^T U)^-1 y`` in place, up to a factor that avoids overflow."""
    for k in range(len(kept)):
        total = y[k]
        for t in range(start[kept[k]], start[kept[k] + 1]):
            total -= value[t] * y[index[t]]
        y[k] = total / pivot[kept[k]]
        if abs(y[k]) > 1e100:
            y *= 1e-100
    for k in range(len(kept) - 1, -1, -1):
        y[k] /= pivot[kept[k]]
        if abs(y[k]) > 1e100:
            y *= 1e-100
        for t in range(start[kept[k]], start[kept[k] + 1]):
            y[index[t]] -= value[t] * y[k]


@compiled
def _back_substitute(
    start: Index, index: Index, value: Array, pivot: Array, kept: Index, dropped: Index, negligible: float
) -> tuple[Index, Index, Array]:
    """``U^-1 x`` for the columns x of dependent rows, without negligible coefficients."""
    x, begin = np.zeros(len(kept)), np.zeros(len(dropped) + 1, np.int64)
    at, found = np.empty(len(kept), np.int64), np.empty(len(kept))
    for d in range(len(dropped)):
        for t in range(start[dropped[d]], start[dropped[d] + 1]):
            x[index[t]] = value[t]
        end = begin[d]
        if end + len(kept) > len(at):
            at = np.concatenate((at, np.empty(len(at) + len(kept), np.int64)))
            found = np.concatenate((found, np.empty(len(found) + len(kept))))
        for k in range(len(kept) - 1, -1, -1):
            if x[k] == 0.0:
                continue
            c = x[k] / pivot[kept[k]]
            x[k] = 0.0
            for t in range(start[kept[k]], start[kept[k] + 1]):
                x[index[t]] -= value[t] * c
            if abs(c) > negligible:
                at[end], found[end] = k, c
                end += 1
        begin[d + 1] = end
    return begin, at, found
