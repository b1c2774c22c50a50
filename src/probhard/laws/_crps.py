"""The CRPS of location-scale laws as an autograd primitive with its own derivatives; see ``laws.base``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from probhard.laws.family import Family


class _CRPS(torch.autograd.Function):
    """Value, slope and spread; slope and spread are the gradient, returned so that it can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(loc: Tensor, scale: Tensor, y: Tensor, family: Family) -> tuple[Tensor, Tensor, Tensor]:
        error = loc - y
        slope, spread = family.crps_terms(error / scale.clamp_min(torch.finfo(error.dtype).tiny))
        return torch.addcmul(error * slope, scale, spread), slope, spread

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.family = inputs[3]
        ctx.save_for_backward(*inputs[:3], *output[1:])
        ctx.save_for_forward(*inputs[:3], *output[1:])

    @staticmethod
    def _curvature(loc: Tensor, scale: Tensor, y: Tensor, family: Family) -> tuple[Tensor, Tensor]:
        """``z`` and ``2 f(z) / scale``: d slope = rate (d e - z d scale), d spread = -z d slope."""
        positive = scale.clamp_min(torch.finfo(loc.dtype).tiny)
        z = ((loc - y) / positive).clamp(-1e15, 1e15)  # beyond, the density and its products are 0
        return z, 2 * family.log_density(z).exp() / positive

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        of_value, of_slope, of_spread = gradients
        loc, scale, y, slope, spread = ctx.saved_tensors
        needs_loc, needs_scale, needs_y = ctx.needs_input_grad[:3]
        to_error = None if of_value is None or not (needs_loc or needs_y) else of_value * slope
        to_scale = None if of_value is None or not needs_scale else of_value * spread
        if of_slope is not None or of_spread is not None:
            z, rate = _CRPS._curvature(loc, scale, y, ctx.family)
            pull = 0.0 if of_slope is None else rate * of_slope
            pull = pull if of_spread is None else pull - rate * z * of_spread
            to_error = pull if to_error is None else to_error + pull
            to_scale = -z * pull if to_scale is None else to_scale - z * pull
        to_y = -to_error if needs_y and to_error is not None else None
        return to_error, to_scale, to_y, None


class _DualCRPS(_CRPS):
    """``_CRPS`` with forward-mode derivatives, which torch.compile cannot trace."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        loc, scale, y, slope, spread = ctx.saved_tensors
        of_loc, of_scale, of_y = (torch.zeros_like(loc) if t is None else t for t in tangents[:3])
        of_error = of_loc - of_y
        z, rate = _CRPS._curvature(loc, scale, y, ctx.family)
        of_slope = rate * (of_error - z * of_scale)
        return of_error * slope + of_scale * spread, of_slope, -z * of_slope


def location_scale_crps(family: Family, loc: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """CRPS of ``loc + scale * unit``.

    Args:
        family: The unit law.
        loc: Locations, (*batch, n).
        scale: Scales >= 0, of the shape and dtype of loc.
        y: Targets, of the shape and dtype of loc.

    Returns:
        The score, (*batch, n).
    """
    function = _CRPS if torch.compiler.is_compiling() else _DualCRPS
    return function.apply(loc, scale, y, family)[0]
