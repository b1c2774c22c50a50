"""A as a linear map: by its entries, with compiled products for large ones, or as a dense matrix."""

from __future__ import annotations

import copy
import warnings
from typing import Any, cast

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util import jit
from probhard._util.tensors import CACHES, OnDevice, checking, columns_of, matvec, plain, segment_sum
from probhard.rows._kernels.lanes import LANES, Index, Numbers, load, product, store

COMPRESSED = 10_000  # entries times points from which a product with compressed rows is faster


class SparseMap(OnDevice):
    """A sparse matrix by its entries: ``apply`` and ``transpose`` gather, multiply and add.

    On a CPU, large products are taken with compressed rows instead.
    """

    def __init__(self, matrix: sp.spmatrix) -> None:
        entries = sp.coo_array(matrix)
        self.row_count, self.variables = entries.shape
        self.row = torch.from_numpy(entries.coords[0].astype(np.int64))
        self.column = torch.from_numpy(entries.coords[1].astype(np.int64))
        self.value = torch.from_numpy(entries.data.astype(np.float64))

    def apply(self, x: Tensor) -> Tensor:
        """``A x`` for x (..., n)."""
        if self._large(x):
            return cast(Tensor, _Compressed.apply(x, self, False))
        return segment_sum(x.index_select(-1, self.column) * self.value, self.row, self.row_count)

    def transpose(self, y: Tensor) -> Tensor:
        """``A^T y`` for y (..., q)."""
        if self._large(y):
            return cast(Tensor, _Compressed.apply(y, self, True))
        return segment_sum(y.index_select(-1, self.row) * self.value, self.column, self.variables)

    def dense(self) -> Tensor:
        """A itself, (*batch, q, n)."""
        return columns_of(self.apply, self.variables, self.value)

    def magnitude(self, x: Tensor) -> Tensor:
        """``|A| |x|``, the scale against which a residual is rounding."""
        sizes = self.__dict__.get("_sizes")
        if sizes is None:
            sizes = copy.copy(self)
            for name in CACHES:
                sizes.__dict__.pop(name, None)
            sizes.value = self.value.abs()
            if checking() and not sizes.value.requires_grad:
                self.__dict__["_sizes"] = sizes
        return sizes.apply(x.abs())

    def _large(self, x: Tensor) -> bool:
        """Whether the product is worth a compressed copy of the fixed matrix."""
        if self.value.dim() > 1 or self.value.requires_grad or x.dtype != self.value.dtype or not plain(x):
            return False  # before sizes are compared, which would fix a dynamic one
        return len(self.value) * x.numel() >= COMPRESSED * max(1, x.shape[-1])

    def compressed(self, turned: bool) -> Tensor:
        """Compressed rows of A, or of its transpose."""
        made = self.__dict__.setdefault("_compressed_rows", {})
        if turned not in made:
            at = (self.column, self.row) if turned else (self.row, self.column)
            shape = (self.variables, self.row_count) if turned else (self.row_count, self.variables)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch calls compressed tensors a beta feature
                made[turned] = torch.sparse_coo_tensor(torch.stack(at), self.value, shape).coalesce().to_sparse_csr()
        return made[turned]


class _Compressed(torch.autograd.Function):
    """A product with compressed rows; its adjoint is the product with the transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: SparseMap, turned: bool) -> Tensor:
        ctx.matrix, ctx.turned = matrix, turned
        flat = x.reshape(-1, x.shape[-1])
        if jit.AVAILABLE:
            at, size = (
                ((matrix.column, matrix.row), matrix.variables)
                if turned
                else ((matrix.row, matrix.column), matrix.row_count)
            )
            out = x.new_empty(len(flat), size)
            parts = (*at, matrix.value, flat.detach().contiguous(), out)
            multiply(*(part.numpy() for part in parts))
            return out.reshape(*x.shape[:-1], -1)
        return (matrix.compressed(turned) @ flat.mT).mT.contiguous().reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.matrix.apply(gradient) if ctx.turned else ctx.matrix.transpose(gradient), None, None


class DenseMap(OnDevice):
    """A dense, possibly batched matrix."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix  # (*batch, q, n)
        self.row_count, self.variables = matrix.shape[-2:]

    def apply(self, x: Tensor) -> Tensor:
        """``A x`` for x (..., n)."""
        return matvec(self.matrix, x)

    def transpose(self, y: Tensor) -> Tensor:
        """``A^T y`` for y (..., q)."""
        return matvec(self.matrix.mT, y)

    def dense(self) -> Tensor:
        """A itself, (*batch, q, n)."""
        return self.matrix

    def magnitude(self, x: Tensor) -> Tensor:
        """``|A| |x|``, the scale against which a residual is rounding."""
        return matvec(self.matrix.abs(), x.abs())


@jit.compiled
def multiply(row: Index, column: Index, value: Numbers, x: Numbers, out: Numbers) -> None:
    """Write ``A x`` for points x (batch, n) into ``out`` (batch, q), A by its entries."""
    lanes = min(LANES, x.shape[0])
    points, images = np.empty((x.shape[1], lanes), x.dtype), np.empty((out.shape[1], lanes), x.dtype)
    for first in range(0, x.shape[0], lanes):
        load(x, first, points)
        images[:] = 0
        product(row, column, value, points, images)
        store(images, first, out)
