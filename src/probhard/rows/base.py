"""The two abstractions of this folder: a structure of A, and a factor of ``A W A^T`` for one diagonal W.

A ``Structure`` knows the pattern of A and chooses nothing; a ``Factor`` holds the work that depends on W and
answers ``(A W A^T)^-1 r`` and ``diag(P S P^T)`` with ``P = I - W A^T (A W A^T)^-1 A``.
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self, cast

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor
from torch.autograd import forward_ad

from probhard._util import jit
from probhard._util.tensors import checking
from probhard.laws.covariance import matvec, safe_sqrt
from probhard.rows._kernels import sparse as kernels

COMPRESSED = 10_000  # entries times points from which a product with compressed rows is faster
SQUARED_LIMIT = 640  # variables up to which a product with all squared entries of P is faster than a recursion
POINTS = 8  # ... if there are at least n / POINTS points
CACHES = ("_copies", "_compressed_rows", "_sizes")  # attributes that belong to one dtype and device


def plain(x: Tensor) -> bool:
    """Whether the numbers of x may leave torch: on a CPU, outside compile, torch.func and forward-mode derivatives."""
    if x.device.type != "cpu" or not checking() or forward_ad._current_level >= 0:
        return False
    return not torch._C._functorch.is_legacy_batchedtensor(x)  # of autograd.grad(..., is_grads_batched=True)


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient that is 0, with gradient 0, where the denominator is 0."""
    regular = denominator > 0
    return torch.where(regular, numerator / torch.where(regular, denominator, 1.0), 0.0)


def segment_sum(x: Tensor, segment: Tensor, count: int) -> Tensor:
    """Sums of x (..., k) over equal entries of ``segment`` (k,), as (..., count)."""
    return x.new_zeros(*x.shape[:-1], count).index_add(-1, segment, x)


def columns_of(product: Callable[[Tensor], Tensor], size: int, like: Tensor) -> Tensor:
    """The matrix (*batch, p, size) of a product; ``like`` (*batch, ...) gives batch dimensions, dtype and device."""
    identity = torch.eye(size, dtype=like.dtype, device=like.device)
    return product(identity.reshape(size, *[1] * (like.dim() - 1), size)).movedim(0, -1)


class OnDevice:
    """Tensors held as attributes, with one cached copy per dtype and device."""

    def at(self, like: Tensor) -> Self:
        """This object with its floating tensors in the dtype, and all tensors on the device, of ``like``."""
        copies = self.__dict__.setdefault("_copies", {})
        key = (like.dtype, like.device)
        if key in copies:
            return copies[key]
        moved = {name: _move(value, like) for name, value in vars(self).items() if name not in CACHES}
        twin = self
        if any(moved[name] is not vars(self)[name] for name in moved):
            twin = copy.copy(self)
            twin.__dict__ = moved
        if checking():  # tensors of a traced graph must not outlive it
            copies[key] = twin
        return twin


def _move(value: Any, like: Tensor) -> Any:
    """A tensor, a part or a tuple of parts moved to ``like``; anything else, and what is there already, as it is."""
    if isinstance(value, Tensor):
        return _cast(value, like)
    if isinstance(value, OnDevice):
        return value.at(like)
    if isinstance(value, tuple) and value and isinstance(value[0], OnDevice):
        parts = tuple(part.at(like) for part in value)
        return value if all(a is b for a, b in zip(parts, value)) else parts
    return value


def _cast(x: Tensor, like: Tensor) -> Tensor:
    dtype = like.dtype if x.is_floating_point() else x.dtype
    return x if x.dtype == dtype and x.device == like.device else x.to(like.device, dtype)


