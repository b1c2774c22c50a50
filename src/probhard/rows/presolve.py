"""Presolve: pinned variables and dependent rows.

A row with one variable pins it, ``u_i = b / a``. Pinned variables are substituted into the other rows, which may pin
more. Under any diagonal metric this equals the joint projection, and pinned variances are exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import scipy.linalg
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.tensors import OnDevice
from probhard.rows.maps import SparseMap

RANK_TOLERANCE = 1e-10


@dataclass(frozen=True, eq=False)
class Wave(OnDevice):
    """Rows that pin one variable each, once the variables pinned before are known."""

    row: Tensor  # (k,)
    coefficient: Tensor  # (k,)
    known: SparseMap  # (k, pinned so far): coefficients of those variables


@dataclass(frozen=True, eq=False)
class Pins(OnDevice):
    """Pinned variables, in the order of substitution."""

    variable: Tensor  # (k,)
    waves: tuple[Wave, ...]
    coupling: SparseMap  # (other rows, k): coefficients of the pinned variables in the other rows

    def renumbered(self, rows: np.ndarray) -> Pins:
        """The same pins as part of a larger system, in which row i has the number ``rows[i]``."""
        number = torch.from_numpy(rows.astype(np.int64))
        return replace(self, waves=tuple(replace(wave, row=number[wave.row]) for wave in self.waves))

    def values(self, b: Tensor) -> Tensor:
        """Values (*batch, k) of the pinned variables for right-hand sides b (*batch, q)."""
        values = b[..., :0]
        for wave in self.waves:
            right = b.index_select(-1, wave.row) - wave.known.apply(values)
            values = torch.cat([values, right / wave.coefficient], -1)
        return values


def find_pins(matrix: sp.csr_array) -> tuple[Pins | None, np.ndarray, sp.csr_array, np.ndarray]:
    """Find pinned variables.

    Args:
        matrix: A, (q, n).

    Returns:
        The pins (None if there are none), the numbers of the other rows, those rows over the free variables, and the
        numbers of rows without a free variable.
    """
    rows, variables = matrix.shape
    pinned = np.full(variables, False)
    order: list[int] = []
    steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    open_rows = np.ones(rows, dtype=bool)
    while True:
        free = matrix @ sp.diags_array((~pinned).astype(np.float64))
        free.eliminate_zeros()
        single = np.flatnonzero(open_rows & (np.diff(free.indptr) == 1))
        if len(single) == 0:
            break
        target = free.indices[free.indptr[single]]
        target, first = np.unique(target, return_index=True)
        single = single[first]
        steps.append((single, free.data[free.indptr[single]], np.asarray(order, dtype=np.int64)))
        order.extend(target.tolist())
        pinned[target] = True
        open_rows[single] = False
    others = np.flatnonzero(open_rows)
    remaining = sp.csr_array(free[others])
    empty = others[np.diff(remaining.indptr) == 0]
    if not order:
        return None, others, remaining, empty
    index = np.asarray(order, dtype=np.int64)
    waves = tuple(
        Wave(torch.from_numpy(row), torch.from_numpy(value), SparseMap(matrix[row][:, known]))
        for row, value, known in steps
    )
    return Pins(torch.from_numpy(index), waves, SparseMap(matrix[others][:, index])), others, remaining, empty


def dependent_rows(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split rows into independent and dependent ones by a pivoted QR factor.

    Args:
        matrix: A, (q, n).

    Returns:
        ``(independent, dependent, combination)`` with ``A[dependent] = combination @ A[independent]``.
    """
    scale = np.linalg.norm(matrix, axis=1, keepdims=True)
    scaled = matrix / np.where(scale > 0, scale, 1.0)
    scaled[(matrix != 0).sum(1) == 1] *= 4  # prefer rows that fix one variable to rows that follow from them
    _, triangle, order = scipy.linalg.qr(scaled.T, mode="economic", pivoting=True)
    pivots = np.abs(np.diag(triangle))
    rank = int((pivots > RANK_TOLERANCE * max(1.0, pivots.max(initial=0.0))).sum())
    independent, dependent = np.sort(order[:rank]), np.sort(order[rank:])
    if len(dependent) == 0:
        return independent, dependent, np.empty((0, rank))
    combination = np.linalg.lstsq(matrix[independent].T, matrix[dependent].T, rcond=None)[0].T
    combination[np.abs(combination) < 1e-9] = 0.0
    return independent, dependent, combination
