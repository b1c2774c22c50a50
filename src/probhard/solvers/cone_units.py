"""Units of a cone program: scales of rows and columns that bring its numbers to the size of 1.

Descriptions mix units: ``|u / 1e10| <= t`` beside ``u <= 1e10`` gives coefficients and variables that differ by ten
decades, and a residual that looks small next to the largest numbers. Curtis and Reid (1972) find units from the data,

    minimise  sum over entries (log |a_ij| + log row_i + log column_j)^2,

The rows of a cone share a unit, and so do all entries of u. The size of u itself is read off the right-hand sides. The
columns of ``v = R u - R z`` and their rows keep their units: they carry the objective.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg

RIDGE = 1e-6  # keeps units that the data leaves open near 1
ROUNDED = 1e-9  # right-hand sides this small next to the largest say nothing of sizes


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
    apart = np.zeros(m, dtype=bool)  # the rows of v
    apart[entries.row[moved[entries.col]]] = True
    kept = ~moved[entries.col] & (entries.data != 0)
    column = np.arange(n)
    column[own] = own.start
    i, j = cones[entries.row[kept]], column[entries.col[kept]]
    target = -np.log2(np.abs(entries.data[kept]))
    count, groups = len(target), int(cones.max(initial=-1)) + 1
    places = np.tile(np.arange(count), 2), np.concatenate([i, groups + j])
    design = sp.csr_matrix((np.ones(2 * count), places), shape=(count, groups + n))
    logs = scipy.sparse.linalg.lsqr(design, target, damp=RIDGE, atol=1e-4, btol=1e-4, iter_lim=200)[0]
    rows, columns = logs[:groups][cones], logs[groups:][column]
    size = _size(np.abs(right) * np.exp2(rows), apart)
    return Units(
        np.where(apart, 1.0, np.exp2(np.rint(rows - size))), np.where(moved, 1.0, np.exp2(np.rint(columns + size)))
    )


def _size(right: np.ndarray, apart: np.ndarray) -> float:
    """The binary logarithm of the size of u: between that of z, by the rows of v, and that of the other rows."""
    z = float(right[apart].max(initial=0.0))
    other = right[~apart & (right > ROUNDED * right.max(initial=0.0))]
    logs = ([np.log2(z)] if z > 0 else []) + ([np.median(np.log2(other))] if len(other) else [])
    return float(np.mean(logs)) if logs else 0.0
