"""Units of a cone program: scales of rows and columns that bring its numbers to the size of 1.

Descriptions mix units: ``|u / 1e10| <= t`` beside ``u <= 1e10`` gives coefficients and variables that differ by ten
decades, and a residual that looks small next to the largest numbers. Curtis and Reid (1972) find units from the data,

    minimise  sum over entries (log |a_ij| + log row_i + log column_j)^2,

with the right-hand side as one more column. Here the rows of a cone share a unit, and so do all entries of u. The
columns of ``v = R u - R z`` and their rows keep theirs: they carry the objective.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg

RIDGE = 1e-6  # keeps units that the data leaves open near 1


@dataclass(frozen=True)
class Units:
    """``x = columns * x'`` and ``s = s' / rows`` for the scaled program; all are powers of 2."""

    rows: np.ndarray  # (m,)
    columns: np.ndarray  # (n,)


def units_of(
    matrix: sp.csc_matrix,  # A, (m, n)
    right: np.ndarray,  # b, (m,)
    cones: np.ndarray,  # the number of each row's cone, (m,)
    own: slice,  # the columns of u
    moved: np.ndarray,  # the columns of v, (n,) bool
) -> Units:
    """Find the units of a cone program."""
    m, n = matrix.shape
    entries = sp.coo_matrix(matrix)
    kept = ~moved[entries.col] & (entries.data != 0)
    known = np.flatnonzero(right)
    column = np.arange(n)
    column[own] = own.start
    i = np.concatenate([cones[entries.row[kept]], cones[known]])
    j = np.concatenate([column[entries.col[kept]], np.full(len(known), n)])
    target = -np.log2(np.abs(np.concatenate([entries.data[kept], right[known]])))
    if not len(target):
        return Units(np.ones(m), np.ones(n))
    count, groups = np.arange(len(target)), int(cones.max()) + 1
    ones = np.ones(len(target))
    design = sp.csr_matrix(
        (np.tile(ones, 2), (np.tile(count, 2), np.concatenate([i, groups + j]))), shape=(len(target), groups + n + 1)
    )
    logs = scipy.sparse.linalg.lsqr(design, target, damp=RIDGE, atol=1e-4, btol=1e-4, iter_lim=200)[0]
    rows, columns = logs[:groups][cones], logs[groups:-1][column] - logs[-1]
    rows = rows + logs[-1]
    apart = np.zeros(m, dtype=bool)
    apart[entries.row[moved[entries.col]]] = True
    return Units(np.where(apart, 1.0, np.exp2(np.rint(rows))), np.where(moved, 1.0, np.exp2(np.rint(columns))))
