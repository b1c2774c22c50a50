"""Preconditioned conjugate gradients for a batch of symmetric positive definite systems ``M x = r``.

    alpha = r.z / p.Mp,     x += alpha p,     r -= alpha Mp,     z = B r,     p = z + (r'.z' / r.z) p

M and the preconditioner B are known by their products. Elements that have converged stay as they are. Gradients with
respect to M follow from one step of the same solver at the solution: ``x = x0 + M0^-1 (r - M x0)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
LIMIT = 2000  # most iterations


@torch.no_grad()
def conjugate_gradients(
    product: Product, right: Tensor, precondition: Product | None = None, tolerance: float = 1e-14, limit: int = LIMIT
) -> Tensor:
    """Solve ``M x = r`` without gradients.

    Args:
        product: ``M x`` for x (..., k).
        right: r, (..., k).
        precondition: ``B r`` with B close to the inverse of M, positive definite; None for the identity.
        tolerance: Residual at which an element has converged, relative to its right-hand side.
        limit: Most iterations.

    Returns:
        The solutions, (..., k); the caller checks what it needs of them.
    """
    x, residual = torch.zeros_like(right), right
    z = residual if precondition is None else precondition(residual)
    direction, power = z, (residual * z).sum(-1, keepdim=True)
    goal = tolerance * torch.linalg.vector_norm(right, dim=-1, keepdim=True)
    for _ in range(limit):
        open_ = (torch.linalg.vector_norm(residual, dim=-1, keepdim=True) > goal) & (power > 0)
        if not bool(open_.any()):
            break
        image = product(direction)
        bend = (direction * image).sum(-1, keepdim=True)
        step = torch.where(open_ & (bend > 0), power / torch.where(bend > 0, bend, 1.0), 0.0)
        x, residual = x + step * direction, residual - step * image
        z = residual if precondition is None else precondition(residual)
        fresh = (residual * z).sum(-1, keepdim=True)
        direction = z + torch.where(open_, fresh / torch.where(power > 0, power, 1.0), 0.0) * direction
        power = fresh
    return x


class _Inverse(torch.autograd.Function):
    """``M^-1 r`` for a constant symmetric M; its adjoint is itself."""

    @staticmethod
    def forward(ctx: Any, right: Tensor, inverse: Product) -> Tensor:
        ctx.inverse = inverse
        return inverse(right)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Inverse.apply(gradient, ctx.inverse), None


def implicit_solve(product: Product, right: Tensor, inverse: Product) -> Tensor:
    """Solve ``M x = r`` with gradients to r and to whatever M depends on.

    Args:
        product: ``M x``, differentiable.
        right: r, (..., k).
        inverse: ``M^-1 r`` without gradients, such as ``conjugate_gradients``.

    Returns:
        The solutions, (..., k).
    """
    with torch.no_grad():
        first = inverse(right)
    residual = right - product(first)  # 0 to rounding; it carries the gradients and refines the solution
    return cast(Tensor, first + _Inverse.apply(residual, inverse))
