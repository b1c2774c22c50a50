"""The law of a normal vector projected on one row, bounds and an L1 ball, by the cavity method.

    a . u = b,   l <= u <= h,   sum |u_i - c_i| <= r,   diagonal weights w, independent variables z_i ~ N(m_i, v_i).

Given the multipliers y of the row and m >= 0 of the ball, every variable has a soft threshold (``solvers.l1_row``).
With ``e = (a_i, +-1)`` for values above and below c_i, cavity multipliers ``k_i ~ N(mean, C_i)`` that variable i did
not influence, and their response ``G_i`` to it, the law of one variable has two sides,

    u_i = c_i + clip(x+, 0, h_i - c_i) + clip(x-, l_i - c_i, 0),      x = (z_i - c_i - w_i e . k_i) / (1 + w_i e.G_i e),

each clipped normal; both are 0 with the probability that u_i stays at c_i. Let ``M_i = -E df_i / dk_i`` with
``f_i = (a_i (u_i - c_i), |u_i - c_i|)``. To first order the multipliers solve a linear system of all ``f_i``, whose
responses and noise are

    R_i = (I - M_i G_i)^-1 M_i,    N_i = (I - M_i G_i)^-1 (Cov f_i - M_i C_i M_i) (I - G_i M_i)^-1,
    G_i = (sum_(j != i) R_j + E)^-1,    C_i = G_i (sum_(j != i) N_j + n) G_i,    k_i = (y, m) - G_i E f_i.

The multiplier of the ball is the positive part of its own normal field, with gate E and noise n as in
``laws.mean_field``. Its mean and y are the roots of the expected row and radius. Bounds that row and ball imply are
added. Gradients are those of the fixed point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probhard.laws._threshold_adjoint import adjoint
from probhard.laws._threshold_steps import placed, settle

STEPS = 100  # most iterations
WHOLE = 16  # full steps; later ones may go half of the way
CLOSE = 1e-5  # step in sds at which an element has converged
COOLING = 0.1  # what the added variance of an element far from the set is multiplied by in each step
NEARLY = 1e-6  # slope of an implied bound that counts as none
ADJOINT = 1e-6  # relative step at which gradients have converged


@dataclass(frozen=True)
class Thresholds:
    """Laws before the projection and the set, relative to the centre c, flattened over the batch."""

    loc: Tensor  # m - c, (B, n)
    variance: Tensor  # v, (B, n)
    weight: Tensor  # w, (B, n)
    lower: Tensor  # l - c, (B, n)
    upper: Tensor  # h - c, (B, n)
    row: Tensor  # a, (n,); 0 for no row
    right: Tensor  # b - a . c, (B,)
    radius: Tensor | None = None  # r, (B,); None for no ball


@dataclass(frozen=True)
class Sides:
    """Normal laws of every variable before clipping, relative to c; without a ball there is one side."""

    loc: Tensor  # (sides, B, n)
    scale: Tensor  # (sides, B, n)
    lower: Tensor  # (sides, B, n)
    upper: Tensor  # (sides, B, n)
    settled: Tensor  # whether the fixed point was found, (B,) bool


def soft_threshold(problem: Thresholds) -> Sides:
    """The laws of the projected variables.

    Args:
        problem: The laws and their set, in float64.
    """
    lower, upper = (bound.unsqueeze(-1) for bound in _implied(problem))
    if problem.radius is None:
        bounds = torch.cat([lower, upper], -1)
        goals = torch.stack([problem.right, torch.zeros_like(problem.right)], -1)
    else:
        parts = (lower.clamp(min=0), upper.clamp(min=0), lower.clamp(max=0), upper.clamp(max=0))
        bounds = torch.cat(parts, -1)
        goals = torch.stack([problem.right, problem.radius], -1)
    x = torch.stack([problem.loc, problem.variance, problem.weight], -1)
    found, settled = _Settled.apply(x, bounds, goals, problem.row.detach())
    loc, scale = found.unflatten(-1, (-1, 2)).unbind(-1)
    ends = bounds.unflatten(-1, (-1, 2)).unbind(-1)
    loc, scale, low, high = (part.movedim(-1, 0) for part in (loc, scale, *ends))
    return Sides(loc, scale, low, high, settled)


def _implied(problem: Thresholds) -> tuple[Tensor, Tensor]:
    """The bounds, and those that the row and the ball imply: ``|v| + |b - a_i v| / max_(j != i) |a_j| <= r``."""
    lower, upper, radius = problem.lower, problem.upper, problem.radius
    if radius is None:
        return lower, upper
    radius, size = radius.unsqueeze(-1), problem.row.abs()
    if not bool(size.any()):
        return torch.maximum(lower, -radius), torch.minimum(upper, radius)
    first, second = size.topk(2).values
    other = torch.where(size < first, first, second)  # the largest of the others
    share, goal = problem.row / other, problem.right.unsqueeze(-1) / other
    for sign in (1.0, -1.0):
        slope = 1 + sign * share
        steep, room = slope > NEARLY, slope.clamp(min=NEARLY)
        upper = torch.where(steep, torch.minimum(upper, (radius + sign * goal) / room), upper)
        lower = torch.where(steep, torch.maximum(lower, -(radius - sign * goal) / room), lower)
    return lower, torch.maximum(lower, upper)


class _Settled(torch.autograd.Function):
    """Locations and scales (B, n, 2 sides) of the fixed point, and whether it was found."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bounds: Tensor, goals: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        data = [part.contiguous().numpy(force=True) for part in (x, bounds, row, goals)]
        count, n, sides = x.shape[0], x.shape[1], bounds.shape[-1] // 2
        state, last, settled = np.empty((count, 8, n)), np.empty((count, 2)), np.empty(count, np.bool_)
        limits = (STEPS, WHOLE, CLOSE, COOLING)
        settle(*data, sides, limits, state, last, settled)
        out = np.zeros((count, n, 2 * sides))
        found = np.flatnonzero(settled)
        if len(found) < count:
            data, state, last = [part if part is data[2] else part[found] for part in data], state[found], last[found]
        own = np.empty((len(found), n, 2 * sides))
        placed(data[0], data[2], sides, state, last, own)
        out[found] = own
        done = torch.from_numpy(settled).to(x.device)
        ctx.known, ctx.sides, ctx.found = (*data[:3], state, last), sides, found
        ctx.mark_non_differentiable(done)
        return torch.from_numpy(out).to(x), done

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        outer = gradients[0].numpy(force=True)
        x, bounds, row, state, last = ctx.known
        made = [np.zeros((len(outer), *shape)) for shape in (x.shape[1:], bounds.shape[1:], (2,))]
        own = [np.zeros((len(x), *part.shape[1:])) for part in made]
        adjoint(x, bounds, row, ctx.sides, state, last, outer[ctx.found], STEPS, ADJOINT, *own)
        for part, found in zip(made, own):
            part[ctx.found] = found
        to_x, to_bounds, to_goals = (torch.from_numpy(part).to(gradients[0]) for part in made)
        return to_x, to_bounds, to_goals, None