class Factor(ABC):
    """``A W A^T`` made ready to solve with, for one (batched) diagonal W."""

    structure: Structure
    weight: Tensor  # (*batch, n)

    @abstractmethod
    def solve(self, r: Tensor) -> Tensor:
        """``(A W A^T)^-1 r`` for r (*samples, *batch, q)."""

    def project(self, z: Tensor, b: Tensor) -> Tensor:
        """The nearest point to z (*samples, *batch, n) with ``A u = b``."""
        pull = self.structure.transpose(self.solve(self.structure.apply(z) - b))
        return torch.addcmul(z, self.weight, pull, value=-1)

    def moments(self, z: Tensor, b: Tensor, s: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The projected point and the root of the projected variances, together; see ``variance`` for s."""
        return self.project(z, b), self.scale(s)

    def scale(self, s: Tensor | None = None) -> Tensor:
        """The root of the projected variances; see ``variance`` for s."""
        return safe_sqrt(self.variance(s))

    @property
    def conditioned(self) -> bool:
        """Whether rounding grows with the range of the weights, so that points want a check."""
        return self.structure.double

    def quick_scale(self, s: Tensor) -> Tensor | None:
        """``scale`` in the dtype of s by one product with ``P * P``, where W is fixed and enough points share it."""
        n, structure = self.structure.variables, self.structure
        fixed = self.weight.dim() == 1 and not self.weight.requires_grad and structure.constant
        if not fixed or n > SQUARED_LIMIT or not plain(s) or POINTS * s.numel() < n * n:
            return None
        made = self.__dict__.setdefault("_squares", {})
        if s.dtype not in made:
            made[s.dtype] = self.squared_entries().to(s.dtype)
        return safe_sqrt(s @ made[s.dtype])

    def squared_entries(self) -> Tensor:
        """``P * P`` transposed, (n, n) in float64: an entry that is small next to 1 may meet a large variance."""
        weight = self.weight.double()
        factor = self if weight is self.weight else self.structure.at(weight).factor(weight)
        identity = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        images = factor.project(identity, weight.new_zeros(self.structure.row_count))
        return torch.where(images.abs() < 1e-14, 0.0, images.square())

    @abstractmethod
    def variance(self, s: Tensor | None = None) -> Tensor:
        """``diag(P diag(s) P^T)`` for s (*batch, n); None is the oblique case, s = W, which has shorter formulas."""

    @abstractmethod
    def pivots(self) -> Tensor:
        """Numbers (*batch, k) that are all positive exactly when ``A W A^T`` is regular."""


class Structure(OnDevice, ABC):
    """A q x n matrix A of known pattern."""

    row_count: int
    variables: int
    double = False  # whether float32 input is solved in float64

    @property
    def batch_dims(self) -> int:
        """Number of batch dimensions of A itself."""
        return 0

    @property
    def constant(self) -> bool:
        """Whether A is one fixed matrix, so that a factor for W = I may be kept."""
        return True

    @property
    @abstractmethod
    def algorithm(self) -> str:
        """What is done with this pattern, in a few words."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """``A x`` for x (..., n)."""

    @abstractmethod
    def transpose(self, y: Tensor) -> Tensor:
        """``A^T y`` for y (..., q)."""

    @abstractmethod
    def factor(self, weight: Tensor) -> Factor:
        """Factor of ``A diag(weight) A^T`` for weight (*batch, n)."""

    @abstractmethod
    def dense(self) -> Tensor:
        """A itself, (*batch, q, n)."""

    @abstractmethod
    def magnitude(self, x: Tensor) -> Tensor:
        """``|A| |x|``, the scale against which a residual is rounding."""


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
            kernels.multiply(*(part.numpy() for part in parts))
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


class Mapped(Structure):
    """A structure whose rows are applied by a map of all their entries."""

    map: SparseMap | DenseMap

    def __init__(self, entries: SparseMap | DenseMap) -> None:
        self.map = entries
        self.row_count, self.variables = entries.row_count, entries.variables

    def apply(self, x: Tensor) -> Tensor:
        return self.map.apply(x)

    def transpose(self, y: Tensor) -> Tensor:
        return self.map.transpose(y)

    def dense(self) -> Tensor:
        return self.map.dense()

    def magnitude(self, x: Tensor) -> Tensor:
        return self.map.magnitude(x)
