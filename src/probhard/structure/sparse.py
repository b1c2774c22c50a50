"""Sparse rows of a fixed pattern: a batched Cholesky factor in rounds, and its selected inverse.

``M = A W A^T = L D L^T`` by the rounds of ``elimination``. Marginal variances need only the entries of
``Z = M^-1`` on the pattern of L (Takahashi's recursion, the rounds in reverse):

    Z_jp = - sum_j' Z_jj' l_j'p,     Z_pp = 1 / d_p - sum_j l_jp Z_jp.

With ``q_i(X) = a_i^T X a_i`` for column i of A, the oblique variance is ``w_i - w_i^2 q_i(Z)``; for another covariance
S it is ``s_i - 2 w_i s_i q_i(Z) + w_i^2 q_i(N)`` with ``N = Z A S A^T Z``, the derivative of ``-Z`` along ``A S A^T``.
"""

from __future__ import annotations

import copy

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from probhard.errors import ParameterError, broadcast
from probhard.structure.base import Factor, Mapped, OnDevice, SparseMap
from probhard.structure.dense import DenseRows, cholesky_solve
from probhard.structure.elimination import Plan, plan_elimination

DENSE_LIMIT = 20_000_000  # entries of A up to which compiled code may hold it densely


class Assembly(OnDevice):
    """The map from weights w to the entries of ``A diag(w) A^T`` and back to the quadratic forms q_i."""

    def __init__(self, matrix: sp.csr_array, plan: Plan) -> None:
        columns = sp.csc_array(matrix)
        place = sp.csr_array(matrix)  # the position of every entry among the rows' entries
        place.data = np.arange(1, place.nnz + 1, dtype=np.float64)
        place = sp.csc_array(place)
        first: list[int] = []
        second: list[int] = []
        variable: list[int] = []
        entry: list[int] = []
        twice: list[float] = []
        for i in range(matrix.shape[1]):
            span = slice(columns.indptr[i], columns.indptr[i + 1])
            rows, at = columns.indices[span].tolist(), (place.data[span] - 1).astype(int).tolist()
            for a, row in enumerate(rows):
                for c, other in enumerate(rows[: a + 1]):
                    variable.append(i)
                    entry.append(plan.entry_of[(row, other) if row < other else (other, row)])
                    first.append(at[a])
                    second.append(at[c])
                    twice.append(1.0 if row == other else 2.0)
        self.variables, self.entries = matrix.shape[1], plan.entries
        self.variable, self.entry = torch.tensor(variable), torch.tensor(entry)
        self.first, self.second = torch.tensor(first), torch.tensor(second)
        self.twice = torch.tensor(twice, dtype=torch.float64)
        self.product = self.form = self.twice
        self.fill(torch.from_numpy(sp.csr_array(matrix).data.astype(np.float64)))

    def fill(self, values: Tensor) -> None:
        """Put in the values (*batch, entries of A) of the rows, sorted by row and column."""
        leading = values.movedim(-1, 0)
        self.product = leading.index_select(0, self.first) * leading.index_select(0, self.second)
        self.form = self.product * lift(self.twice, self.product)

    def assemble(self, weight: Tensor) -> Tensor:
        """Entries (E, *batch) of ``A diag(w) A^T`` for weights (n, *batch)."""
        terms = weight.index_select(0, self.variable) * lift(self.product, weight)
        return gather_sum(terms, self.entry, self.entries)

    def forms(self, entries: Tensor) -> Tensor:
        """``a_i^T X a_i`` (n, *batch) from the entries (E, *batch) of X."""
        terms = entries.index_select(0, self.entry) * lift(self.form, entries)
        return gather_sum(terms, self.variable, self.variables)


class SparseRows(Mapped):
    """A sparse A with a planned elimination of ``A W A^T``."""

    map: SparseMap
    double = True

    def __init__(self, matrix: sp.csr_array, plan: Plan | None = None) -> None:
        super().__init__(SparseMap(matrix))
        self.plan = plan_elimination(matrix) if plan is None else plan
        self.assembly = Assembly(matrix, self.plan)

    def with_values(self, values: Tensor) -> SparseRows:
        """The same pattern with other values (*batch, entries of A)."""
        twin = copy.copy(self)
        twin.map, twin.assembly = copy.copy(self.map), copy.copy(self.assembly)
        for part in (twin, twin.map, twin.assembly):
            part.__dict__.pop("_copies", None)  # they hold the old values
        twin.map.value = values
        twin.assembly.fill(values)
        return twin

    @property
    def batch_dims(self) -> int:
        return self.map.value.dim() - 1

    @property
    def constant(self) -> bool:
        return self.batch_dims == 0 and not self.map.value.requires_grad

    @property
    def algorithm(self) -> str:
        plan = self.plan
        return (
            f"sparse Cholesky of {self.rows} rows, {len(plan.rounds)} rounds, {plan.entries} entries, "
            f"dense block of {len(plan.block)}"
        )

    def factor(self, weight: Tensor) -> Factor:
        if not torch.compiler.is_dynamo_compiling():
            return SparseFactor(self, weight)
        # Inductor (torch 2.13) miscompiles the gathers of the sparse factor in training graphs, without an error.
        if self.rows * self.variables > DENSE_LIMIT:
            raise ParameterError(
                f"torch.compile met a sparse system of {self.rows} rows over {self.variables} variables.",
                "Compiled code gives wrong numbers for its factor, and a dense one would not fit.",
                "Leave the projection out of the compiled region with torch.compiler.disable.",
            )
        return DenseRows(self.dense()).factor(weight)


