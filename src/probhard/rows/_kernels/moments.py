"""Mean and scale of equal blocks in one pass each way, for the training loop.

The formulas are those of ``disjoint`` for one row per block, with ``g = W a``, ``m = a . g``, ``r = a . z - b``:

    oblique:  u = z - g r / m,    v = w - g^2 / m
    fixed W:  u = z - k r,        v = s (1 - k a)^2 + k^2 (sum(a^2 s) - a^2 s),    k = g / m

The adjoints are written by hand. These O(n) projections are bound by memory traffic, so temporaries are reused in
place. Second derivatives use the plain formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from probhard._util import jit
from probhard._util.tensors import matrix, vector
from probhard._util.tensors import plain as plain_tensor
from probhard.rows._kernels import slices

Plain = Callable[..., tuple[Tensor, Tensor]]


def twice(plain: Plain, inputs: tuple[Tensor, ...], gradients: tuple[Tensor, Tensor]) -> list[Tensor | None]:
    """Gradients that can be differentiated again.

    Args:
        plain: The same function in differentiable torch operations.
        inputs: Its arguments.
        gradients: Gradients of its two results.

    Returns:
        One gradient per input; None for inputs that require none.
    """
    wanted = [x for x in inputs if x.requires_grad]
    with torch.enable_grad():
        outputs = plain(*inputs)
    slopes = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True, materialize_grads=True))
    return [next(slopes) if x.requires_grad else None for x in inputs]


def _to_variance(of_scale: Tensor, scale: Tensor) -> Tensor:
    """Gradient of the variance from that of its root; 0 where the root is 0."""
    square = scale.square().add_(torch.finfo(scale.dtype).tiny)
    return (scale * of_scale).mul_(0.5).div_(square)


def _stay(gain: Tensor, a: Tensor) -> Tensor:
    return (1 - gain * a).clamp_(min=0).square_()


def _by_kernel(*parts: Tensor) -> bool:
    return jit.AVAILABLE and parts[0].numel() > 0 and all(map(plain_tensor, parts))


class ObliqueMoments(torch.autograd.Function):
    """``(z, w, b) -> (u, sqrt(v))`` for blocks (..., rows, width), W = S."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, w: Tensor, b: Tensor, a: Tensor, plain: Plain) -> tuple[Tensor, Tensor]:
        """Project blocks z (..., rows, width) with weights w and right-hand sides b (..., rows)."""
        ctx.plain = plain
        if _by_kernel(z, w, b, a):
            mean, scale = z.new_empty(z.shape), z.new_empty(z.shape)
            multiplier, mass = (torch.empty((*b.shape, 1), dtype=torch.float64) for _ in range(2))
            inputs = (matrix(z), matrix(w), vector(b), vector(a))
            slices.oblique(*inputs, matrix(mean), matrix(scale), vector(multiplier), vector(mass))
            ctx.save_for_backward(z, w, b, a, multiplier, mass, scale)
            return mean, scale
        gain = w * a
        mass = (gain @ a).unsqueeze(-1)
        empty = mass <= 0  # rows in which no variable can move
        mass.masked_fill_(empty, 1)
        multiplier = (((z @ a) - b).unsqueeze(-1) / mass).masked_fill_(empty, 0)
        mean = torch.addcmul(z, multiplier, gain, value=-1)
        scale = gain.mul_(a).neg_().add_(mass).clamp_(min=0).div_(mass).mul_(w).sqrt_()
        ctx.save_for_backward(z, w, b, a, multiplier, mass, scale)
        return mean, scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of the first three arguments."""
        z, w, b, a, multiplier, mass, scale = ctx.saved_tensors
        of_mean, of_scale = gradients
        if torch.is_grad_enabled():
            return (*twice(ctx.plain, (z, w, b), (of_mean, of_scale)), None, None)
        if mass.dtype == torch.float64 and _by_kernel(of_mean, of_scale, scale, a):
            of_z, of_w, of_b = z.new_empty(z.shape), z.new_empty(z.shape), b.new_empty(b.shape)
            inputs = (matrix(w), vector(a), vector(multiplier), vector(mass), matrix(scale), matrix(of_mean))
            slices.oblique_adjoint(*inputs, matrix(of_scale), matrix(of_z), matrix(of_w), vector(of_b))
            return of_z, of_w, of_b, None, None
        multiplier, mass = multiplier.to(z), mass.to(z)
        gain = w * a
        of_variance = _to_variance(of_scale, scale)
        of_multiplier = -(of_mean * gain).sum(-1, keepdim=True)
        of_right = of_multiplier / mass
        of_z = torch.addcmul(of_mean, a, of_right)
        curved = gain.square().mul_(of_variance).sum(-1, keepdim=True) / mass.square()
        of_w = gain.mul_(a).div_(mass).mul_(-2).add_(1).mul_(of_variance)
        of_w.addcmul_(of_mean, a * multiplier, value=-1)
        of_w.addcmul_(a.square(), curved - multiplier * of_right)
        return of_z, of_w, -of_right.squeeze(-1), None, None


class FixedMoments(torch.autograd.Function):
    """``(z, s, b) -> (u, sqrt(v))`` for blocks (..., rows, width) and a fixed gain k (width,) or (rows, width)."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, s: Tensor, b: Tensor, a: Tensor, gain: Tensor, plain: Plain
    ) -> tuple[Tensor, Tensor]:
        """Project blocks z (..., rows, width) with variances s and right-hand sides b (..., rows)."""
        ctx.plain = plain
        if _by_kernel(z, s, b, a):
            mean, scale = z.new_empty(z.shape), z.new_empty(z.shape)
            inputs = (matrix(z), matrix(s), vector(b), vector(a), matrix(gain))
            slices.fixed(*inputs, matrix(mean), matrix(scale))
            ctx.save_for_backward(z, s, b, a, gain, scale)
            return mean, scale
        right = ((z @ a) - b).unsqueeze(-1)
        mean = torch.addcmul(z, right, gain, value=-1)
        own = s * a.square()
        others = (own.sum(-1, keepdim=True) - own).clamp_(min=0)
        scale = others.mul_(gain.square()).addcmul_(s, _stay(gain, a)).sqrt_()
        ctx.save_for_backward(z, s, b, a, gain, scale)
        return mean, scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of the first three arguments."""
        z, s, b, a, gain, scale = ctx.saved_tensors
        of_mean, of_scale = gradients
        if torch.is_grad_enabled():
            return (*twice(ctx.plain, (z, s, b), (of_mean, of_scale)), None, None, None)
        if _by_kernel(of_mean, of_scale, scale, a):
            of_z, of_s, of_b = z.new_empty(z.shape), z.new_empty(z.shape), b.new_empty(b.shape)
            inputs = (vector(a), matrix(gain), matrix(scale), matrix(of_mean), matrix(of_scale))
            slices.fixed_adjoint(*inputs, matrix(of_z), matrix(of_s), vector(of_b))
            return of_z, of_s, of_b, None, None, None
        of_right = -(of_mean * gain).sum(-1, keepdim=True)
        of_z = torch.addcmul(of_mean, a, of_right)
        of_variance = _to_variance(of_scale, scale)
        pushed = of_variance * gain.square()
        of_s = pushed.neg().add_(pushed.sum(-1, keepdim=True)).mul_(a.square()).addcmul_(of_variance, _stay(gain, a))
        return of_z, of_s, -of_right.squeeze(-1), None, None, None
