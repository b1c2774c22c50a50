"""The CRPS of ``clip(X, l, h)`` as an autograd primitive, for a location-scale X.

With c = clip(loc), y in [l, h], the partial moments P (``first``) and A (``square``) of the unit law at
``-|p - loc| / scale`` for each point p of {y, l, h} (see ``laws.tails``), and g = E|T - T'| / 2 of the unit law,

    CRPS(y) = int_l^y F^2 + int_y^h (1 - F)^2 = |y - c| + scale B(P, A),
    B(P, A) = 2 P_y - g - A_l - A_h                 where loc lies in [l, h],
              2 (P_y - P_l) + A_l - A_h             where loc < l,         mirrored where loc > h.

A target outside the bounds adds its distance to the bound. The derivatives of the CRPS are

    F(y)^2 - (1 - F(y))^2 in y,      -F(l)^2 in l,      (1 - F(h))^2 in h,      minus their sum in loc,
    B(P - t F, A - t F^2) in scale.

All are bounded. Where loc is far outside the bounds they are sums of tail masses, so they vanish only by underflow.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from probhard.laws.family import Family
from probhard.laws.tails import FARTHEST, tail_of


def positive(scale: Tensor) -> Tensor:
    """The scale (*batch, n), raised to ``1 / FARTHEST`` where it is smaller: quotients by it stay finite."""
    return scale.clamp_min(1 / FARTHEST)


def reach(
    loc: Tensor,
    scale: Tensor,
    point: Tensor,
    right: Tensor,
) -> Tensor:
    """``-|point - loc| / scale``, differentiable where it is 0; ``-FARTHEST`` for infinite points.

    Args:
        loc: (*batch, n).
        scale: (*batch, n).
        point: (*batch, n).
        right: Whether the point counts as right of loc, (*batch, n) bool.

    Returns:
        (*batch, n), in ``[-FARTHEST, 0]``.
    """
    finite = ~point.isinf()
    apart = torch.where(finite, point, loc) - loc
    distance = torch.where(right, -apart, apart) / positive(scale)
    return torch.where(finite, distance.clamp_min(-FARTHEST), -FARTHEST)


class _CensoredCRPS(torch.autograd.Function):
    """Value and its five derivatives, returned so that they can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        loc: Tensor, scale: Tensor, y: Tensor, lower: Tensor, upper: Tensor, family: Family
    ) -> tuple[Tensor, ...]:
        dtype = loc.dtype
        loc, scale, y, lower, upper = (part.double() for part in (loc, scale, y, lower, upper))
        below, above = loc < lower, loc > upper
        sides = reach(loc, scale, lower, below), reach(loc, scale, upper, ~above)
        t, finite = torch.stack(sides), ~torch.stack((lower, upper)).isinf()  # (2, *batch, n)
        t_y = reach(loc, scale, y, y > loc)
        target, ends = tail_of(family, t_y), tail_of(family, t)
        mass, first, square = (torch.where(finite, part, 0.0) for part in (ends.mass, ends.first, ends.square()))
        spread = -family.crps_spread(loc.new_full((), math.inf))

        def bracket(of_y: Tensor, of_first: Tensor, of_square: Tensor, constant: Tensor | float) -> Tensor:
            inside = 2 * of_y - constant - of_square.sum(0)
            left = 2 * (of_y - of_first[0]) + of_square[0] - of_square[1]
            right = 2 * (of_y - of_first[1]) + of_square[1] - of_square[0]
            return torch.where(below, left, torch.where(above, right, inside))

        centre = torch.clamp(loc, lower, upper)
        value = (y - centre).abs() + scale * bracket(target.first, first, square, spread)
        partials = target.first - t_y * target.mass, first - t * mass, square - t * mass.square()
        to_scale = bracket(*partials, spread)
        left = torch.where(below, 1 - mass[0], mass[0])  # F(lower)
        right = torch.where(above, 1 - mass[1], mass[1])  # 1 - F(upper)
        side = torch.sign(y - loc)
        to_y, to_lower, to_upper = side * (1 - 2 * target.mass), -left.square(), right.square()
        outer = 2 * target.mass - 2 * mass[0] + mass[0].square() - mass[1].square()
        mirrored = 2 * mass[1] - 2 * target.mass + mass[0].square() - mass[1].square()
        to_loc = torch.where(below, outer, torch.where(above, mirrored, -to_y - to_lower - to_upper))
        # Between narrow bounds the terms cancel; F is monotone, which encloses the score.
        apart = torch.stack((y - lower, upper - y))
        near = torch.where(torch.stack((y > loc, y <= loc)), 1 - target.mass, target.mass).square()  # F(y), 1 - F(y)
        least = torch.where(finite, apart, 0.0) * torch.stack((left, right)).square()
        value = torch.clamp(value, least.sum(0), torch.where(finite, apart * near, math.inf).sum(0))
        return tuple(part.to(dtype) for part in (value, to_loc, to_scale, to_y, to_lower, to_upper))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.family = inputs[5]
        ctx.save_for_backward(*inputs[:5], *output[1:])
        ctx.save_for_forward(*inputs[:5], *output[1:])

    @staticmethod
    def _hessian_product(ctx: Any, vector: Any) -> list[Tensor]:
        """Second derivatives times a vector; each point p adds a function of ``(p - loc, scale)`` of degree 1."""
        loc, scale, *points = ctx.saved_tensors[:5]
        of_loc, of_scale, *of_points = (torch.zeros_like(loc) if part is None else part for part in vector)
        positive = scale.clamp_min(torch.finfo(loc.dtype).tiny)
        pulls, to_loc, to_scale = [], torch.zeros_like(loc), torch.zeros_like(loc)
        for k, (point, of_point) in enumerate(zip(points, of_points)):
            z = ((point - loc) / positive).clamp(-1e15, 1e15)  # beyond, the density and its products are 0
            factor = 2.0 if k == 0 else -2 * ctx.family.cdf(z if k == 1 else -z)
            rate = torch.where(point.isinf(), 0.0, factor * ctx.family.log_density(z).exp() / positive)
            pull = rate * (of_point - of_loc - z * of_scale)
            pulls.append(pull)
            to_loc, to_scale = to_loc - pull, to_scale - z * pull
        return [to_loc, to_scale, *pulls]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        of_value, *others = gradients
        needed, slopes = ctx.needs_input_grad, ctx.saved_tensors[5:]
        results: list[Tensor | None] = [
            of_value * slope if need and of_value is not None else None for need, slope in zip(needed, slopes)
        ]
        if any(part is not None for part in others):
            second = _CensoredCRPS._hessian_product(ctx, others)
            results = [b if a is None else a + b for a, b in zip(results, second)]
        return *results, None


class _DualCensoredCRPS(_CensoredCRPS):
    """``_CensoredCRPS`` with forward-mode derivatives, which torch.compile cannot trace."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        pairs = zip(tangents[:5], ctx.saved_tensors[5:])
        value = sum((t * slope for t, slope in pairs if t is not None), torch.zeros_like(ctx.saved_tensors[0]))
        return value, *_CensoredCRPS._hessian_product(ctx, tangents[:5])


def censored_crps(loc: Tensor, scale: Tensor, inside: Tensor, lower: Tensor, upper: Tensor, family: Family) -> Tensor:
    """CRPS of ``clip(loc + scale * unit, lower, upper)`` at targets within the bounds.

    Args:
        loc: Locations, (*batch, n).
        scale: Scales >= 0, of the shape and dtype of loc.
        inside: Targets clipped to the bounds, of the shape and dtype of loc.
        lower: Lower bounds, of the shape and dtype of loc.
        upper: Upper bounds, of the shape and dtype of loc.
        family: The unit law.

    Returns:
        The score, (*batch, n).
    """
    function = _CensoredCRPS if torch.compiler.is_compiling() else _DualCensoredCRPS
    return function.apply(loc, scale, inside, lower, upper, family)[0]
