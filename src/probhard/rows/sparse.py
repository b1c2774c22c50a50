"""Sparse rows of a fixed pattern: a batched Cholesky factor in rounds, and its selected inverse.

``M = A W A^T = L D L^T`` by the rounds of ``elimination``. Marginal variances need only the entries of
``Z = M^-1`` on the pattern of L (Takahashi's recursion, the rounds in reverse):

    Z_jp = - sum_j' Z_jj' l_j'p,     Z_pp = 1 / d_p - sum_j l_jp Z_jp.

With ``q_i(X) = a_i^T X a_i`` for column i of A, the oblique variance is ``w_i - w_i^2 q_i(Z)``. For another covariance
S it is ``s_i - 2 w_i s_i q_i(Z) + w_i^2 q_i(N)`` with ``N = Z A S A^T Z``, the derivative of ``-Z`` along ``A S A^T``.

On a CPU with numba, compiled kernels do the training step. Other devices, higher derivatives and traced graphs use
torch.
"""

from __future__ import annotations

import copy
from functools import cached_property
from math import prod
from typing import Any, cast

import scipy.sparse as sp
import torch
from torch import Tensor

from probhard._util import jit
from probhard._util.tensors import CACHES, broadcast, matrix, plain
from probhard.errors import ParameterError
from probhard.rows._kernels import sparse as kernels
from probhard.rows._kernels.lanes import LANES
from probhard.rows._kernels.moments import twice
from probhard.rows.base import Factor, Mapped
from probhard.rows.dense import DenseRows, cholesky_solve
from probhard.rows.elimination import Assembly, Plan, gather_sum, lift, plan_elimination
from probhard.rows.maps import SparseMap

DENSE_LIMIT = 20_000_000  # up to this many entries, compiled graphs may use a dense A
KERNEL_BLOCK = 64  # up to this many rows in the dense block, the kernels are faster than LAPACK


