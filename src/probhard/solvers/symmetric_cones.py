"""Nearest points of affine maps in products of symmetric cones, by augmented Lagrangians.

    min |h|^2 / 2     subject to  s = g + G h  in K = K_1 x K_2 x ...

Each K_i is {0}, the non-negative numbers, a second-order or a semidefinite cone. For multipliers y and a penalty c the
augmented Lagrangian in h is ``|h|^2 / 2 + |P(y - c s)|^2 / (2 c)`` with the projection P on the dual cone. It is
strongly convex. Its gradient ``h - G^T P(y - c s)`` is semismooth, so Newton's method with a line search converges
quadratically. Then ``y = P(y - c s)``, and c grows. At the end ``h = G^T y`` and ``s = Pi_K(s - y)`` hold to rounding,
which proves h. ``cone_frames`` has the derivatives of Pi_K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard.solvers.cone_frames import Frame, frame, nearest

OUTER, INNER, SEARCH = 40, 40, 12
PENALTIES = (10.0, *[1e2] * 3, *[1e3] * 3, *[1e4] * 3, *[1e5] * 3, 1e6)  # large ones round multipliers: only if needed
NEAR = 1e-10  # Newton steps this short, relative to the data, are not searched along
EXACT = 2e-16  # ... and this short, times the penalty, end the search for a minimum
ACCURATE = 1e-13  # residual, relative to the data, at which iterations end
SETTLED = 1e-9  # largest residual of a solution: a smaller one cannot be reached where multipliers are huge
STALLED = 4  # rounds without progress after which iterations end, if settled or if the penalty is the last


@dataclass(frozen=True)
class Block:
    """Consecutive coordinates in one cone.

    Args:
        kind: ``"zero"``, ``"non-negative"``, ``"second-order"`` or ``"semidefinite"``.
        size: Number of coordinates.
    """

    kind: str
    size: int


@dataclass(frozen=True)
class Cones:
    """A product of cones."""

    blocks: tuple[Block, ...]

    def frames(self, w: Tensor, tolerance: float = 0.0) -> list[Frame]:
        """The frames of w (k, m), by block."""
        return [frame(b.kind, part, tolerance) for b, part in zip(self.blocks, self.split(w, -1))]

    def nearest(self, w: Tensor) -> Tensor:
        """The projection of w (k, m)."""
        return torch.cat([nearest(b.kind, part) for b, part in zip(self.blocks, self.split(w, -1))], -1)

    def split(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Split x by block along a dimension."""
        return x.split([b.size for b in self.blocks], dim)

    def turned(self, frames: list[Frame], x: Tensor) -> Tensor:
        """Write x (k, m, n) in the eigenvectors of the frames."""
        return torch.cat([found.turned(part) for found, part in zip(frames, self.split(x, -2))], -2)

    def scales(self, rows: Tensor) -> Tensor:
        """Factors (k, m) that make the rows (k, m, n) of each block at most 1 long: one for all rows of a cone."""
        length, found = rows.norm(dim=-1), []
        for b, part in zip(self.blocks, self.split(length, -1)):
            whole = part if b.kind in ("zero", "non-negative") else part.amax(-1, keepdim=True).expand_as(part)
            found.append(torch.where(whole > 0, 1 / whole.clamp(min=TINY), 1.0))
        return torch.cat(found, -1)


@dataclass(frozen=True)
class Nearest:
    """Solutions, one per problem.

    Args:
        h: The variables, (k, n).
        y: Multipliers, (k, m).
        steps: Newton steps, (k,).
        settled: Whether the optimality conditions hold, (k,).
    """

    h: Tensor
    y: Tensor
    steps: Tensor
    settled: Tensor


def solve(cones: Cones, G: Tensor, g: Tensor) -> Nearest:
    """Solve k problems.

    Args:
        cones: K.
        G: Rows of length at most 1, (k, m, n).
        g: Values at h = 0, (k, m).
    """
    unit = g.abs().amax(-1, keepdim=True).clamp(min=TINY)
    h, y = g.new_zeros(len(g), G.shape[-1]), torch.zeros_like(g)
    steps = torch.zeros(len(g), dtype=torch.int64)
    best = torch.full((len(g),), torch.inf, dtype=g.dtype)
    stalled, open_ = torch.zeros_like(steps), torch.arange(len(g))
    x, dual, start = h.clone(), y.clone(), g / unit
    for outer in range(OUTER):
        if not len(open_):
            break
        penalty = PENALTIES[min(outer, len(PENALTIES) - 1)]
        rows, offset = G[open_], start[open_]
        found, used, last = _minimised(cones, rows, offset, x[open_], dual[open_], penalty, best[open_])
        s = offset + _times(rows, found)
        fresh = _dual(cones, s, dual[open_], penalty)
        residual = size_of(s - cones.nearest(s - fresh))
        residual = torch.maximum(residual, last)
        better = residual < best[open_]
        stalled[open_] = torch.where(residual < 0.5 * best[open_], 0, stalled[open_] + 1)
        h[open_[better]], y[open_[better]] = found[better], fresh[better]
        best[open_] = torch.minimum(residual, best[open_])
        x[open_], dual[open_], steps[open_] = found, fresh, steps[open_] + used
        final = (best[open_] <= 0.1 * SETTLED) | (outer >= len(PENALTIES) + STALLED)
        open_ = open_[(best[open_] > ACCURATE) & ~(final & (stalled[open_] >= STALLED))]
    return Nearest(h * unit, y * unit, steps, best <= SETTLED)


