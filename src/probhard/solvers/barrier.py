"""Active bounds and functions at the nearest point, by a primal-dual barrier method, for few variables.

With functions f of v = (u, s), slacks s of inequalities included, the problem with the barrier parameter m is

    minimise  |u - z|_Q^2 / 2 - m sum log(v - lower) - m sum log(upper - v)     subject to  f(v) = 0.

Each step is that of ``sqp_dense`` under the diagonal ``D = Q + a / (v - lower) + b / (upper - v)`` with the multipliers
a and b of the bounds, shortened until an l1 merit falls. Starts are inside all bounds, where a function may have a
gradient although it has none at the nearest vertex. The result is the ``Faces`` on which m tends to 0; ``sqp`` then
finds the point there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.laws.covariance import Diagonal
from probhard.solvers import sqp_dense
from probhard.solvers.batched import Batched
from probhard.solvers.linearised import Linearised
from probhard.solvers.quadratic import Faces, QuadraticProblem

ROUNDS = (8, 8, 8, 8, 16, 16)  # numbers of steps; points that are done are dropped in between
INSIDE = 0.1  # distance of starts from their bounds, relative to the way to go
FIRST, LAST = 0.1, 1e-9  # barrier parameters, relative to the squared way
SHRINK, POWER = 0.2, 1.5  # the next parameter: at most this share, and this power
BOUNDARY = 0.99  # share of the way to a bound that one step may go
HALVINGS = 12
PATIENCE = 6  # steps with one parameter
CLOSE = 1e8  # how far multipliers may be from ``m / gap``
SMALL = 1e-3  # smallest way, relative to the size of the point
ARMIJO = 1e-4


@dataclass(frozen=True)
class Central(Batched):
    """Iterates along the central path, over the leading dimension L."""

    v: Tensor  # (L, N)
    low: Tensor  # multipliers of lower bounds, (L, N)
    high: Tensor  # multipliers of upper bounds, (L, N)
    barrier: Tensor  # m, (L,)
    penalty: Tensor  # of the merit, (L,)
    multiplier: Tensor  # of f, (L, q)
    steps: Tensor  # (L,)
    since: Tensor  # steps with this m, (L,)
    done: Tensor  # (L,) bool


@torch.no_grad()
def faces(equation: NonlinearEquality, problem: QuadraticProblem, start: Tensor) -> Faces:
    """Find the sides at the nearest points.

    Args:
        equation: Functions of (u, s), with the slacks s of inequalities added.
        problem: Centre, weights and bounds of (u, s); its rows are ignored.
        start: Where to begin, (L, n).

    Returns:
        The faces; ``value`` holds the last (u, s), (L, N).
    """
    search = Path.of(equation, problem, start)
    whole = search.begin()
    index = torch.arange(len(start), device=start.device)
    for count in ROUNDS:
        part = search.select(index, len(start))
        own = whole.take(index)
        for _ in range(count):
            own = part.advanced(own)
            if bool(own.done.all()):
                break
        whole = whole.placed(index, own)
        index = torch.nonzero(~whole.done).squeeze(-1)
        if len(index) == 0:
            break
    return search.sides(whole)


@dataclass(frozen=True)
class Path:
    """The problem whose central path is followed; tensors over the leading dimension L."""

    equation: NonlinearEquality
    problem: QuadraticProblem
    start: Tensor  # inside the bounds, (L, N)
    inverse: Tensor  # the diagonal of Q; 0 for slacks, (L, N)
    unit: Tensor  # squared length of a step that counts as 1, (L, N)
    way: Tensor  # squared way to go in these units, (L,)
    free: Tensor  # (L, N) bool

    @classmethod
    def of(cls, equation: NonlinearEquality, problem: QuadraticProblem, start: Tensor) -> Path:
        """The path from the point inside the bounds next to a start (L, n)."""
        n, w = start.shape[-1], problem.weight
        costed = torch.arange(w.shape[-1], device=w.device) < n
        free = (problem.upper > problem.lower) & (w > 0)
        inverse = torch.where(costed & (w > 0), 1 / torch.where(w > 0, w, 1.0), 0.0)
        slack = problem.centre[..., n:]
        clipped = torch.cat([start.clamp(problem.lower[..., :n], problem.upper[..., :n]), slack], -1)
        own = torch.where(costed & free, w, 0.0)
        near = Linearised.at(equation, clipped, Diagonal(own))
        gram = (near.tangent.core.dense().square() * own.unsqueeze(-2)).sum(-1)  # squared lengths of rows
        unequal = near.tangent.core.dense()[..., n:].abs() > 0  # (L, q, slacks): the function of each slack
        scale = (gram.unsqueeze(-1) * unequal).sum(-2)
        unit = torch.cat([own[..., :n], torch.where(scale > 0, scale, 1.0)], -1)
        offset = ((clipped - problem.centre).square() * inverse).sum(-1)
        needed = near.images(near.h)[0].square() * inverse
        size = (problem.centre.square() * inverse).sum(-1)
        count = own.gt(0).sum(-1).clamp(min=1)
        way = torch.maximum(torch.maximum(offset, needed.sum(-1)), SMALL**2 * size) / count
        way = torch.where(torch.isfinite(way) & (way > 0), way, 1.0)
        gap = INSIDE * (way.unsqueeze(-1) * unit).sqrt()
        inside = torch.minimum(gap, 0.25 * (problem.upper - problem.lower))
        room = -equation.residual(clipped)
        clipped = torch.cat([clipped[..., :n], (room.unsqueeze(-1) * unequal).sum(-2)], -1)
        point = clipped.clamp(problem.lower + inside, problem.upper - inside)
        point = torch.where(free, point, clipped)
        return cls(equation, problem, point, inverse, unit, way, free)

    def select(self, index: Tensor, count: int) -> Path:
        """The problems with these indices (k,) of ``count``."""
        equation = self.equation.select(index, torch.Size((count,)))
        assert equation is not None
        tensors = (x.index_select(0, index) for x in (self.start, self.inverse, self.unit, self.way, self.free))
        return Path(equation, self.problem.select(index), *tensors)

    def begin(self) -> Central:
        """The start of the path."""
        barrier = FIRST * self.way
        below, above = self.gaps(self.start)
        zero = torch.zeros_like(barrier)
        multiplier = torch.zeros_like(self.equation.residual(self.start))
        count = zero.to(torch.int64)
        low, high = barrier.unsqueeze(-1) / below, barrier.unsqueeze(-1) / above
        return Central(self.start, low, high, barrier, zero, multiplier, count, count, zero.bool())

    def gaps(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Distances to lower and upper bounds, (L, N); infinite for variables that do not move."""
        below = torch.where(self.free, v - self.problem.lower, torch.inf)
        return below, torch.where(self.free, self.problem.upper - v, torch.inf)

    def advanced(self, state: Central) -> Central:
        """One step; the barrier parameter falls where its problem is solved, or after some steps."""
        v, m = state.v, state.barrier.unsqueeze(-1)
        below, above = self.gaps(v)
        pull = state.low / below + state.high / above
        weight = torch.where(self.free, 1 / (self.inverse + pull).clamp(min=TINY), 0.0)
        near = Linearised.at(self.equation, v, Diagonal(weight))
        slope = torch.where(self.free, (v - self.problem.centre) * self.inverse - m / below + m / above, 0.0)
        multiplier = near.multiplier(near.h - near.push(weight * slope)).nan_to_num(0.0, 0.0, 0.0)
        curvature = sqp_dense.hessian(self.equation, v, multiplier)
        step = sqp_dense.newton_step(near, curvature, slope)[0].nan_to_num(0.0, 0.0, 0.0)
        penalty = torch.maximum(state.penalty, 1.5 * multiplier.abs().amax(-1))
        length = _longest(step, below, above)
        fresh, good = self._shortened(v, near.h, slope, step, length, penalty, state.barrier)
        low = _dual(state.low, below, step, m, fresh - self.problem.lower)
        high = _dual(state.high, above, -step, m, self.problem.upper - fresh)
        decrement = torch.where(weight > 0, step.square() / weight.clamp(min=TINY), 0.0).sum(-1)
        solved = (decrement <= 0.5 * state.barrier * self.free.sum(-1)) | (state.since >= PATIENCE) | ~good
        relative = state.barrier / self.way
        lower = torch.minimum(SHRINK * relative, relative**POWER).clamp(min=LAST) * self.way
        finished = solved & (relative <= LAST * 1.001)
        keep = state.done
        moved = Central(
            torch.where(keep.unsqueeze(-1), v, fresh),
            torch.where(keep.unsqueeze(-1), state.low, low),
            torch.where(keep.unsqueeze(-1), state.high, high),
            torch.where(keep | ~solved, state.barrier, lower),
            torch.where(solved, 0.0, penalty),
            torch.where(keep.unsqueeze(-1), state.multiplier, multiplier),
            state.steps + (~keep).to(torch.int64),
            torch.where(solved, 0, state.since + 1),
            keep | finished,
        )
        return moved

    def _shortened(
        self, v: Tensor, f: Tensor, slope: Tensor, step: Tensor, length: Tensor, penalty: Tensor, barrier: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The point after a step that is halved until the merit falls, and where it does, (L,)."""
        before = self._merit(v, f, penalty, barrier)
        descent = ((slope * step).sum(-1) - penalty * f.abs().sum(-1)).clamp(max=0)
        open_, fresh = torch.ones_like(before, dtype=torch.bool), v
        for _ in range(HALVINGS):
            trial = v + length.unsqueeze(-1) * step
            after = self._merit(trial, self.equation.residual(trial), penalty, barrier)
            good = open_ & (after <= before + ARMIJO * length * descent + 1e-13 * before.abs())
            fresh, open_ = torch.where(good.unsqueeze(-1), trial, fresh), open_ & ~good
            if not bool(open_.any()):
                break
            length = torch.where(open_, 0.5 * length, length)
        return fresh, ~open_

    def _merit(self, v: Tensor, f: Tensor, penalty: Tensor, barrier: Tensor) -> Tensor:
        below, above = self.gaps(v)
        distance = 0.5 * ((v - self.problem.centre).square() * self.inverse).sum(-1)
        walls = (
            torch.where(torch.isfinite(below), below, 1.0).log() + torch.where(torch.isfinite(above), above, 1.0).log()
        )
        value = distance - barrier * walls.sum(-1) + penalty * f.abs().sum(-1)
        return value.nan_to_num(torch.inf, torch.inf, torch.inf)

    def sides(self, state: Central) -> Faces:
        """The sides that the path tends to: bounds whose multiplier outweighs their distance."""
        below, above = self.gaps(state.v)
        at_low = torch.isfinite(below) & (below < state.low * self.unit)
        at_high = torch.isfinite(above) & (above < state.high * self.unit)
        side = at_high.to(torch.int8) - (at_low & ~at_high).to(torch.int8)
        side = torch.where(self.problem.lower == self.problem.upper, torch.ones_like(side), side)
        return Faces(side, state.v, state.steps, state.done, state.multiplier)


def _longest(step: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """The longest step up to 1 that stays inside the bounds, (L,)."""
    room = torch.where(step < 0, below, above)
    ratio = torch.where(step == 0, torch.inf, BOUNDARY * room / step.abs().clamp(min=TINY))
    return ratio.amin(-1).clamp(max=1.0)


def _dual(own: Tensor, gap: Tensor, step: Tensor, m: Tensor, after: Tensor) -> Tensor:
    """Multipliers of one kind of bounds after a step towards ``multiplier * gap = m``, (L, N)."""
    change = m / gap - own - own / gap * step
    falling = torch.where(change < 0, BOUNDARY * own / (-change).clamp(min=TINY), torch.inf).amin(-1).clamp(max=1.0)
    fresh = own + falling.unsqueeze(-1) * change
    centre = torch.where(torch.isfinite(gap), m / after.clamp(min=TINY), 0.0)
    return torch.minimum(torch.maximum(fresh, centre / CLOSE), centre * CLOSE)
