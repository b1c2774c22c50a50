"""Compiled sweeps under a fixed weight as differentiable functions; second derivatives use torch's sweeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from probhard._util.tensors import matrix, plain, safe_sqrt
from probhard.rows._kernels import fixed_sweeps
from probhard.rows._kernels.sweeps import matched

if TYPE_CHECKING:
    from probhard.rows.tree import TreeFactor


class Project(torch.autograd.Function):
    """Points z (*batch, n) projected under a fixed weight; linear, as is its adjoint."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, b: Tensor, factor: TreeFactor) -> Tensor:
        out = z.new_empty(z.shape)
        assert factor.gains is not None
        fixed_sweeps.project(factor.tree.kernel_tables, factor.gains, matrix(z), matrix(matched(b, z)), matrix(out))
        ctx.factor, ctx.right = factor, b.shape
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if plain(gradient):
            of_z, of_b = Pull.apply(gradient, ctx.factor)
        else:  # P^T x = x - A^T y with y = (A W A^T)^-1 A W x
            of_b = ctx.factor.solve(ctx.factor.tree.apply(ctx.factor.weight * gradient))
            of_z = gradient - ctx.factor.tree.transpose(of_b)
        return of_z, of_b.sum_to_size(ctx.right), None


class Pull(torch.autograd.Function):
    """The adjoint of ``Project``."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, factor: TreeFactor) -> tuple[Tensor, Tensor]:
        of_z, of_b = gradient.new_empty(gradient.shape), gradient.new_empty(*gradient.shape[:-1], factor.tree.row_count)
        assert factor.gains is not None
        fixed_sweeps.project_adjoint(
            factor.tree.kernel_tables, factor.gains, matrix(gradient), matrix(of_z), matrix(of_b)
        )
        ctx.factor = factor
        return of_z, of_b

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.factor.project(*gradients), None


class Chain(torch.autograd.Function):
    """Points z (*batch, n) projected by several forests in turn, with right-hand sides 0; linear."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, factors: tuple[TreeFactor, ...]) -> Tensor:
        out = z.new_empty(z.shape)
        fixed_sweeps.chain(_stages(factors), matrix(z), matrix(out))
        ctx.factors = factors
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if plain(gradient):
            return ChainPull.apply(gradient, ctx.factors), None
        for factor in reversed(ctx.factors):
            pulled = factor.tree.transpose(factor.solve(factor.tree.apply(factor.weight * gradient)))
            gradient = gradient - pulled
        return gradient, None


class ChainPull(torch.autograd.Function):
    """The adjoint of ``Chain``."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, factors: tuple[TreeFactor, ...]) -> Tensor:
        out = gradient.new_empty(gradient.shape)
        fixed_sweeps.chain_adjoint(_stages(factors), matrix(gradient), matrix(out))
        ctx.factors = factors
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        for factor in ctx.factors:
            gradient = factor.project(gradient, gradient.new_zeros(factor.tree.row_count))
        return gradient, None


class Scale(torch.autograd.Function):
    """Roots of the variances s (*batch, n) projected by one or several forests under a fixed weight."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, factors: tuple[TreeFactor, ...]) -> Tensor:
        out = s.new_empty(s.shape)
        fixed_sweeps.scale(_stages(factors), matrix(s), matrix(out))
        ctx.factors = factors
        ctx.save_for_backward(s, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        s, out = ctx.saved_tensors
        if torch.is_grad_enabled() or not plain(gradient):
            with torch.enable_grad():
                variance = s
                for factor in ctx.factors:
                    variance = factor.variance(variance)
                root = safe_sqrt(variance)
            return torch.autograd.grad(root, s, gradient.to(root), create_graph=True)[0], None
        of_s = s.new_empty(s.shape)
        fixed_sweeps.scale_adjoint(_stages(ctx.factors), *map(matrix, (out, gradient, of_s)))
        return of_s, None


def _stages(factors: tuple[TreeFactor, ...]) -> fixed_sweeps.Stages:
    """The forests as the kernels read them, in the order of the sweeps."""
    return tuple((factor.tree.kernel_tables, cast(fixed_sweeps.Gains, factor.gains)) for factor in factors)
