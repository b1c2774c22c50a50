"""Projection on a ball ``|u - c| <= r`` under a diagonal weight.

    u* = argmin |u - z|_Q^2 / 2     subject to  |u - c| <= r.

Outside the ball ``d = u* - c`` solves ``(1 + m w) d = z - c`` with ``|d| = r``. The multiplier m >= 0 is the root of
the secular equation ``1 / r - 1 / |d(m)| = 0``. It is almost linear in m, so Newton's method takes few steps. One more
step, differentiated, carries the gradients. The tangent is ``D - k (D d)^T`` with ``D = 1 / (1 + m w)`` and
``k = D w d / (d . D w d)``, curvature included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probhard._util.numerics import TINY, TOLERANCE, floored
from probhard._util.tensors import broadcast, safe_sqrt
from probhard.constraints.ball import Ball
from probhard.laws.covariance import Covariance, Diagonal
from probhard.projection.base import Options, Projector, Solution, Stats
from probhard.projection.parts import Parts
from probhard.tangent import Differential

STEPS = 60


class BallProjector(Projector):
    """Projects on one ball without other constraints.

    Args:
        parts: The constraint; its only part is a ``Ball``.
        weight: Metric weight over (*batch, n).
        options: Not used.
    """

    moments_from = "monte-carlo"
    has_equalities = False

    def __init__(self, parts: Parts, weight: Diagonal, options: Options) -> None:
        (ball,) = parts.curved
        assert isinstance(ball, Ball)
        self.ball, self.weight = ball, weight.variance.to(torch.float64)

    def solve(self, z: Tensor, start: Tensor | None = None) -> Solution:
        offset = self.ball.offset(z.to(torch.float64))
        radius = self.ball.radius.to(offset).unsqueeze(-1)
        lead = broadcast(offset.shape[:-1], self.weight.shape[:-1], radius.shape[:-1])
        offset = offset.expand(*lead, offset.shape[-1])
        largest = self.weight.detach().amax(-1, keepdim=True)
        weight = floored(self.weight)  # a variable without variance moves only if it must
        unit = torch.where(largest > 0, weight / largest.clamp(min=TINY), 1.0)
        outside = offset.norm(dim=-1, keepdim=True) > radius
        inside, offset = offset, torch.where(outside, offset, 1.0)  # no derivative of a root at the center
        with torch.no_grad():
            multiplier, steps = _root(offset.detach(), unit.detach(), radius.detach(), outside)
        shrunk = offset / (1 + multiplier * unit)
        size = _size(shrunk)
        slope = (shrunk.square() * unit / (1 + multiplier * unit)).sum(-1, keepdim=True) / size.pow(3)
        step = (1 / size - 1 / radius.clamp(min=TINY)) / slope.clamp(min=TINY)
        step = torch.where(outside & (radius > 0), step, 0.0)
        moved = offset / (1 + (multiplier - step) * unit)
        direction = moved * (radius / _size(moved))
        value = torch.where(outside, direction, inside)
        nearest = value if self.ball.center is None else value + self.ball.center.to(value)
        nearest = nearest.to(z.dtype)
        residual = self.ball.relative_violation(nearest.detach())
        tangent = BallTangent(value.detach(), (1 + multiplier * unit).reciprocal(), unit.detach(), outside)
        return Solution(nearest, tangent, Stats(steps, residual, residual <= TOLERANCE[z.dtype]))


class BallTangent(Differential):
    """``D - k (D d)^T`` outside the ball, the identity inside.

    Args:
        d: Offset of the solution from the center, (*batch, n).
        shrink: The diagonal of D, (*batch, n).
        weight: The diagonal of W, (*batch, n).
        outside: Whether the point was outside, (*batch, 1).
    """

    def __init__(self, d: Tensor, shrink: Tensor, weight: Tensor, outside: Tensor) -> None:
        self.d, self.outside = d, outside
        self.shrink = torch.where(outside, shrink, 1.0)
        pushed = self.shrink * weight * d
        total = (d * pushed).sum(-1, keepdim=True)
        self.gain = torch.where(outside & (total > 0), pushed / total.clamp(min=TINY), 0.0)
        self.point = outside & (total <= 0)  # radius 0: a single point, which does not move

    @property
    def shape(self) -> torch.Size:
        return self.d.shape

    def apply(self, x: Tensor) -> Tensor:
        scaled = self.shrink * x.to(torch.float64)
        moved = scaled - self.gain * (self.d * scaled).sum(-1, keepdim=True)
        return torch.where(self.point, 0.0, moved).to(x.dtype)

    def transpose(self, x: Tensor) -> Tensor:
        double = torch.where(self.point, 0.0, x.to(torch.float64))
        return (self.shrink * (double - self.d * (self.gain * double).sum(-1, keepdim=True))).to(x.dtype)

    def variance(self, cov: Covariance) -> Tensor:
        if isinstance(cov, Diagonal):
            scaled = self.shrink.square() * cov.variance.to(torch.float64)
            own = self.d.square() * scaled
            others = (own.sum(-1, keepdim=True) - own).clamp(min=0)
            variance = scaled * (1 - self.gain * self.d).square() + self.gain.square() * others
            return torch.where(self.point, 0.0, variance).to(cov.dtype)
        return super().variance(cov)


def _root(offset: Tensor, weight: Tensor, radius: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """The multiplier m (*batch, 1) by Newton's method, and the number of steps (*batch,)."""
    multiplier = torch.zeros_like(offset[..., :1])
    steps = torch.zeros(offset.shape[:-1], dtype=torch.int64, device=offset.device)
    open_ = outside & (radius > 0)
    for _ in range(STEPS):
        if not bool(open_.any()):
            break
        shrink = 1 / (1 + multiplier * weight)
        d = offset * shrink
        size = d.norm(dim=-1, keepdim=True)
        slope = (d.square() * weight * shrink).sum(-1, keepdim=True)
        step = (size - radius) / radius.clamp(min=TINY) * size.square() / slope.clamp(min=TINY)
        fresh = torch.where(open_, (multiplier + step).clamp(min=0), multiplier)
        steps = steps + open_.squeeze(-1).to(torch.int64)
        open_ = open_ & ((fresh - multiplier).abs() > 1e-15 * fresh)
        multiplier = fresh
    return multiplier, steps


def _size(d: Tensor) -> Tensor:
    """The norm, with gradient 0 at 0."""
    return safe_sqrt(d.square().sum(-1, keepdim=True)).clamp(min=TINY)
