"""A as a linear map: by its entries, with compiled products for large ones, or as a dense matrix."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util import jit
from probhard._util.tensors import CACHES, OnDevice, checking, matvec, plain, rows_of, segment_sum
from probhard.rows._kernels.lanes import LANES, Index, Numbers, load, product, store

COMPRESSED = 10_000  # with at least this many entries times points, compressed rows are faster


class SparseMap(OnDevice):
    """A sparse matrix by its entries: ``apply`` and ``transpose`` gather, multiply and add.

    On a CPU, large products use compiled loops or compressed rows.

    Args:
        matrix: A, (q, n).
    """

    def __init__(self, matrix: sp.spmatrix) -> None:
        entries = sp.coo_array(matrix)
        self.row_count, self.variables = entries.shape
        self.row = torch.from_numpy(entries.coords[0].astype(np.int64))
        self.column = torch.from_numpy(entries.coords[1].astype(np.int64))
        self.value = torch.from_numpy(entries.data.astype(np.float64))

    def apply(self, x: Tensor) -> Tensor:
        """``A x``, (..., q), for x (..., n)."""
        if self._large(x):
            return cast(Tensor, _Compressed.apply(x, self, False))
        return segment_sum(x.index_select(-1, self.column) * self.value, self.row, self.row_count)

    def transpose(self, y: Tensor) -> Tensor:
        """``A^T y``, (..., n), for y (..., q)."""
        if self._large(y):
            return cast(Tensor, _Compressed.apply(y, self, True))
        return segment_sum(y.index_select(-1, self.row) * self.value, self.column, self.variables)

    def dense(self) -> Tensor:
        """A, (*batch, q, n)."""
        return rows_of(self.transpose, self.row_count, self.value)

    def magnitude(self, x: Tensor) -> Tensor:
        """``|A| |x|``, (..., q), for x (..., n): residuals that are small next to it are rounding errors."""
        return self._with("_sizes", torch.abs).apply(x.abs())

    def squared(self, x: Tensor) -> Tensor:
        """``(A * A) x``, (..., q), for x (..., n): the product with the squared entries."""
        return self._with("_squares", torch.square).apply(x)

    def local(self, shape: tuple[int, ...]) -> Any:
        """Rows as functionals of fields on a grid, by the boxes of points that they touch: ``LocalFunctionals``."""
        from probhard.rows.boxes import LocalFunctionals  # it imports this module

        return LocalFunctionals.of(self, shape)

    def _with(self, name: str, function: Callable[[Tensor], Tensor]) -> SparseMap:
        """The map with a function of its entries, cached under a name if A is constant."""
        known = self.__dict__.get(name)
        if known is None:
            known = copy.copy(self)
            for cache in CACHES:
                known.__dict__.pop(cache, None)
            known.value = function(self.value)
            if checking() and not known.value.requires_grad:
                self.__dict__[name] = known
        return known

    def _large(self, x: Tensor) -> bool:
        """Whether the product is large enough for compiled loops or compressed rows."""
        if self.value.dim() > 1 or self.value.requires_grad or x.dtype != self.value.dtype or not plain(x):
            return False  # first, since comparing sizes would fix a dynamic one
        return len(self.value) * x.numel() >= COMPRESSED * max(1, x.shape[-1])

    def compressed(self, transposed: bool) -> Tensor:
        """Compressed rows (CSR) of A, or of its transpose if ``transposed``."""
        cache = self.__dict__.setdefault("_compressed_rows", {})
        if transposed not in cache:
            at = (self.column, self.row) if transposed else (self.row, self.column)
            shape = (self.variables, self.row_count) if transposed else (self.row_count, self.variables)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch calls compressed tensors a beta feature
                cache[transposed] = (
                    torch.sparse_coo_tensor(torch.stack(at), self.value, shape).coalesce().to_sparse_csr()
                )
        return cache[transposed]


class _Compressed(torch.autograd.Function):
    """A product by compiled loops or compressed rows; its adjoint is the product with the transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: SparseMap, transposed: bool) -> Tensor:
        ctx.matrix, ctx.transposed = matrix, transposed
        flat = x.reshape(-1, x.shape[-1])
        if jit.AVAILABLE:
            at, size = (
                ((matrix.column, matrix.row), matrix.variables)
                if transposed
                else ((matrix.row, matrix.column), matrix.row_count)
            )
            out = x.new_empty(len(flat), size)
            arrays = (*at, matrix.value, flat.detach().contiguous(), out)
            multiply(*(array.numpy() for array in arrays))
            return out.reshape(*x.shape[:-1], -1)
        return (matrix.compressed(transposed) @ flat.mT).mT.contiguous().reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.matrix.apply(gradient) if ctx.transposed else ctx.matrix.transpose(gradient), None, None


class DenseMap(OnDevice):
    """A dense, possibly batched matrix.

    Args:
        matrix: A, (*batch, q, n).
    """

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.row_count, self.variables = matrix.shape[-2:]

    def apply(self, x: Tensor) -> Tensor:
        """``A x``, (..., q), for x (..., n)."""
        return matvec(self.matrix, x)

    def transpose(self, y: Tensor) -> Tensor:
        """``A^T y``, (..., n), for y (..., q)."""
        return matvec(self.matrix.mT, y)

    def dense(self) -> Tensor:
        """A, (*batch, q, n)."""
        return self.matrix

    def magnitude(self, x: Tensor) -> Tensor:
        """``|A| |x|``, (..., q), for x (..., n): residuals that are small next to it are rounding errors."""
        return matvec(self.matrix.abs(), x.abs())

    def squared(self, x: Tensor) -> Tensor:
        """``(A * A) x``, (..., q), for x (..., n): the product with the squared entries."""
        return matvec(self.matrix.square(), x)


@jit.compiled
def multiply(row: Index, column: Index, value: Numbers, x: Numbers, out: Numbers) -> None:
    """Write ``A x`` for points x (batch, n) into ``out`` (batch, q); row, column and value list the entries of A."""
    lanes = min(LANES, x.shape[0])
    points, images = np.empty((x.shape[1], lanes), x.dtype), np.empty((out.shape[1], lanes), x.dtype)
    for first in range(0, x.shape[0], lanes):
        load(x, first, points)
        images[:] = 0
        product(row, column, value, points, images)
        store(images, first, out)


def arrays_of(matrix: sp.csr_array) -> dict[str, np.ndarray]:
    """A sparse matrix as plain arrays."""
    return {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr, "shape": np.array(matrix.shape)}


def matrix_of(arrays: Mapping[str, np.ndarray]) -> sp.csr_array:
    """The inverse of ``arrays_of``."""
    data, indices, indptr, shape = (arrays[name] for name in ("data", "indices", "indptr", "shape"))
    return sp.csr_array((data, indices, indptr), shape=tuple(int(size) for size in shape))
