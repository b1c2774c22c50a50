"""Linear inequalities, ``G u <= d``: general rows, the simplex, monotone profiles."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.tensors import OnDevice, broadcast_batch, checking
from probhard.constraints.base import Constraint, reals
from probhard.constraints.box import Box, NonNegative
from probhard.constraints.conservation import Conservation
from probhard.constraints.equality import real_matrix, remembered, scipy_from_sparse
from probhard.errors import InfeasibleError, ParameterError, ShapeError, check_choice
from probhard.laws.covariance import check_finite
from probhard.rows.maps import DenseMap, SparseMap


class PreparedRows(OnDevice):
    """The rows G made ready once: their map, and those of a single variable told apart."""

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

    @property
    def batch_shape(self) -> torch.Size:
        """Batch dimensions of G itself."""
        return self.map.matrix.shape[:-2] if isinstance(self.map, DenseMap) else torch.Size()


class LinearInequality(Constraint):
    """``G u <= d``.

    Args:
        G: Rows, (p, n) or (*batch, p, n); dense or torch sparse, a numpy array or scipy sparse matrix.
        d: Right-hand sides, (*batch, p), or one number for all rows.
    """

    def __init__(self, G: Any, d: Any = 0.0) -> None:
        matrix = real_matrix("G", G)
        if len(matrix.shape) < 2:
            raise ShapeError(
                f"G has shape {tuple(matrix.shape)}.",
                "It needs one row per inequality and one column per variable, (*batch, p, n).",
                "Write a single row as G[None, :].",
            )
        self._set(_rows_of(matrix), d)

    def _set(self, rows: PreparedRows, d: Any) -> None:
        self.prepared = rows
        right = reals("d", d)
        if right.dim() == 0:
            right = right.expand(rows.map.row_count)
        if right.shape[-1] != rows.map.row_count:
            raise ShapeError(
                f"d has shape {tuple(right.shape)}, G has {rows.map.row_count} rows.",
                "There is one right-hand side per row, in the last dimension.",
                f"Give d the shape (*batch, {rows.map.row_count}).",
            )
        self.d = right
        broadcast_batch(rows.batch_shape, right.shape[:-1], "G", "d")
        if checking() and bool(torch.isnan(right).any()):
            raise ParameterError("d has NaN entries.", "Nothing can be compared with them.", "Use inf for no bound.")

    @classmethod
    def from_rows(cls, rows: PreparedRows, d: Any) -> LinearInequality:
        """From rows made ready before."""
        constraint = object.__new__(LinearInequality)
        constraint._set(rows, d)
        return constraint

    @classmethod
    def between(cls, weights: Tensor, least: Tensor, most: Tensor) -> LinearInequality:
        """``least <= weights . u <= most`` for weights (n,) and ends (*batch,)."""
        build = lambda: _rows_of(torch.stack([weights, -weights]))  # noqa: E731
        rows = build() if weights.requires_grad else remembered(weights, "two-sided", build)
        return cls.from_rows(rows, torch.stack(torch.broadcast_tensors(most, -least), -1))

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
                parts.append(LinearInequality.from_rows(_kept(rows), d))
            else:
                return self
        found = parts[0]
        for part in parts[1:]:
            found = found & part
        return found

    def _bounds(self, single: np.ndarray) -> Box:
        """Rows of one variable as bounds."""
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
        twin = object.__new__(type(self))
        twin.__dict__ = {**self.__dict__, "d": self.d.to(*args, **kwargs)}
        return twin

    def __repr__(self) -> str:
        return f"LinearInequality(rows={self.prepared.map.row_count}, variables={self.variables})"


class Profiles(Constraint):
    """A constraint on each of some consecutive profiles, of any width unless one is known."""

    slices: int
    width: int | None = None

    @property
    def variables(self) -> int | None:
        """The number of all points, any if the width is not known."""
        return None if self.width is None else self.slices * self.width

    def of_width(self, width: int) -> Self:
        """The same for profiles of so many points."""
        twin = copy.copy(self)
        twin.width = width
        return twin

    def _set_slices(self, slices: int) -> None:
        if slices < 1:
            raise ParameterError(
                f"{type(self).__name__} got slices={slices}.", "There is at least one profile.", "Pass slices >= 1."
            )
        self.slices = slices


class Monotone(Profiles):
    """``u_i <= u_(i+1)`` (increasing) or ``u_i >= u_(i+1)`` (decreasing), along a profile or each slice of a field.

    Args:
        direction: ``"increasing"`` or ``"decreasing"``.
        slices: Number of consecutive profiles that the variables hold; see ``per_slice``.
    """

    def __init__(self, direction: str = "increasing", slices: int = 1) -> None:
        check_choice("direction", direction, ("increasing", "decreasing"))
        self.direction = direction
        self._set_slices(slices)

    @property
    def algorithm(self) -> str:
        return "pool adjacent violators"

    @property
    def sign(self) -> int:
        """1 if increasing."""
        return 1 if self.direction == "increasing" else -1

    def excess(self, u: Tensor) -> Tensor:
        return (-self.sign * profiles(u, self.slices).diff(dim=-1)).flatten(-2)

    def excess_scale(self, u: Tensor) -> Tensor:
        size = profiles(u, self.slices).abs()
        return (size[..., 1:] + size[..., :-1]).flatten(-2)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self

    def __repr__(self) -> str:
        return f"Monotone({self.direction!r}{_slices(self.slices)})"


class Simplex(Profiles):
    """``u >= 0`` and ``sum(u) = total``, along a profile or along each slice of a field.

    Args:
        total: A number or (*batch,); with slices (*batch, slices).
        slices: Number of consecutive profiles that the variables hold.
    """

    def __init__(self, total: Any = 1.0, slices: int = 1) -> None:
        self.total = reals("The total of the simplex", total)
        self._set_slices(slices)
        if checking():
            check_finite("The total of the simplex", self.total)
            if bool((self.total < 0).any()):
                at = tuple(int(i) for i in (self.total < 0).nonzero()[0])
                where = f" in batch element {at}" if at else ""
                raise InfeasibleError(
                    f"The total of the simplex is {float(self.total.min()):.6g}{where}.",
                    "Non-negative numbers cannot add up to a negative one.",
                    "Give a total of at least 0.",
                )

    @property
    def algorithm(self) -> str:
        return "a search for one multiplier per slice"

    def resolve(self, n: int) -> Constraint:
        from probhard.constraints.slices import per_slice  # it lifts every kind of constraint

        width = profile_width(n, self.slices)
        row = Conservation(_ones(width), self.total)
        return (row if self.slices == 1 else per_slice(row, (self.slices, width))) & NonNegative()

    def residual(self, u: Tensor) -> Tensor:
        return profiles(u, self.slices).sum(-1) - self._totals(u)

    def scale(self, u: Tensor) -> Tensor:
        return profiles(u, self.slices).abs().sum(-1) + self._totals(u).abs()

    def excess(self, u: Tensor) -> Tensor:
        return -u

    def excess_scale(self, u: Tensor) -> Tensor:
        return u.abs()

    def linear_part(self) -> Constraint:
        raise ParameterError(
            "A Simplex does not know its number of variables before it is used.",
            "ProbConserv projects on its linear equality alone.",
            "Write Conservation(torch.ones(n), total) & NonNegative().",
        )

    def to(self, *args: Any, **kwargs: Any) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__ = {**self.__dict__, "total": self.total.to(*args, **kwargs)}
        return twin

    def _totals(self, u: Tensor) -> Tensor:
        return self.total.to(u).unsqueeze(-1) if self.slices == 1 else self.total.to(u)

    def __repr__(self) -> str:
        total = f"{float(self.total):g}" if self.total.numel() == 1 else f"{tuple(self.total.shape)} values"
        return f"Simplex(total={total}{_slices(self.slices)})"


def profiles(u: Tensor, slices: int) -> Tensor:
    """U (*batch, n) as (*batch, slices, n / slices)."""
    return u.unflatten(-1, (slices, profile_width(u.shape[-1], slices)))


def profile_width(n: int, slices: int) -> int:
    """Points of each profile."""
    if n % slices:
        raise ShapeError(
            f"{n} variables do not divide into {slices} slices.",
            "Fields flatten time-major, n = nt * nx.",
            "Check the shape that was given to per_slice.",
        )
    return n // slices


_ONES: dict[int, Tensor] = {}


def _ones(width: int) -> Tensor:
    """One tensor per width, so that what is made from it is remembered."""
    if width not in _ONES:
        _ONES[width] = torch.ones(width, dtype=torch.float64)
    return _ONES[width]


def _slices(slices: int) -> str:
    return "" if slices == 1 else f", slices={slices}"


def _rows_of(matrix: Any) -> PreparedRows:
    if not isinstance(matrix, Tensor):
        return PreparedRows(sp.csr_array(matrix))
    if matrix.layout != torch.strided:
        return remembered(matrix, "inequality", lambda: PreparedRows(scipy_from_sparse(matrix)))
    if matrix.requires_grad or matrix.dim() > 2 or not checking():
        if checking():
            check_finite("The matrix G", matrix)
        return PreparedRows(matrix)
    build = lambda: PreparedRows(sp.csr_array(matrix.cpu().double().numpy()))  # noqa: E731
    return remembered(matrix, "inequality", build)


def _kept(rows: PreparedRows) -> PreparedRows:
    """The rows of more than one variable, made ready once."""
    if "_several" not in vars(rows):
        assert rows.matrix is not None
        vars(rows)["_several"] = PreparedRows(sp.csr_array(rows.matrix[rows.rest]))
    return vars(rows)["_several"]


def _chain(matrix: sp.csr_array) -> str | None:
    """The direction of rows that say that neighbours are ordered, all of them; None for other rows."""
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