class SparseFactor(Factor):
    """``L D L^T`` of ``A W A^T``; entries lead here, (E, *batch), so that gathers move whole rows of memory."""

    structure: SparseRows

    def __init__(self, structure: SparseRows, weight: Tensor) -> None:
        self.structure, self.weight = structure, weight
        self.batch = broadcast(weight.shape[:-1], structure.map.value.shape[:-1])
        self.leading = weight.expand(*self.batch, -1).movedim(-1, 0).contiguous()
        self.pivot, self.lower, self.block = _eliminate(structure.plan, structure.assembly.assemble(self.leading))

    def solve(self, r: Tensor) -> Tensor:
        plan = self.structure.plan
        batch = broadcast(r.shape[:-1], self.batch)
        r = r.expand(*batch, -1).movedim(-1, 0).contiguous()
        lowers = [lift(lower, r) for lower in self.lower]
        for step, lower in zip(plan.rounds, lowers):
            push = lower * r.index_select(0, step.pivot).index_select(0, step.owner)
            r = r.index_add(0, step.neighbour, push, alpha=-1)
        rest = cholesky_solve(self.block, r.index_select(0, plan.block).movedim(0, -1))
        r = r.index_copy(0, plan.block, rest.movedim(-1, 0))
        for step, pivot, lower in reversed(list(zip(plan.rounds, self.pivot, lowers))):
            pull = gather_sum(lower * r.index_select(0, step.neighbour), step.owner, len(step.pivot))
            r = r.index_copy(0, step.pivot, r.index_select(0, step.pivot) / lift(pivot, r) - pull)
        return r.movedim(0, -1)

    def variance(self, s: Tensor) -> Tensor:
        forms, plan, assembly = self.structure.assembly.forms, self.structure.plan, self.structure.assembly
        w = self.leading
        if s is self.weight:
            inverse = _selected_inverse(plan, self.pivot, self.lower, self.block)
            return (w - w.square() * forms(inverse)).clamp(min=0).movedim(0, -1)

        def inverse_of(entries: Tensor) -> Tensor:
            return _selected_inverse(plan, *_eliminate(plan, entries))

        batch = broadcast(s.shape[:-1], self.batch)
        s = s.expand(*batch, -1).movedim(-1, 0).contiguous()
        w = self.weight.expand(*batch, -1).movedim(-1, 0).contiguous()
        made = torch.func.jvp(inverse_of, (assembly.assemble(w),), (assembly.assemble(s),))
        inverse, slope = made[0], made[1]
        return (s - 2 * w * s * forms(inverse) - w.square() * forms(slope)).clamp(min=0).movedim(0, -1)

    def pivots(self) -> Tensor:
        corner = self.block.diagonal(dim1=-2, dim2=-1)
        return torch.cat([*(pivot.movedim(0, -1) for pivot in self.pivot), corner], -1)


def lift(x: Tensor, like: Tensor) -> Tensor:
    """``x`` (k, *batch) with dimensions added after the first, to broadcast with ``like`` (k, *samples, *batch)."""
    return x.reshape(x.shape[0], *[1] * (like.dim() - x.dim()), *x.shape[1:])


def gather_sum(x: Tensor, segment: Tensor, count: int) -> Tensor:
    """Sums of x (k, ...) over equal entries of ``segment`` (k,), as (count, ...)."""
    return x.new_zeros(count, *x.shape[1:]).index_add(0, segment, x)


def _eliminate(plan: Plan, entries: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Pivots d and columns l of each round, and the Cholesky factor (*batch, m, m) of the dense rest."""
    pivots, lowers = [], []
    for step in plan.rounds:
        pivot, column = entries.index_select(0, step.diagonal), entries.index_select(0, step.entry)
        lower = column / pivot.index_select(0, step.owner)
        update = lower.index_select(0, step.first) * column.index_select(0, step.second)
        entries = entries.index_add(0, step.target, update, alpha=-1)
        pivots.append(pivot)
        lowers.append(lower)
    size = len(plan.block)
    # batch first before the block is taken: compiled backward passes corrupt memory the other way round (torch 2.13)
    dense = entries.movedim(0, -1).index_select(-1, plan.block_entry).unflatten(-1, (size, size))
    return pivots, lowers, torch.linalg.cholesky_ex(dense).L


def _selected_inverse(plan: Plan, pivots: list[Tensor], lowers: list[Tensor], block: Tensor) -> Tensor:
    """Entries of ``M^-1`` on the pattern of the factor, (E, *batch)."""
    identity = torch.eye(len(plan.block), dtype=block.dtype, device=block.device)
    # not torch.cholesky_inverse: its forward-mode derivative is wrong (torch 2.13)
    half = torch.linalg.solve_triangular(block, identity.expand_as(block), upper=False)
    # every entry of the symmetric block once
    rest = (half.mT @ half).flatten(-2).index_select(-1, plan.lower).movedim(-1, 0)
    inverse = rest.new_zeros(plan.entries, *rest.shape[1:])
    inverse = inverse.index_add(0, plan.block_entry.index_select(0, plan.lower), rest)
    for step, pivot, lower in reversed(list(zip(plan.rounds, pivots, lowers))):
        between = inverse.index_select(0, step.target)
        column = gather_sum(between * lower.index_select(0, step.second), step.first, len(step.entry))
        mirrored = between * lower.index_select(0, step.first) * lift(step.distinct, between)
        column = -column.index_add(0, step.second, mirrored)
        corner = 1 / pivot - gather_sum(lower * column, step.owner, len(step.pivot))
        inverse = inverse.index_add(0, step.entry, column).index_add(0, step.diagonal, corner)  # zero there before
    return inverse
