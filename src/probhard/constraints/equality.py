"""Linear equality constraints, ``A u = b`` (paper, section "Linear Equality Constraints")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from probhard._util.tensors import broadcast, broadcast_batch, check_finite, checking, relative
from probhard.constraints._reals import check_real, reals
from probhard.constraints._time import rows_in_time
from probhard.constraints.base import Arrays, Constraint, immutable
from probhard.errors import InfeasibleError, ParameterError, RankError, ShapeError, check_choice
from probhard.rows.disjoint import DisjointRows
from probhard.rows.maps import DenseMap, arrays_of, matrix_of
from probhard.rows.presolve import dependent_rows
from probhard.rows.system import LinearSystem

RANKS = ("strict", "reveal", "assume")
_SYSTEMS: Any = WeakTensorKeyDictionary()  # cache of systems by tensor, while the tensor lives


@immutable
class LinearEquality(Constraint):
    """``A u = b``.

    Args:
        A: Rows, (q, n) or (*batch, q, n); dense or torch sparse, a numpy array or scipy sparse matrix.
        b: Right-hand sides, (*batch, q), or one number for all rows.
        rank: ``"strict"`` rejects redundant rows, ``"reveal"`` drops them, ``"assume"`` does not look for them.

    Raises:
        ShapeError: A and b do not fit.
        RankError: Rows are redundant and ``rank`` is ``"strict"``.
        InfeasibleError: Rows contradict each other.
        ParameterError: A number is complex or not finite, or a sparse A requires a gradient.
    """

    role: ClassVar[str] = "linear"
    stored_as: ClassVar[str | None] = "rows"
    system: LinearSystem
    b: Tensor
    rank: str

    def __init__(self, A: Any, b: Any = 0.0, rank: str = "strict") -> None:
        check_choice("rank", rank, RANKS)
        if isinstance(A, LinearSystem):
            self._prepare(A, b, rank)
            return
        matrix = real_matrix("A", A)
        if len(matrix.shape) < 2:
            raise ShapeError(
                f"A has shape {tuple(matrix.shape)}.",
                "It needs one row per constraint and one column per variable, (*batch, q, n).",
                "Write a single row as A[None, :].",
            )
        self._prepare(_system_of(matrix, rank == "assume"), b, rank)

    def _prepare(self, system: LinearSystem, b: Any, rank: str = "strict") -> None:
        right = reals("The right-hand side b", b)
        if right.dim() == 0:
            right = right.expand(system.row_count)
        if right.shape[-1] != system.row_count:
            raise ShapeError(
                f"b has shape {tuple(right.shape)}, A has {system.row_count} rows.",
                "There is one right-hand side per row, in the last dimension.",
                f"Give b the shape (*batch, {system.row_count}).",
            )
        self._set(system=system, b=right, rank=rank)
        broadcast_batch(system.batch_shape, self.b.shape[:-1], "A", "b")
        if checking():
            check_finite("The right-hand side b", self.b)
        self._check_redundancy()

    def replace(self, b: Any) -> LinearEquality:
        """The same rows with other right-hand sides b (*batch, q); raises as the class."""
        return LinearEquality(self.system, b, self.rank)

    @property
    def variables(self) -> int:
        return self.system.variables

    @property
    def batch_shape(self) -> torch.Size:
        """Batch dimensions that A and b broadcast to."""
        return broadcast(self.system.batch_shape, self.b.shape[:-1])

    @property
    def row_count(self) -> int:
        """Number of rows q."""
        return self.system.row_count

    @property
    def algorithm(self) -> str:
        return self.system.algorithm

    @property
    def A(self) -> Tensor:  # noqa: N802 - the paper's name
        """The rows as a dense matrix, (*batch, q, n)."""
        return self.system.map.at(self.b).dense()

    def residual(self, u: Tensor) -> Tensor:
        self.check_event(u, "The point")
        return self.system.map.at(u).apply(u) - self.b.to(u)

    def scale(self, u: Tensor) -> Tensor:
        return self.system.map.at(u).magnitude(u) + self.b.to(u).abs()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._copy(b=self.b.to(*args, **kwargs))

    def data(self) -> tuple[Tensor, ...]:
        rows = self.system.map
        if isinstance(rows, DenseMap):
            return self.b, rows.matrix[..., 0]
        return (self.b, rows.coefficient) if isinstance(rows, DisjointRows) else (self.b,)

    def relative_violation(self, u: Tensor, size: Tensor | None = None) -> Tensor:
        rows, b = self.system.map.at(u), self.b.to(u)
        if u.shape[-1] != rows.variables:
            self.check_event(u, "The point")
        if not self.row_count:
            return u.new_zeros(u.shape[:-1])
        size = None if size is None else rows.magnitude(size * torch.ones_like(u))
        return relative(rows.apply(u) - b, rows.magnitude(u) + b.abs(), size).amax(-1)

    def stackable(self) -> tuple[sp.csr_array, Tensor, np.ndarray]:
        """Rows (q, n), right-hand sides (*batch, q) and held variables (k,), to be stacked by ``&``.

        Raises:
            ParameterError: The rows differ between batch elements.
        """
        matrix = self.system.matrix
        if matrix is None:
            rows = self.A
            if rows.dim() > 2:
                raise ParameterError(
                    "Rows that differ between batch elements cannot be combined with '&'.",
                    "All elements share one combined structure.",
                    "Concatenate the matrices along their rows and build one LinearEquality.",
                )
            matrix = sp.csr_array(rows.detach().cpu().double().numpy())
        held = self.system.held
        return matrix, self.b, np.empty(0, dtype=np.int64) if held is None else held.numpy()

    def linear_part(self) -> Constraint:
        return self

    def on_slices(self, slices: int, width: int) -> LinearEquality:
        matrix, _, held = self.stackable()
        lifted = sp.csr_array(sp.kron(sp.eye_array(slices), matrix))
        everywhere = (held[None, :] + width * np.arange(slices)[:, None]).ravel()
        system = LinearSystem.of(lifted, everywhere, self.rank == "assume")
        return LinearEquality(system, rows_in_time(self.b, slices), self.rank)

    def stored(self) -> tuple[dict[str, Any], Arrays]:
        matrix, b, held = self.stackable()
        return {"rank": self.rank}, {**arrays_of(matrix), "b": b.numpy(force=True), "held": held}

    @classmethod
    def restored(cls, values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> LinearEquality:
        system = LinearSystem.of(matrix_of(arrays), arrays["held"], values["rank"] == "assume")
        return LinearEquality(system, torch.from_numpy(arrays["b"]), values["rank"])

    def merged(self, other: Constraint) -> Constraint | None:
        """Both systems stacked; rows assumed independent in each are looked at again."""
        if not isinstance(other, LinearEquality):
            return None
        (first, b1, held1), (second, b2, held2) = self.stackable(), other.stackable()
        system = LinearSystem.of(sp.csr_array(sp.vstack([first, second])), np.union1d(held1, held2))
        batch = broadcast_batch(b1.shape[:-1], b2.shape[:-1], "the first constraint", "the second")
        dtype = torch.promote_types(b1.dtype, b2.dtype)
        b = torch.cat([x.expand(*batch, -1).to(b1.device, dtype) for x in (b1, b2)], -1)
        rank = "reveal" if "reveal" in (self.rank, other.rank) else "strict"
        return LinearEquality(system, b, rank)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rows={self.row_count}, variables={self.variables}, algorithm={self.algorithm!r})"

    def _check_redundancy(self) -> None:
        redundancy = self.system.redundancy
        if redundancy is None:
            return
        source = _words(np.unique(redundancy.combination.indices), redundancy.others)
        if checking():
            b = self.b.detach().cpu().double().numpy()
            side = b.reshape(-1, b.shape[-1]).T
            implied = redundancy.combination @ side[redundancy.others]
            gap = np.abs(side[redundancy.dependent] - implied).T.reshape(*b.shape[:-1], len(redundancy.dependent))
            tolerance = 1e-9 if self.b.dtype == torch.float64 else 1e-5
            wrong = np.argwhere(gap > tolerance * (1 + np.abs(b).max(-1, keepdims=True)))
            if len(wrong):
                *element, row = (int(i) for i in wrong[0])
                at = f" in batch element {tuple(element)}" if element else ""
                raise InfeasibleError(
                    f"Row {redundancy.dependent[row]} contradicts rows {source}: it misses what they imply by "
                    f"{gap.max():.4g}{at}.",
                    "No point satisfies all of them.",
                    "Correct b, or leave out the row.",
                )
        if self.rank != "reveal":
            raise RankError(
                f"Rows {_words(redundancy.dependent)} repeat what rows {source} already say.",
                "A W A^T would be singular.",
                "Leave them out, or pass rank='reveal' to drop them.",
            )


def _system_of(matrix: Any, assume: bool) -> LinearSystem:
    """Analyse the rows of a matrix: cached if shared, not analysed if batched or trained."""
    if not isinstance(matrix, Tensor):
        return _shared_system(sp.csr_array(matrix), assume)
    if matrix.layout != torch.strided:
        if matrix.requires_grad:
            raise ParameterError(
                "A sparse A requires a gradient.",
                "Sparse rows are read as constants, so it would never be trained.",
                "Pass a dense A, or A.detach().",
            )
        return remembered(matrix, ("rows", assume), lambda: _shared_system(scipy_from_sparse(matrix), assume))
    if matrix.requires_grad or matrix.dim() > 2 or not checking():
        _check_batched(matrix, assume)
        return LinearSystem.batched(matrix)
    dense = matrix
    return remembered(
        dense, ("rows", assume), lambda: _shared_system(sp.csr_array(dense.cpu().double().numpy()), assume)
    )


def _shared_system(rows: sp.csr_array, assume: bool) -> LinearSystem:
    check_finite("The matrix A", torch.from_numpy(rows.data.astype(np.float64)))
    return LinearSystem.of(rows, assume=assume)


def remembered(tensor: Tensor, use: Any, build: Callable[[], Any]) -> Any:
    """Build something from a tensor, cached until the tensor is freed or changed in place.

    Args:
        tensor: The tensor.
        use: Key for the kind of object.
        build: Called if there is no cached object.
    """
    if not checking():
        return build()
    known = _SYSTEMS.setdefault(tensor, {})
    key = (use, tensor._version)
    if key not in known:
        known[key] = build()
    return known[key]


def real_matrix(name: str, matrix: Any) -> Any:
    """Check and convert rows, integers to float64; raises ParameterError if they are not real."""
    if not sp.issparse(matrix):
        return reals(name, matrix)
    check_real(name, matrix)
    return matrix


def scipy_from_sparse(matrix: Tensor) -> sp.csr_array:
    """Convert a torch sparse matrix (q, n) to scipy, in float64; raises ShapeError if it is batched."""
    if matrix.dim() != 2:
        raise ShapeError(
            f"A sparse A has shape {tuple(matrix.shape)}.",
            "A sparse matrix is shared by all batch elements.",
            "Pass one (q, n) matrix, or a dense (*batch, q, n) one.",
        )
    entries = matrix.detach().to_sparse_coo().coalesce().cpu()
    rows, columns = entries.indices().numpy()
    return sp.csr_array((entries.values().double().numpy(), (rows, columns)), shape=tuple(matrix.shape))


def _check_batched(matrix: Tensor, assume: bool) -> None:
    """Check that entries are finite and, unless assumed, every batch element has full row rank; eager mode only."""
    if not checking():
        return
    check_finite("The matrix A", matrix)
    if assume:
        return
    rank = torch.linalg.matrix_rank(matrix.detach())
    if bool((rank < matrix.shape[-2]).any()):
        element = tuple(int(i) for i in (rank < matrix.shape[-2]).nonzero()[0])
        _, dependent, _ = dependent_rows(matrix[element].detach().cpu().double().numpy())
        raise RankError(
            f"In batch element {element} of A, rows {_words(dependent)} repeat other rows.",
            "A W A^T would be singular there.",
            "Leave those rows out.",
        )


def _words(index: np.ndarray, names: np.ndarray | None = None) -> str:
    """A short list of row numbers."""
    numbers = [int(i) for i in (index if names is None else names[index])]
    shown = ", ".join(map(str, numbers[:8]))
    return f"[{shown}{', ...' if len(numbers) > 8 else ''}]"
