"""Base classes: the structure of A, and a factor of ``A W A^T`` for one diagonal W.

A ``Structure`` stores A in a form that fits its pattern. A ``Factor`` holds the work that depends on W. It computes
``(A W A^T)^-1 r`` and ``diag(P S P^T)`` with ``P = I - W A^T (A W A^T)^-1 A``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from probhard._util.tensors import OnDevice, plain, safe_sqrt
from probhard.rows.maps import DenseMap, SparseMap

SQUARED_LIMIT = 640  # up to this many variables a product with the squared entries of P is faster than a recursion
POINTS = 8  # ... for at least n / POINTS points


class Factor(ABC):
    """A factor of ``A W A^T`` for one diagonal W, which may be batched."""

    structure: Structure
    weight: Tensor  # (*batch, n)
    conditioned: ClassVar[bool] = True  # whether rounding grows with the range of the weights: then points are checked

    @abstractmethod
    def solve(self, r: Tensor) -> Tensor:
        """``(A W A^T)^-1 r`` for r (*samples, *batch, q), in the shape of r."""

    def project(self, z: Tensor, b: Tensor) -> Tensor:
        """The nearest point to z with ``A u = b``.

        Args:
            z: Points, (*samples, *batch, n).
            b: Right-hand sides, (..., q).

        Returns:
            ``z - W A^T (A W A^T)^-1 (A z - b)``, (*samples, *batch, n).
        """
        pull = self.structure.transpose(self.solve(self.structure.apply(z) - b))
        return torch.addcmul(z, self.weight, pull, value=-1)

    def moments(self, z: Tensor, b: Tensor, s: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Projected points and standard deviations.

        Args:
            z: Points, (*samples, *batch, n).
            b: Right-hand sides, (..., q).
            s: Variances, as in ``variance``.

        Returns:
            ``project(z, b)`` and ``scale(s)``.
        """
        return self.project(z, b), self.scale(s)

    def scale(self, s: Tensor | None = None) -> Tensor:
        """The root of ``variance(s)``, (*batch, n)."""
        return safe_sqrt(self.variance(s))

    def quick_scale(self, s: Tensor) -> Tensor | None:
        """``scale`` for variances s (*batch, n) by one product with ``P * P``, in the dtype of s.

        Returns:
            None unless W is fixed and enough points share it.
        """
        n, structure = self.structure.variables, self.structure
        fixed = self.weight.dim() == 1 and not self.weight.requires_grad and structure.constant
        if not fixed or n > SQUARED_LIMIT or not plain(s) or POINTS * s.numel() < n * n:
            return None
        cache = self.__dict__.setdefault("_squares", {})
        if s.dtype not in cache:
            cache[s.dtype] = self.squared_entries().to(s.dtype)
        return safe_sqrt(s @ cache[s.dtype])

    def squared_entries(self) -> Tensor:
        """The transpose of ``P * P``, (n, n). In float64, since small entries may multiply large variances."""
        weight = self.weight.double()
        factor = self if weight is self.weight else self.structure.at(weight).factor(weight)
        identity = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        images = factor.project(identity, weight.new_zeros(self.structure.row_count))
        return torch.where(images.abs() < 1e-14, 0.0, images.square())

    @abstractmethod
    def variance(self, s: Tensor | None = None) -> Tensor:
        """``diag(P diag(s) P^T)``, (*batch, n).

        Args:
            s: Variances, (*batch, n). None means s = W, the oblique case, which has shorter formulas.
        """

    def functional_variance(self, functionals: SparseMap, s: Tensor) -> Tensor | None:
        """``diag(F P diag(s) P^T F^T)``, (*batch, k); None if this structure has no formula of its own.

        Args:
            functionals: F, (k, n).
            s: Variances, (*batch, n).
        """
        return None

    @abstractmethod
    def pivots(self) -> Tensor:
        """Numbers (*batch, k) that are all positive if and only if ``A W A^T`` is regular."""


class Structure(OnDevice, ABC):
    """A q x n matrix A, stored in a form that fits its pattern."""

    row_count: int  # q
    variables: int  # n
    double = False  # whether float32 input is solved in float64

    @property
    def batch_dims(self) -> int:
        """Number of batch dimensions of A itself."""
        return 0

    @property
    def constant(self) -> bool:
        """Whether A is one fixed matrix, so that its factor for W = I can be cached."""
        return True

    @property
    @abstractmethod
    def algorithm(self) -> str:
        """Short description of the algorithm for this pattern."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """``A x``, (..., q), for x (..., n)."""

    @abstractmethod
    def transpose(self, y: Tensor) -> Tensor:
        """``A^T y``, (..., n), for y (..., q)."""

    @abstractmethod
    def factor(self, weight: Tensor) -> Factor:
        """Factor of ``A diag(weight) A^T`` for weight (*batch, n)."""

    @abstractmethod
    def dense(self) -> Tensor:
        """A itself, (*batch, q, n)."""

    @abstractmethod
    def magnitude(self, x: Tensor) -> Tensor:
        """``|A| |x|``, (..., q), for x (..., n): residuals that are small next to it are rounding errors."""


class Mapped(Structure):
    """A structure that applies its rows by a map.

    Args:
        entries: A by its entries, or as a dense matrix.
    """

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
