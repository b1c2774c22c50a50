"""Weights that minimise squared residuals, with implicit gradients.

    w* = argmin 1/2 |r(w)|^2 + ridge / 2 |w|^2,   dw* = -H^-1 d(grad),   H = J^T J + sum_i r_i (Hessian of r_i) + ridge

A linear r needs one step, by QR of J. Otherwise Levenberg and Marquardt's damping ``(J^T J + m D) s = -grad`` grows
until the objective falls; each batch element has its own. Where residuals stay, J^T J converges slowly: after a few
steps H replaces it if it is positive definite. Gradients always use H.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING, SHRINK, GROW = 1e-3, 0.2, 4.0  # first damping relative to diag(J^T J), and its factors
ROUGH = 6  # first steps, by J^T J alone
LEAST = 1e-12  # of that diagonal, relative to its mean: weights without effect stay where they are

Residual = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LeastSquares:
    """A minimum: weights (*batch, k), steps taken, and where the gradient is small, (*batch,) bool."""

    value: Tensor
    steps: int
    converged: Tensor


def least_squares(
    residual: Residual,
    start: Tensor,
    ridge: float = 0.0,
    linear: bool = False,
    steps: int = 50,
    tolerance: float = 1e-8,
) -> LeastSquares:
    """Minimise without gradient; see ``implicit`` for that.

    Args:
        residual: Maps weights (*batch, k) to residuals (*batch, q), each batch element independently.
        start: First weights, (*batch, k).
        ridge: Weight of ``|w|^2 / 2``.
        linear: Whether the residual is affine in the weights.
        steps: Largest number of steps.
        tolerance: Converged if the gradient is below it, relative to ``|J| |r|`` at the start.

    Returns:
        The minimum.
    """
    with torch.no_grad():
        if linear:
            value = start + _linear_step(residual, start, ridge)
            return LeastSquares(value, 1, torch.ones(start.shape[:-1], dtype=torch.bool))
        return _marquardt(residual, start, ridge, steps, tolerance)


def implicit(residual: Residual, value: Tensor, ridge: float = 0.0, linear: bool = False) -> Tensor:
    """The minimum with its derivatives in everything that the residual depends on.

    Args:
        residual: As of ``least_squares``.
        value: Its minimum, (*batch, k).
        ridge: As there.
        linear: As there.

    Returns:
        The weights, (*batch, k), after one more Newton step, which also carries the gradient; as they are if there is
        none to carry.
    """
    if not (torch.is_grad_enabled() and residual(value.detach()).requires_grad):
        return value
    if linear:
        jacobian = _jacobian(residual, value.detach())
        units = torch.eye(value.shape[-1], dtype=value.dtype, device=value.device)
        hessian = jacobian.mT @ jacobian + ridge * units
    else:
        hessian = _hessian(residual, value, ridge)
    slope = _slope(residual, value.detach().requires_grad_(), ridge)
    return value.detach() - torch.linalg.solve(hessian, slope.unsqueeze(-1)).squeeze(-1)


def _slope(residual: Residual, w: Tensor, ridge: float) -> Tensor:
    """The gradient of the objective at w, which requires one, with a graph."""
    with torch.enable_grad():
        objective = 0.5 * residual(w).square().sum() + 0.5 * ridge * w.square().sum()
        (slope,) = torch.autograd.grad(objective, w, create_graph=True)
    return slope


def _hessian(residual: Residual, value: Tensor, ridge: float) -> Tensor:
    """H at weights (*batch, k), (*batch, k, k)."""
    w = value.detach().requires_grad_()
    units = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    directions = units.reshape(-1, *[1] * (w.dim() - 1), len(units)).expand(-1, *w.shape)
    (columns,) = torch.autograd.grad(_slope(residual, w, ridge), w, directions, is_grads_batched=True)
    return columns.movedim(0, -1)


def _jacobian(residual: Residual, w: Tensor) -> Tensor:
    """(*batch, q, k) at weights (*batch, k)."""
    units = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)

    def column(unit: Tensor) -> Tensor:
        return torch.func.jvp(residual, (w,), (unit.expand_as(w),))[1]

    with torch.no_grad():
        return torch.func.vmap(column)(units).movedim(0, -1)


def _linear_step(residual: Residual, w: Tensor, ridge: float) -> Tensor:
    """``argmin |J s + r|^2 + ridge |s + w|^2`` by QR, whose error does not grow with the squared condition of J."""
    jacobian, r = _jacobian(residual, w), residual(w)
    if ridge:
        root = ridge**0.5 * torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
        jacobian = torch.cat([jacobian, root.expand(*w.shape[:-1], *root.shape)], -2)
        r = torch.cat([r, ridge**0.5 * w], -1)
    q, upper = torch.linalg.qr(jacobian)
    return -torch.linalg.solve_triangular(upper, q.mT @ r.unsqueeze(-1), upper=True).squeeze(-1)


def _marquardt(residual: Residual, start: Tensor, ridge: float, steps: int, tolerance: float) -> LeastSquares:
    w, damping = start, torch.full(start.shape[:-1], DAMPING, dtype=start.dtype, device=start.device)
    converged = torch.zeros(start.shape[:-1], dtype=torch.bool, device=start.device)
    units = torch.eye(start.shape[-1], dtype=start.dtype, device=start.device)
    scale: Tensor | None = None
    count = 0
    for count in range(1, steps + 1):
        jacobian, r = _jacobian(residual, w), residual(w)
        slope = (jacobian.mT @ r.unsqueeze(-1)).squeeze(-1) + ridge * w
        if scale is None:
            scale = jacobian.norm(dim=(-2, -1)) * r.norm(dim=-1) + torch.finfo(w.dtype).tiny
        converged = slope.norm(dim=-1) <= tolerance * scale
        if bool(converged.all()):
            break
        normal = jacobian.mT @ jacobian + ridge * units
        if count > ROUGH:
            exact = _hessian(residual, w, ridge)
            definite = torch.linalg.cholesky_ex(exact).info == 0
            normal = torch.where(definite[..., None, None], exact, normal)
        diagonal = normal.diagonal(dim1=-2, dim2=-1)
        diagonal = diagonal + LEAST * diagonal.mean(-1, keepdim=True)
        damped = normal + torch.diag_embed(damping.unsqueeze(-1) * diagonal)
        trial = w - torch.linalg.solve(damped, slope.unsqueeze(-1)).squeeze(-1)
        better = _objective(residual, trial, ridge) < _objective(residual, w, ridge)
        better &= ~converged
        w = torch.where(better.unsqueeze(-1), trial, w)
        damping = torch.where(better, SHRINK * damping, GROW * damping).clamp(1e-14, 1e14)
    return LeastSquares(w, count, converged)


def _objective(residual: Residual, w: Tensor, ridge: float) -> Tensor:
    return residual(w).square().sum(-1) + ridge * w.square().sum(-1)
