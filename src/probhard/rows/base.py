"""The two abstractions of this room: a structure of A, and a factor of ``A W A^T`` for one diagonal W.

A ``Structure`` knows the pattern of A and chooses nothing; a ``Factor`` holds the work that depends on W and
answers ``(A W A^T)^-1 r`` and ``diag(P S P^T)`` with ``P = I - W A^T (A W A^T)^-1 A``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from probhard._util.tensors import OnDevice, plain, safe_sqrt
from probhard.rows.maps import DenseMap, SparseMap

SQUARED_LIMIT = 640  # variables up to which a product with all squared entries of P is faster than a recursion
POINTS = 8  # ... if there are at least n / POINTS points


class Factor(ABC):
    """``A W A^T`` made ready to solve with, for one (batched) diagonal W."""

    structure: Structure
    weight: Tensor  # (*batch, n)
    conditioned: ClassVar[bool] = (
        True  # whether rounding grows with the range of the weights, so that points want a check
    )

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
