"""Linear inequalities, ``G u <= d``."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.tensors import OnDevice, broadcast_batch, check_finite, checking
from probhard.constraints._reals import reals
from probhard.constraints._time import rows_in_time
from probhard.constraints.base import Constraint, immutable
from probhard.constraints.box import Box
from probhard.constraints.equality import real_matrix, remembered, scipy_from_sparse
from probhard.constraints.monotone import Monotone
from probhard.errors import InfeasibleError, ParameterError, ShapeError
from probhard.rows.maps import DenseMap, SparseMap


class PreparedRows(OnDevice):
    """The analysed rows G: their map, and which of them have a single variable.

    Args:
        matrix: Rows (p, n), sparse; or a dense tensor (*batch, p, n), which is not analysed.

    Raises:
        ParameterError: An entry is not finite.
    """

    def __init__(self, matrix: sp.csr_array | Tensor) -> None:
        self.matrix: sp.csr_array | None = None
        self.map: SparseMap | DenseMap
        self.single = self.rest = None
        if isinstance(matrix, Tensor):
            self.map = DenseMap(matrix)
            return
        matrix = sp.csr_array(matrix, dtype=np.float64)
        matrix.eliminate_zeros()
        check_finite("The matrix G", torch.from_numpy(matrix.data))
        self.map, self.matrix = SparseMap(matrix), matrix
        counts = np.diff(matrix.indptr)
        self.single, self.rest = np.flatnonzero(counts <= 1), np.flatnonzero(counts > 1)

    @cached_property
    def several(self) -> PreparedRows:
        """The rows of more than one variable."""
        assert self.matrix is not None
        return PreparedRows(sp.csr_array(self.matrix[self.rest]))

    @property
    def batch_shape(self) -> torch.Size:
        """Batch dimensions of G itself."""
        return self.map.matrix.shape[:-2] if isinstance(self.map, DenseMap) else torch.Size()


@immutable
class LinearInequality(Constraint):
    """``G u <= d``.

    Args:
        G: Rows, (p, n) or (*batch, p, n); dense or torch sparse, a numpy array or scipy sparse matrix.
        d: Right-hand sides, (*batch, p), or one number for all rows; inf for no bound.

    Raises:
        ShapeError: G and d do not fit.
        ParameterError: G is not finite, d is NaN, or a number is complex.
        InfeasibleError: An entry of d is -inf.
    """

    role: ClassVar[str] = "inequalities"
    prepared: PreparedRows
    d: Tensor

    def __init__(self, G: Any, d: Any = 0.0) -> None:
        if isinstance(G, PreparedRows):
            self._prepare(G, d)
            return
        matrix = real_matrix("G", G)
        if len(matrix.shape) < 2:
            raise ShapeError(
                f"G has shape {tuple(matrix.shape)}.",
                "It needs one row per inequality and one column per variable, (*batch, p, n).",
                "Write a single row as G[None, :].",
            )
        self._prepare(_rows_of(matrix), d)

    def _prepare(self, rows: PreparedRows, d: Any) -> None:
        right = reals("d", d)
        if right.dim() == 0:
            right = right.expand(rows.map.row_count)
        if right.shape[-1] != rows.map.row_count:
            raise ShapeError(
                f"d has shape {tuple(right.shape)}, G has {rows.map.row_count} rows.",
                "There is one right-hand side per row, in the last dimension.",
                f"Give d the shape (*batch, {rows.map.row_count}).",
            )
        self._set(prepared=rows, d=right)
        broadcast_batch(rows.batch_shape, right.shape[:-1], "G", "d")
        if checking() and bool(torch.isnan(right).any()):
            raise ParameterError("d has NaN entries.", "No value can be compared with NaN.", "Use inf for no bound.")
        if checking() and bool((right == -torch.inf).any()):
            raise InfeasibleError("d has entries -inf.", "No point satisfies their rows.", "Use inf for no bound.")

    @classmethod
    def between(cls, weights: Tensor, least: Tensor, most: Tensor) -> LinearInequality:
        """``least <= weights . u <= most``.

        Args:
            weights: Coefficients, (n,).
            least: Smallest value, (*batch,).
            most: Largest value, (*batch,).
        """

        def build() -> PreparedRows:
            return _rows_of(torch.stack([weights, -weights]))

        rows = build() if weights.requires_grad else remembered(weights, "two-sided", build)
        return LinearInequality(rows, torch.stack(torch.broadcast_tensors(most, -least), -1))

    @property
    def variables(self) -> int:
        return self.prepared.map.variables

    @property
    def algorithm(self) -> str:
        return "primal-dual active sets"

    def excess(self, u: Tensor) -> Tensor:
        self.check_event(u, "The point")
        return self.prepared.map.at(u).apply(u) - self.d.to(u)

    def excess_scale(self, u: Tensor) -> Tensor:
        return self.prepared.map.at(u).magnitude(u) + self.d.to(u).abs()

    def excess_unit(self, u: Tensor) -> Tensor:
        return self.prepared.map.at(u).magnitude(torch.ones_like(u))

    def resolve(self, n: int) -> Constraint:
        rows = self.prepared
        if rows.matrix is None or rows.rest is None or rows.single is None:
            return self
        parts: list[Constraint] = []
        if len(rows.single):
            parts.append(self._bounds(rows.single))
        if len(rows.rest):
            direction = _chain(rows.matrix[rows.rest]) if checking() else None
            d = self.d.index_select(-1, torch.from_numpy(rows.rest).to(self.d.device))
            if direction is not None and not bool((d != 0).any()):
                parts.append(Monotone(direction))
            elif len(rows.single):
                parts.append(LinearInequality(rows.several, d))
            else:
                return self
        joined = parts[0]
        for part in parts[1:]:
            joined = joined & part
        return joined

    def _bounds(self, single: np.ndarray) -> Box:
        """The rows of a single variable, as bounds."""
        matrix = self.prepared.matrix
        assert matrix is not None
        d, n = self.d, self.variables
        lower = torch.full((*d.shape[:-1], n), -torch.inf, dtype=d.dtype, device=d.device)
        upper = torch.full_like(lower, torch.inf)
        for row in single:
            start, end = matrix.indptr[row], matrix.indptr[row + 1]
            if start == end:
                if checking() and bool((d[..., row] < 0).any()):
                    raise InfeasibleError(
                        f"Row {row} of G is zero and its d is negative.", "No point satisfies it.", "Leave it out."
                    )
                continue
            column, slope = int(matrix.indices[start]), float(matrix.data[start])
            bound = (d[..., row] / slope).unsqueeze(-1)
            index = torch.tensor([column], device=d.device)
            kind, pick = (upper, torch.minimum) if slope > 0 else (lower, torch.maximum)
            kind = kind.index_copy(-1, index, pick(kind.index_select(-1, index), bound))
            lower, upper = (lower, kind) if slope > 0 else (kind, upper)
        return Box(lower, upper)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._copy(d=self.d.to(*args, **kwargs))

    def data(self) -> tuple[Tensor, ...]:
        rows = self.prepared.map
        return (self.d, rows.matrix[..., 0]) if isinstance(rows, DenseMap) else (self.d,)

    def on_slices(self, slices: int, width: int) -> LinearInequality:
        if self.prepared.matrix is None:
            raise ParameterError(
                "per_slice cannot lift rows that differ between batch elements.",
                "All slices share one set of rows.",
                "Build the field's rows directly.",
            )
        lifted = PreparedRows(sp.csr_array(sp.kron(sp.eye_array(slices), self.prepared.matrix)))
        return LinearInequality(lifted, rows_in_time(self.d, slices))

    def __repr__(self) -> str:
        return f"LinearInequality(rows={self.prepared.map.row_count}, variables={self.variables})"


def _rows_of(matrix: Any) -> PreparedRows:
    if not isinstance(matrix, Tensor):
        return PreparedRows(sp.csr_array(matrix))
    if matrix.layout != torch.strided:
        return remembered(matrix, "inequality", lambda: PreparedRows(scipy_from_sparse(matrix)))
    if matrix.requires_grad or matrix.dim() > 2 or not checking():
        if checking():
            check_finite("The matrix G", matrix)
        return PreparedRows(matrix)
    return remembered(matrix, "inequality", lambda: PreparedRows(sp.csr_array(matrix.cpu().double().numpy())))


def _chain(matrix: sp.csr_array) -> str | None:
    """The direction if the rows say that all neighbours are ordered; None for other rows."""
    p, n = matrix.shape
    if p != n - 1 or matrix.nnz != 2 * p:
        return None
    rows = sp.csr_array(matrix)
    rows.sort_indices()
    first, second = rows.indices[0::2], rows.indices[1::2]
    order = np.argsort(first)
    if not (np.array_equal(first[order], np.arange(p)) and np.array_equal(second, first + 1)):
        return None
    slope, other = rows.data[0::2], rows.data[1::2]
    if not np.array_equal(slope, -other) or not (np.all(slope > 0) or np.all(slope < 0)):
        return None
    return "increasing" if slope[0] > 0 else "decreasing"
