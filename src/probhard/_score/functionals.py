"""Families of linear functionals ``F u``: sums and means of variables, in groups such as scales or levels.

A family is a value. It gives the matrix F (k, n), the group of each functional and the names of the groups, and it can
be saved as plain values. In a training loss every group has the same weight, and a functional f is divided by the sum
of its absolute entries, so that sums count as means do:

    loss(family) = n sum_groups mean_{f in group} CRPS(f . u, f . y) / |f|_1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard.errors import ParameterError, ShapeError
from probhard.rows.maps import SparseMap


class Functionals(ABC):
    """A family of k linear functionals of n variables; ``+`` joins two families."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def labels(self) -> tuple[str, ...]:
        """The name of the group of each functional, k of them."""

    @abstractmethod
    def _matrix(self) -> sp.csr_array:
        """F, (k, n)."""

    @abstractmethod
    def _values(self) -> dict[str, Any]:
        """Plain values from which ``restored`` builds the family again."""

    @classmethod
    @abstractmethod
    def restored(cls, values: Mapping[str, Any]) -> Functionals:
        """The family of these values."""

    @cached_property
    def matrix(self) -> sp.csr_array:
        """F as a scipy matrix, (k, n)."""
        matrix = sp.csr_array(self._matrix(), dtype=np.float64)
        matrix.sum_duplicates()
        return matrix

    @cached_property
    def map(self) -> SparseMap:
        """F as a linear map."""
        return SparseMap(self.matrix)

    @property
    def variables(self) -> int:
        """Number of variables n."""
        return int(self.matrix.shape[1])

    def rows(self, n: int) -> SparseMap:
        """F as a linear map (k, n).

        Args:
            n: Number of variables of the law.

        Raises:
            ShapeError: If the family is for another number of variables.
        """
        if n != self.variables:
            raise ShapeError(
                f"{type(self).__name__} is a family of functionals of {self.variables} variables, the law has {n}.",
                "Every functional has one coefficient per variable.",
                "Build the family for the shape of the event, flattened with its first axis slowest.",
            )
        return self.map

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the groups."""
        return tuple(dict.fromkeys(self.labels))

    @cached_property
    def group(self) -> Tensor:
        """The group of each functional as an index into ``names``, (k,)."""
        index = {name: i for i, name in enumerate(self.names)}
        return torch.tensor([index[label] for label in self.labels], dtype=torch.long)

    @cached_property
    def weight(self) -> Tensor:
        """Weights in a loss, (k,) float64: 1 over the size of the group and over the sum of absolute entries."""
        size = torch.from_numpy(np.asarray(abs(self.matrix).sum(1), dtype=np.float64).ravel())
        return 1 / (size.clamp(min=torch.finfo(torch.float64).tiny) * torch.bincount(self.group)[self.group])

    def variables_of(self, law: Any) -> Tensor | None:
        """The variable of the law that each functional equals, (k,); None if one is a sum.

        Args:
            law: A joint law, which may be one on which sums of variables are variables.
        """
        alone = np.all(np.diff(self.matrix.indptr) == 1) and np.all(self.matrix.data == 1)
        return torch.from_numpy(self.matrix.indices.astype(np.int64)) if alone else None

    def means(self, values: Tensor) -> Tensor:
        """The mean over each group.

        Args:
            values: Values of the functionals, (*batch, k), such as scores or coverages.

        Returns:
            Means, (*batch, number of groups).
        """
        group = self.group.to(values.device)
        sums = values.new_zeros(*values.shape[:-1], len(self.names)).index_add(-1, group, values)
        return sums / torch.bincount(group, minlength=len(self.names)).to(values)

    def record(self) -> dict[str, Any]:
        """Plain values to save, for ``functionals_from_record``."""
        return {"kind": self.kind, **self._values()}

    def __add__(self, other: Functionals) -> Functionals:
        from probhard._score.joined import join  # it imports this module

        return join(self, other) if isinstance(other, Functionals) else NotImplemented


@dataclass(frozen=True, eq=False, init=False)
class Directions(Functionals):
    """Given functionals: the rows of a matrix.

    Args:
        matrix: F, (k, n), dense or sparse, of torch, numpy or scipy.
        names: The name of the group of each row, k of them; None makes all rows one group.

    Raises:
        ShapeError: If F is not a matrix, or there is not one name per row.
        ParameterError: If F has no rows, or entries that are not finite.
    """

    given: sp.csr_array
    row_names: tuple[str, ...]
    kind: ClassVar[str] = "directions"

    def __init__(self, matrix: Any, names: Sequence[str] | None = None) -> None:
        rows = scipy_matrix(matrix)
        labels = ("directions",) * rows.shape[0] if names is None else tuple(map(str, names))
        if len(labels) != rows.shape[0]:
            raise ShapeError(
                f"Directions got {rows.shape[0]} rows and {len(labels)} names.",
                "Each row belongs to the group of its name.",
                "Give one name per row; rows of one group have the same name.",
            )
        object.__setattr__(self, "given", rows)
        object.__setattr__(self, "row_names", labels)

    @property
    def labels(self) -> tuple[str, ...]:
        return self.row_names

    def _matrix(self) -> sp.csr_array:
        return self.given

    def _values(self) -> dict[str, Any]:
        return {**matrix_values(self.given), "labels": list(self.labels)}

    @classmethod
    def restored(cls, values: Mapping[str, Any]) -> Directions:
        return cls(matrix_from_values(values), values["labels"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Directions) and same_matrix(self.given, other.given) and self.labels == other.labels

    def __hash__(self) -> int:
        return hash((self.given.shape, self.given.nnz, self.labels))


def as_map(functionals: Any, n: int) -> SparseMap:
    """F as a linear map (k, n), from a family or a matrix.

    Raises:
        ShapeError, ParameterError: As for ``Directions`` and ``Functionals.rows``.
    """
    if isinstance(functionals, SparseMap):
        return functionals
    family = functionals if isinstance(functionals, Functionals) else Directions(functionals)
    return family.rows(n)


def functional_mask(rows: SparseMap, mask: Tensor | None) -> Tensor | None:
    """Where all variables of a functional are observed, (*batch, k) bool, from a mask (*batch, n)."""
    return None if mask is None else rows.magnitude((~mask).to(rows.value.dtype)) == 0


def scipy_matrix(matrix: Any) -> sp.csr_array:
    """A copy of a matrix (k, n) of torch, numpy or scipy, dense or sparse, in float64; checked."""
    if isinstance(matrix, Tensor):
        matrix = matrix.detach().cpu()
        if matrix.layout != torch.strided and matrix.dim() == 2:
            entries = matrix.to_sparse_coo().coalesce()
            matrix = sp.coo_array((entries.values().double().numpy(), entries.indices().numpy()), tuple(matrix.shape))
        else:
            matrix = matrix.to_dense().double().numpy()
    values = matrix if sp.issparse(matrix) else np.asarray(matrix, dtype=np.float64)
    if values.ndim != 2:
        raise ShapeError(
            f"The functionals have shape {tuple(values.shape)}.",
            "They are the rows of one matrix (k, n), shared by all batch elements.",
            "Pass one row per functional, with one coefficient per variable.",
        )
    rows = sp.csr_array(values, dtype=np.float64, copy=True)
    rows.sum_duplicates()
    rows.eliminate_zeros()
    if rows.shape[0] == 0 or not np.isfinite(rows.data).all():
        raise ParameterError(
            f"The matrix of functionals, {rows.shape}, has no rows, or NaN or infinite entries.",
            "Every functional is a sum of variables with finite coefficients.",
            "Pass at least one row of finite numbers.",
        )
    return rows


def matrix_values(matrix: sp.csr_array) -> dict[str, Any]:
    """The entries of a matrix as plain lists."""
    entries = sp.coo_array(matrix)
    row, column = (index.tolist() for index in entries.coords)
    return {"shape": list(map(int, matrix.shape)), "row": row, "column": column, "value": entries.data.tolist()}


def matrix_from_values(values: Mapping[str, Any]) -> sp.csr_array:
    """The matrix whose entries ``matrix_values`` returned."""
    at = (np.asarray(values["row"], dtype=np.int64), np.asarray(values["column"], dtype=np.int64))
    return sp.csr_array((np.asarray(values["value"], dtype=np.float64), at), shape=tuple(values["shape"]))


def same_matrix(first: sp.csr_array, second: sp.csr_array) -> bool:
    """Whether two matrices have the same shape and entries, each stored once and in order."""
    if first is second:
        return True
    parts = ("indptr", "indices", "data")
    return first.shape == second.shape and all(np.array_equal(getattr(first, p), getattr(second, p)) for p in parts)
