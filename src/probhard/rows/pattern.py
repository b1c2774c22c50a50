"""Rows of a known pattern whose values differ between points: sparse Jacobians.

The pattern determines the algorithm once: disjoint rows, or a planned sparse elimination. Values (*batch, entries) are
filled in for each point. Rows that share no variable get one colour, and one vector-Jacobian product per colour yields
all values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.tensors import OnDevice
from probhard.errors import ParameterError, ShapeError
from probhard.rows.base import Structure
from probhard.rows.disjoint import DisjointRows
from probhard.rows.sparse import SparseRows


class Pattern(OnDevice):
    """Where a Jacobian (q, n) may be non-zero.

    Args:
        rows: Row numbers of the entries, (k,).
        columns: Variable numbers of the entries, (k,).
        shape: ``(q, n)``.

    Raises:
        ShapeError: If rows and columns are not two vectors of one length.
        ParameterError: If an entry is repeated or a row is empty.
    """

    def __init__(self, rows: Any, columns: Any, shape: tuple[int, int]) -> None:
        row, column = np.asarray(rows, dtype=np.int64), np.asarray(columns, dtype=np.int64)
        if row.ndim != 1 or row.shape != column.shape:
            raise ShapeError(
                f"A pattern got {row.shape} row and {column.shape} column numbers.",
                "There is one of each for every entry.",
                "Pass two vectors of one length.",
            )
        matrix = sp.csr_array((np.ones(len(row)), (row, column)), shape=shape)
        if matrix.nnz != len(row) or len(np.unique(row)) != shape[0]:
            raise ParameterError(
                f"A pattern of {len(row)} entries has {len(row) - matrix.nnz} repeated ones and "
                f"{shape[0] - len(np.unique(row))} empty rows.",
                "Every row needs at least one variable, every entry one place.",
                "List each entry once and leave out empty rows.",
            )
        matrix.sort_indices()
        self.shape = shape
        self.row, self.column = torch.from_numpy(row), torch.from_numpy(column)
        self.disjoint = bool(np.diff(sp.csc_array(matrix).indptr).max(initial=0) <= 1)
        self.template = None if self.disjoint else SparseRows(matrix)
        self.order = torch.from_numpy(np.lexsort((column, row)))  # sorts the entries by row, then by column
        colour = _colours(matrix)
        self.colours = int(colour.max(initial=0)) + 1
        self.colour = torch.from_numpy(colour)  # of each row, (q,)

    def structure(self, values: Tensor) -> Structure:
        """The rows with these values (*batch, k)."""
        if self.template is not None:
            return self.template.at(values).with_values(values.index_select(-1, self.order.to(values.device)))
        at = self.column.to(values.device)
        coefficient = values.new_zeros(*values.shape[:-1], self.shape[1]).index_copy(-1, at, values)
        group = torch.zeros(self.shape[1], dtype=torch.int64, device=values.device).index_copy(
            0, at, self.row.to(values.device)
        )
        return DisjointRows(coefficient, self.shape[0], group)

    def seeds(self, like: Tensor) -> Tensor:
        """One cotangent per colour, (colours, q), in the dtype of ``like``: 1 at the rows of the colour, else 0."""
        colour = self.colour.to(like.device)
        return (torch.arange(self.colours, device=like.device).unsqueeze(-1) == colour).to(like.dtype)

    def gathered(self, products: Tensor) -> Tensor:
        """Values (*batch, k) from the vector-Jacobian products (colours, *batch, n) of the seeds."""
        colour = self.colour.to(products.device).index_select(0, self.row.to(products.device))
        flat = products.movedim(0, -2)  # (*batch, colours, n)
        place = colour * self.shape[1] + self.column.to(products.device)
        return flat.flatten(-2).index_select(-1, place)


def _colours(matrix: sp.csr_array) -> np.ndarray:
    """Greedy colours of the rows: rows of one colour share no variable."""
    overlap = sp.csr_array(matrix @ matrix.T)
    colour = np.full(matrix.shape[0], -1, dtype=np.int64)
    for row in range(matrix.shape[0]):
        taken = set(colour[overlap.indices[overlap.indptr[row] : overlap.indptr[row + 1]]].tolist())
        smallest = 0
        while smallest in taken:
            smallest += 1
        colour[row] = smallest
    return colour
