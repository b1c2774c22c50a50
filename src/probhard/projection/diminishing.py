"""Projection on fields whose total variation does not grow in time (TVD), slice by slice.

The first slice is clipped to the bounds. Each later slice is the nearest profile with

    TV(u_t) <= TV(u_{t-1}),     lower <= u_t <= upper,

where u_{t-1} is projected. Let T_t be the tangent of a slice for a fixed amount, k_t its derivative in the amount
and s_t the signs of its jumps. A change x of the field moves it by ``du_t = T_t x_t + k_t e_t``, where
``e_t = s_{t-1} . du_{t-1}`` is the change of the amount. Slices of a diagonal covariance are independent, so

    Var(u_t) = diag(T_t C_t T_t^T) + k_t^2 Var(e_t),     Var(e_{t+1}) = |C_t^1/2 T_t^T s_t|^2 + (s_t . k_t)^2 Var(e_t).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from probhard.errors import ShapeError
from probhard.laws.covariance import Diagonal
from probhard.projection.base import Projector, Solution
from probhard.projection.profiles import ProfileSet, project_points, rounded, stats_of
from probhard.tangent.profiles import FieldTangent, Pooling


class DiminishingProjector(Projector):
    """Projects fields over time and space so that their variation in space does not grow in time.

    Args:
        shape: Number of times and of points in space, (nt, nx); fields are flattened time-major.
        lower: Smallest value of the field, broadcasting with (*samples, *batch), or None.
        upper: Largest value of the field, or None.
        weight: Metric weight over (*batch, nt * nx).

    Raises:
        ShapeError: The weight does not have nt * nx variables.
    """

    moments_from = "monte-carlo"
    local = True

    def __init__(self, shape: tuple[int, int], lower: Tensor | None, upper: Tensor | None, weight: Diagonal) -> None:
        if weight.shape[-1] != shape[0] * shape[1]:
            raise ShapeError(
                f"A field of {shape[0]} x {shape[1]} values got a weight of {weight.shape[-1]} variables.",
                "The variables are the field, flattened time-major.",
                f"Give the distribution {shape[0] * shape[1]} variables, or correct the shape.",
            )
        self.shape, self.weight = shape, weight
        self.lower, self.upper = (None if x is None else x.to(torch.float64) for x in (lower, upper))

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        points, weight = (x.to(torch.float64).unflatten(-1, self.shape) for x in (z, self.weight.variance))
        amount = points.new_full((), torch.inf)
        values, slices, residuals = [], [], []
        for t in range(self.shape[0]):
            profiles = ProfileSet("tv-bound", amount, self.lower, self.upper)
            value, pooled, residual = project_points(profiles, points[..., t, :], weight[..., t, :])
            amount = value.diff(dim=-1).abs().sum(-1)
            values.append(value)
            slices.append(pooled)
            residuals.append(residual)
        field = torch.stack(values, -2)
        stats = replace(stats_of(field, torch.stack(residuals, -2), z.dtype), local=True)
        lower, upper = (None if x is None else x[..., None, None] for x in (self.lower, self.upper))
        out = rounded(field, z.dtype, lower, upper).flatten(-2)
        return Solution(out, DiminishingTangent(field, slices), stats)


class DiminishingTangent(FieldTangent):
    """The tangents of the slices, chained through the amount that each slice allows the next.

    Args:
        field: The projected field, (*lead, nt, nx).
        slices: The tangents of its slices.
    """

    def __init__(self, field: Tensor, slices: list[Pooling]) -> None:
        self.lead, self.slices = field.shape, slices
        jumps = torch.nn.functional.pad(field.detach().diff(dim=-1).sign(), (1, 1))
        self.signs = (jumps[..., :-1] - jumps[..., 1:]).unbind(-2)

    def apply_field(self, x: Tensor) -> Tensor:
        change = x.new_zeros(())
        moved = []
        for pooled, sign, part in zip(self.slices, self.signs, x.unbind(-2)):
            moved.append(pooled.apply(part) + self._response(pooled) * change)
            change = (sign * moved[-1]).sum(-1, keepdim=True)
        return torch.stack(torch.broadcast_tensors(*moved), -2)

    def transpose_field(self, x: Tensor) -> Tensor:
        change = x.new_zeros(())
        pulled: list[Tensor] = []
        for pooled, sign, part in zip(self.slices[::-1], self.signs[::-1], x.unbind(-2)[::-1]):
            part = part + sign * change
            change = (self._response(pooled) * part).sum(-1, keepdim=True)
            pulled.append(pooled.transpose(part))
        return torch.stack(torch.broadcast_tensors(*pulled[::-1]), -2)

    def variance_field(self, variance: Tensor) -> Tensor:
        change = variance.new_zeros(())
        moved = []
        for pooled, sign, part in zip(self.slices, self.signs, variance.unbind(-2)):
            response = self._response(pooled)
            moved.append(pooled.variance(part) + response.square() * change)
            own = (part * pooled.transpose(sign).square()).sum(-1, keepdim=True)
            change = own + (sign * response).sum(-1, keepdim=True).square() * change
        return torch.stack(torch.broadcast_tensors(*moved), -2)

    @staticmethod
    def _response(pooled: Pooling) -> Tensor:
        """``k``, the derivative of a slice in its amount."""
        return pooled.responses[0] / pooled.gram[0]
