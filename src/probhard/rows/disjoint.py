"""Rows over disjoint variables: everything is elementwise, O(n).

With one row per group of variables, ``A W A^T`` is the diagonal ``m_r = sum_i w_i a_i^2``, the gain is
``k_i = w_i a_i / m_r`` and, with ``T_r = sum_i a_i^2 s_i``,

    diag(P S P^T)_i = s_i (1 - k_i a_i)^2 + k_i^2 (T_r - a_i^2 s_i),

a sum of squares. For W = S it is ``w_i (1 - k_i a_i)``. The part f of a functional within one row has the variance

    sum_i f_i^2 s_i - 2 g h + g^2 T_r,      g = sum_i f_i k_i,      h = sum_i f_i a_i s_i,

and parts of different rows are uncorrelated. What is left below the rounding of these terms is 0: the row fixes it.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util.tensors import broadcast, checking, divide, rows_of, segment_sum
from probhard.rows._kernels.moments import FixedMoments, ObliqueMoments
from probhard.rows.base import Factor, Structure
from probhard.rows.maps import SparseMap
from probhard.rows.split import SplitFunctionals

ROUNDING = {torch.float64: 1e-12, torch.float32: 3e-6}  # variances of functionals below this share of their terms are 0


class DisjointRows(Structure):
    """Rows without shared variables; variables in no row have coefficient 0.

    Args:
        coefficient: (n,), or (width,) shared by all blocks, or (*batch, n).
        row_count: Number of rows q.
        group: The row of each variable, (n,). None if the rows are equal consecutive blocks (a field's time slices);
            then sums and broadcasts are plain views.
    """

    def __init__(self, coefficient: Tensor, row_count: int, group: Tensor | None = None) -> None:
        self.coefficient = coefficient
        self.group = group
        self.row_count = row_count
        self.width = coefficient.shape[-1]
        self.shared = False
        self.variables = self.width

    @classmethod
    def blocks(cls, weights: Tensor, row_count: int) -> DisjointRows:
        """``row_count`` consecutive blocks of variables, each with the same weights (width,)."""
        structure = cls(weights, row_count)
        structure.shared = True
        structure.variables = row_count * weights.shape[-1]
        return structure

    @classmethod
    def from_matrix(cls, matrix: sp.csr_array) -> DisjointRows:
        """Rows (q, n) from a sparse matrix with at most one entry in each column."""
        rows, variables = matrix.shape
        coefficient, group = np.zeros(variables), np.zeros(variables, dtype=np.int64)
        entries = matrix.tocoo()
        coefficient[entries.coords[1]] = entries.data
        group[entries.coords[1]] = entries.coords[0]
        regular = variables % rows == 0 and np.array_equal(entries.coords[0], entries.coords[1] // (variables // rows))
        return cls(torch.from_numpy(coefficient), rows, None if regular else torch.from_numpy(group))

    @property
    def batch_dims(self) -> int:
        return self.coefficient.dim() - 1

    @property
    def constant(self) -> bool:
        return self.batch_dims == 0 and not self.coefficient.requires_grad

    @property
    def algorithm(self) -> str:
        return f"disjoint rows ({self.row_count}), elementwise"

    def groups(self) -> Tensor:
        """The row of each variable, (n,); 0 for variables in no row."""
        if self.group is not None:
            return self.group
        row = torch.arange(self.row_count, device=self.coefficient.device)
        return row.repeat_interleave(self.variables // self.row_count)

    def sums(self, x: Tensor) -> Tensor:
        """Row sums (..., q) of x, which has the layout of ``split``."""
        return x.sum(-1) if self.group is None else segment_sum(x, self.group, self.row_count)

    def weighted_sums(self, x: Tensor, coefficient: Tensor) -> Tensor:
        """Row sums (..., q) of ``coefficient * x`` for x (..., n); one matrix-vector product if shared."""
        if self.shared:
            return self.split(x) @ coefficient
        return self.sums(self.split(x * coefficient))

    def spread(self, y: Tensor) -> Tensor:
        """Row values y (..., q) at each variable, in a shape that broadcasts with ``split``."""
        return y.unsqueeze(-1) if self.group is None else y.index_select(-1, self.group)

    def split(self, x: Tensor) -> Tensor:
        """View x (..., n) as (..., q, width) for blocks; otherwise leave it as it is."""
        return x.unflatten(-1, (self.row_count, -1)) if self.group is None else x

    def join(self, x: Tensor) -> Tensor:
        """Undo ``split``: x (..., q, width) as (..., n) for blocks."""
        return x.flatten(-2) if self.group is None else x

    def split_coefficient(self) -> Tensor:
        """The coefficients in the layout of ``split``."""
        return self.coefficient if self.shared else self.split(self.coefficient)

    def apply(self, x: Tensor) -> Tensor:
        return self.weighted_sums(x, self.coefficient)

    def transpose(self, y: Tensor) -> Tensor:
        return self.join(self.split_coefficient() * self.spread(y))

    def dense(self) -> Tensor:
        return rows_of(self.transpose, self.row_count, self.coefficient)

    def magnitude(self, x: Tensor) -> Tensor:
        absolute = self.__dict__.get("_sizes")
        if absolute is None:
            absolute = self.coefficient.abs()
            if checking() and self.constant:
                self.__dict__["_sizes"] = absolute
        return self.weighted_sums(x.abs(), absolute)

    def factor(self, weight: Tensor) -> DisjointFactor:
        return DisjointFactor(self, weight)

    def oblique_moments(self, z: Tensor, weight: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The moments for W = S, by formulas that can be differentiated twice.

        Args:
            z: Points in blocks, (..., q, width).
            weight: Weights in blocks, (..., q, width).
            b: Right-hand sides, (..., q).

        Returns:
            Projected points and standard deviations, (..., q, width).
        """
        factor = self.factor(self.join(weight))
        mean, scale = Factor.moments(factor, self.join(z), b)
        return self.split(mean), self.split(scale)


class DisjointFactor(Factor):
    """The diagonal ``A W A^T``."""

    conditioned = False

    structure: DisjointRows

    def __init__(self, structure: DisjointRows, weight: Tensor) -> None:
        self.structure, self.weight = structure, weight
        self.mass = structure.weighted_sums(weight, structure.coefficient.square())  # (*batch, q)

    def solve(self, r: Tensor) -> Tensor:
        return divide(r, self.mass)

    def variance(self, s: Tensor | None = None) -> Tensor:
        rows, a = self.structure, self.structure.split_coefficient()
        mass = rows.spread(torch.where(self.mass > 0, self.mass, 1.0))
        moved = rows.split(self.weight) * a.square()
        stay = (mass - moved).clamp(min=0) / mass  # exactly 0 if no other variable of the row can move
        if s is None:
            return rows.join(rows.split(self.weight) * stay)
        own = rows.split(s) * a.square()
        others = (rows.spread(rows.sums(own)) - own).clamp(min=0)
        gain = rows.split(self.weight) * (a / mass)
        return rows.join(rows.split(s) * stay.square() + gain.square() * others)

    def functional_variance(self, functionals: SparseMap, s: Tensor) -> Tensor | None:
        rows = self.structure
        parts = SplitFunctionals.of(functionals.at(s), rows.groups(), rows.row_count)
        a = rows.transpose(self.mass.new_ones(rows.row_count))  # (*batch of A, n)
        gain = divide(parts.map.apply(self.weight * a), self.mass.index_select(-1, parts.row))
        inner = rows.weighted_sums(s, rows.coefficient.square()).index_select(-1, parts.row)
        own, cross, pushed = parts.map.squared(s), 2 * gain * parts.map.apply(s * a), gain.square() * inner
        variance = own - cross + pushed
        floor = ROUNDING[variance.dtype] * (own + cross.abs() + pushed).detach()
        return parts.add_up(torch.where(variance > floor, variance, 0.0))

    def moments(self, z: Tensor, b: Tensor, s: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rows, spread = self.structure, self.weight if s is None else s
        fixed = self.weight.dim() == 1 and not self.weight.requires_grad
        trained = rows.coefficient.requires_grad  # the fused adjoints treat the rows as constants
        if trained or not (rows.shared and checking() and (s is None or fixed)):
            return super().moments(z, b, s)
        shape = broadcast(z.shape, spread.shape, (*b.shape[:-1], z.shape[-1]))
        blocks = rows.split(z.expand(shape)), rows.split(spread.expand(shape)), b.expand(*shape[:-1], rows.row_count)
        if s is None:
            mean, scale = ObliqueMoments.apply(*blocks, rows.coefficient, rows.oblique_moments)
        else:
            gain = divide(rows.split(self.weight) * rows.coefficient, self.mass.unsqueeze(-1))
            mean, scale = FixedMoments.apply(*blocks, rows.coefficient, gain, self.plain_moments)
        return rows.join(mean), rows.join(scale)

    def plain_moments(self, z: Tensor, s: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """``oblique_moments`` for variances s other than W; z and s are (..., q, width), b is (..., q)."""
        rows = self.structure
        mean, scale = super().moments(rows.join(z), b, rows.join(s))
        return rows.split(mean), rows.split(scale)

    def pivots(self) -> Tensor:
        return self.mass