def _minimised(
    cones: Cones, G: Tensor, g: Tensor, h: Tensor, y: Tensor, penalty: float, residual: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Minimise the augmented Lagrangian from h.

    Returns:
        The minimum (k, n), the number of steps, and the length of the last one: slopes are rounded more coarsely, by
        the penalty times the values, but only in directions that the penalty holds.
    """
    h, steps = h.clone(), torch.zeros(len(h), dtype=torch.int64)
    last = torch.full((len(h),), torch.inf, dtype=h.dtype)
    enough = (1e-3 * residual.clamp(max=1.0)).clamp(min=EXACT * penalty)
    open_, identity = torch.arange(len(h)), torch.eye(h.shape[-1], dtype=h.dtype)
    for _ in range(INNER):
        rows, offset, multiplier, at = G[open_], g[open_], y[open_], h[open_]
        s = offset + _times(rows, at)
        frames = cones.frames(s - multiplier / penalty)
        dual = penalty * (torch.cat([f.nearest for f in frames], -1) - s) + multiplier
        slope = at - _times(rows.mT, dual)
        turned, lost = cones.turned(frames, rows), torch.cat([f.lost for f in frames], -1)
        hessian = identity + penalty * turned.mT @ (lost.unsqueeze(-1) * turned)
        step = -torch.cholesky_solve(slope.unsqueeze(-1), torch.linalg.cholesky(hessian)).squeeze(-1)
        moved = size_of(step)
        at, kept = _searched(cones, rows, offset, multiplier, penalty, at, step, slope, dual)
        falling = (moved > NEAR) | (moved < 0.5 * last[open_])  # else only rounding is left
        h[open_], last[open_] = at, torch.where(kept, moved, last[open_])
        steps[open_] += 1
        open_ = open_[kept & falling & (moved > enough[open_])]
        if not len(open_):
            break
    return h, steps, last


def _searched(
    cones: Cones,
    rows: Tensor,
    offset: Tensor,
    multiplier: Tensor,
    penalty: float,
    at: Tensor,
    step: Tensor,
    slope: Tensor,
    dual: Tensor,
) -> tuple[Tensor, Tensor]:
    """The longest halved step that reduces the augmented Lagrangian or halves its slope, and whether there is one."""
    value = 0.5 * at.square().sum(-1) + 0.5 * dual.square().sum(-1) / penalty
    fall, first = (slope * step).sum(-1), size_of(slope)
    length, kept = torch.ones_like(value), torch.zeros_like(value, dtype=torch.bool)
    found = at.clone()
    left, near = torch.arange(len(at)), size_of(step) <= NEAR
    for _ in range(SEARCH):
        if not len(left):
            break
        trial = at[left] + length[left].unsqueeze(-1) * step[left]
        own = _dual(cones, offset[left] + _times(rows[left], trial), multiplier[left], penalty)
        reached = 0.5 * trial.square().sum(-1) + 0.5 * own.square().sum(-1) / penalty
        remaining = size_of(trial - _times(rows[left].mT, own))
        good = (
            (reached <= value[left] + 1e-4 * length[left] * fall[left]) | (remaining <= 0.5 * first[left]) | near[left]
        )
        found[left[good]], kept[left[good]] = trial[good], True
        left = left[~good]
        length[left] *= 0.5
    return found, kept


def _dual(cones: Cones, s: Tensor, y: Tensor, penalty: float) -> Tensor:
    """``P(y - c s)`` with the projection on the dual cone."""
    return penalty * (cones.nearest(s - y / penalty) - s) + y


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


def size_of(x: Tensor) -> Tensor:
    """The largest entry of x (k, n) in absolute value, (k,)."""
    return x.abs().amax(-1)