class SparseRows(Mapped):
    """A sparse A with a planned elimination of ``A W A^T``.

    Args:
        matrix: A, (q, n).
        plan: The elimination of its pattern; None plans it here.
    """

    map: SparseMap
    double = True
    fixed = True  # False after ``with_values``

    def __init__(self, matrix: sp.csr_array, plan: Plan | None = None) -> None:
        super().__init__(SparseMap(matrix))
        self.plan = plan_elimination(matrix) if plan is None else plan
        self.assembly = Assembly(matrix, self.plan)

    def with_values(self, values: Tensor) -> SparseRows:
        """The same pattern with other values (*batch, entries of A), sorted by row and column."""
        twin = copy.copy(self)
        twin.map, twin.assembly = copy.copy(self.map), copy.copy(self.assembly)
        for holder in (twin, twin.map, twin.assembly):
            for name in CACHES:
                holder.__dict__.pop(name, None)  # computed from the old values
        twin.fixed, twin.map.value = False, values
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
            f"sparse Cholesky of {self.row_count} rows, {len(plan.rounds)} rounds, {plan.entries} entries, "
            f"dense block of {len(plan.block)}"
        )

    @cached_property
    def kernel_tables(self) -> kernels.Tables:
        """The pattern and the values of A as the kernels read them."""
        columns, assembly, rows = self.plan.columns, self.assembly, self.map
        return (
            *(columns.start, columns.row, columns.pair, columns.target),
            *(assembly.variable.numpy(), columns.entry[assembly.entry.numpy()]),
            *(assembly.product.numpy(), assembly.form.numpy()),
            *(rows.row.numpy(), rows.column.numpy(), rows.value.numpy()),
        )

    def factor(self, weight: Tensor) -> Factor:
        if not torch.compiler.is_dynamo_compiling():
            suited = self.fixed and len(self.plan.block) <= KERNEL_BLOCK and weight.dtype == torch.float64
            if jit.AVAILABLE and suited and plain(weight) and weight.numel():
                return KernelFactor(self, weight)
            return SparseFactor(self, weight)
        # Inductor (torch 2.13) miscompiles the gathers of the sparse factor in training graphs, without an error.
        if self.row_count * self.variables > DENSE_LIMIT:
            raise ParameterError(
                f"torch.compile met a sparse system of {self.row_count} rows over {self.variables} variables.",
                "Compiled code gives wrong numbers for its factor, and a dense one would not fit.",
                "Leave the projection out of the compiled region with torch.compiler.disable.",
            )
        return DenseRows(self.dense()).factor(weight)

    def plain_moments(self, z: Tensor, weight: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The oblique moments by torch, for points z and weights (*batch, n) and right-hand sides b (..., q)."""
        return SparseFactor(self, weight).moments(z, b)


class SparseFactor(Factor):
    """``L D L^T`` of ``A W A^T``.

    Entries come first, (E, *batch), so that gathers move whole rows of memory.
    """

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
        solved = cholesky_solve(self.block, r.index_select(0, plan.block).movedim(0, -1))
        r = r.index_copy(0, plan.block, solved.movedim(-1, 0))
        for step, pivot, lower in reversed(list(zip(plan.rounds, self.pivot, lowers))):
            pull = gather_sum(lower * r.index_select(0, step.neighbour), step.owner, len(step.pivot))
            r = r.index_copy(0, step.pivot, r.index_select(0, step.pivot) / lift(pivot, r) - pull)
        return r.movedim(0, -1)

    def variance(self, s: Tensor | None = None) -> Tensor:
        forms, plan, assembly = self.structure.assembly.forms, self.structure.plan, self.structure.assembly
        w = self.leading
        if s is None:
            inverse = _selected_inverse(plan, self.pivot, self.lower, self.block)
            return (w - w.square() * forms(inverse)).clamp(min=0).movedim(0, -1)

        def inverse_of(entries: Tensor) -> Tensor:
            return _selected_inverse(plan, *_eliminate(plan, entries))

        batch = broadcast(s.shape[:-1], self.batch)
        s = s.expand(*batch, -1).movedim(-1, 0).contiguous()
        w = self.weight.expand(*batch, -1).movedim(-1, 0).contiguous()
        derivative = torch.func.jvp(inverse_of, (assembly.assemble(w),), (assembly.assemble(s),))
        inverse, slope = derivative[0], derivative[1]
        return (s - 2 * w * s * forms(inverse) - w.square() * forms(slope)).clamp(min=0).movedim(0, -1)

    def pivots(self) -> Tensor:
        corner = self.block.diagonal(dim1=-2, dim2=-1)
        return torch.cat([*(pivot.movedim(0, -1) for pivot in self.pivot), corner], -1)


class KernelFactor(Factor):
    """``L D L^T`` by compiled kernels, for one fixed A in float64 on a CPU."""

    structure: SparseRows

    def __init__(self, structure: SparseRows, weight: Tensor) -> None:
        self.structure, self.weight = structure, weight
        self.batch = weight.shape[:-1]
        lanes = min(LANES, prod(self.batch))
        self.columns, pivot = kernels.factorise(structure.kernel_tables, matrix(weight), lanes)
        self.pivot = torch.from_numpy(pivot).reshape(*self.batch, -1)

    @cached_property
    def plain(self) -> SparseFactor:
        """The same factor by torch."""
        return SparseFactor(self.structure, self.weight)

    def solve(self, r: Tensor) -> Tensor:
        batch = broadcast(r.shape[:-1], self.batch)
        if not plain(r) or batch[len(batch) - len(self.batch) :] != self.batch:
            return self.plain.solve(r)
        return cast(Tensor, KernelSolve.apply(r.expand(*batch, -1), self.weight, self))

    def moments(self, z: Tensor, b: Tensor, s: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if s is not None or z.shape != self.weight.shape or not plain(z):
            return super().moments(z, b, s)
        return cast(tuple[Tensor, Tensor], KernelMoments.apply(z, self.weight, b, self))

    def variance(self, s: Tensor | None = None) -> Tensor:
        return self.plain.variance(s)

    def pivots(self) -> Tensor:
        return self.pivot


class KernelSolve(torch.autograd.Function):
    """``(r, w) -> (A W A^T)^-1 r`` for r (*samples, *batch, q)."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, weight: Tensor, factor: KernelFactor) -> Tensor:
        count, columns, right = prod(factor.batch), factor.columns, matrix(r)
        if count == 1:  # one weight: samples become the batch
            count, columns = len(right), columns.repeat(min(LANES, len(right)), -1)
        right = right.reshape(-1, count, r.shape[-1])
        out = torch.from_numpy(kernels.solve(factor.structure.kernel_tables, columns, right)).reshape(r.shape)
        ctx.factor = factor
        ctx.save_for_backward(out, weight)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Gradients: ``y = M^-1 x'`` for r, and ``-(A^T y) (A^T x)`` for the weights."""
        x, weight = ctx.saved_tensors
        y, pull = ctx.factor.solve(gradient), ctx.factor.structure.transpose
        return y, -(pull(y) * pull(x)).sum_to_size(weight.shape) if ctx.needs_input_grad[1] else None, None


class KernelMoments(torch.autograd.Function):
    """``(z, w, b) -> (u, sqrt(v))`` for the oblique metric; z and w are (*batch, n)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, w: Tensor, b: Tensor, factor: KernelFactor) -> tuple[Tensor, Tensor]:
        tables = factor.structure.kernel_tables
        right = matrix(b if b.dim() == 1 else b.expand(*factor.batch, -1))
        results = kernels.moments(tables, factor.columns, matrix(z), matrix(w), right)
        mean, scale, multiplier = (torch.from_numpy(x) for x in results)
        mean, scale = mean.reshape(z.shape), scale.reshape(z.shape)
        ctx.factor = factor
        ctx.save_for_backward(z, w, b, scale, multiplier)
        return mean, scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        z, w, b, scale, multiplier = ctx.saved_tensors
        factor, (of_mean, of_scale) = ctx.factor, gradients
        if torch.is_grad_enabled() or not plain(of_mean):
            return (*twice(factor.structure.plain_moments, (z, w, b), (of_mean, of_scale)), None)
        sources = (matrix(w), multiplier.numpy(), matrix(scale), matrix(of_mean), matrix(of_scale))
        slopes = kernels.moments_adjoint(factor.structure.kernel_tables, factor.columns, *sources)
        of_z, of_w, of_b = (torch.from_numpy(x).reshape(*factor.batch, -1) for x in slopes)
        return of_z, of_w, of_b.sum_to_size(b.shape), None


def _eliminate(plan: Plan, entries: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Pivots d and columns l of each round, and the Cholesky factor (*batch, m, m) of the dense block."""
    pivots, lowers = [], []
    for step in plan.rounds:
        pivot, column = entries.index_select(0, step.diagonal), entries.index_select(0, step.entry)
        lower = column / pivot.index_select(0, step.owner)
        update = lower.index_select(0, step.first) * column.index_select(0, step.second)
        entries = entries.index_add(0, step.target, update, alpha=-1)
        pivots.append(pivot)
        lowers.append(lower)
    size = len(plan.block)
    # move the batch first, then gather: the other order corrupts memory in compiled backward passes (torch 2.13)
    dense = entries.movedim(0, -1).index_select(-1, plan.block_entry).unflatten(-1, (size, size))
    return pivots, lowers, torch.linalg.cholesky_ex(dense).L


def _selected_inverse(plan: Plan, pivots: list[Tensor], lowers: list[Tensor], block: Tensor) -> Tensor:
    """Entries of ``M^-1`` on the pattern of the factor, (E, *batch)."""
    identity = torch.eye(len(plan.block), dtype=block.dtype, device=block.device)
    # not torch.cholesky_inverse: its forward-mode derivative is wrong (torch 2.13)
    half = torch.linalg.solve_triangular(block, identity.expand_as(block), upper=False)
    # each entry of the symmetric block once
    dense = (half.mT @ half).flatten(-2).index_select(-1, plan.lower).movedim(-1, 0)
    inverse = dense.new_zeros(plan.entries, *dense.shape[1:])
    inverse = inverse.index_add(0, plan.block_entry.index_select(0, plan.lower), dense)
    for step, pivot, lower in reversed(list(zip(plan.rounds, pivots, lowers))):
        between = inverse.index_select(0, step.target)
        column = gather_sum(between * lower.index_select(0, step.second), step.first, len(step.entry))
        mirrored = between * lower.index_select(0, step.first) * lift(step.distinct, between)
        column = -column.index_add(0, step.second, mirrored)
        corner = 1 / pivot - gather_sum(lower * column, step.owner, len(step.pivot))
        inverse = inverse.index_add(0, step.entry, column).index_add(0, step.diagonal, corner)  # these were 0
    return inverse
