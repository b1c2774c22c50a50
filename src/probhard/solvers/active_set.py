"""Primal-dual active sets: a semismooth Newton method on the dual of the problem.

Given the sides, the free variables are projected on the rows with the others held at their bounds,

    (B W_F B^T) y = B p - b,      p = the centre where free, the bound elsewhere,

and every variable is asked where it would go, ``t = c - w (B^T y + l)``: below its lower bound it belongs on that side,
above its upper bound on the other, between them it is free. No change of sides means optimality. Held variables keep
a tiny weight, so that rows without a free variable stay regular and ask for the release of the right ones. Elements
that do not settle get their sides from an interior point method, and go on from there. Where sides run in a circle,
only the last variable that asks for another side gets it: Murty's rule, which cannot. ``forest`` does the same steps
for trees.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from probhard.solvers import forest
from probhard.solvers.interior_point import central
from probhard.solvers.quadratic import HELD, NEAR, Faces, QuadraticProblem

QUICK, SLOW, SINGLE = 12, 20, 200
CLOSE = 1e-5  # how far the point on a face may be from the central path's end, relative to its size


@torch.no_grad()
def solve(problem: QuadraticProblem, side: Tensor | None = None) -> Faces:
    """The sides of the optimal points; ``done`` is False where none were found."""
    outside = (problem.centre > problem.upper).to(torch.int8) - (problem.centre < problem.lower).to(torch.int8)
    side = torch.where(problem.weight == 0, outside, 0 if side is None else side).to(torch.int8)
    found = _iterate(problem, side, QUICK)
    left = torch.nonzero(~found.done).squeeze(-1)
    if len(left):
        found = found.updated(left, _from_inside(problem.select(left)))
    return found


def _from_inside(problem: QuadraticProblem) -> Faces:
    """Points on the faces that an interior point method leads to; where these are not its points, active sets again.

    Multipliers need not be unique (a bound and a row may say the same), so signs cannot be asked for here: the interior
    point has proved optimality, and the point on its face is compared with it.
    """
    inner = central(problem)
    slow = torch.nonzero(~inner.done).squeeze(-1)
    if len(slow):
        inner = inner.updated(slow, central(problem.select(slow), patient=True))
    part = replace(problem, centre=problem.auxiliary(inner.value, problem.centre))
    _, face = _step(part, replace(inner, done=torch.zeros_like(inner.done)))
    value = torch.where(inner.side == 0, face.value, inner.value)
    apart = (value - inner.value).abs().where(problem.weight > 0, 0.0)
    if problem.costed is not None:
        apart = apart.where(problem.costed, 0.0)
    size = torch.maximum(inner.value, problem.auxiliary(inner.value, problem.centre).abs()).abs().amax(-1)
    good = inner.done & ~face.done & (apart.amax(-1) <= CLOSE * size)
    found = Faces(inner.side, value, inner.steps, face.done | good, face.multiplier)
    left = torch.nonzero(~found.done).squeeze(-1)
    if len(left):
        few = part.select(left)
        found = found.updated(left, _iterate(few, inner.side.index_select(0, left), SLOW))
        left = torch.nonzero(~found.done).squeeze(-1)
    if len(left):
        found = found.updated(left, _iterate(part.select(left), found.side.index_select(0, left), SINGLE, single=True))
    return found


def _iterate(problem: QuadraticProblem, side: Tensor, steps: int, single: bool = False) -> Faces:
    """Up to so many changes of sides; finished elements are left alone, and put away when they are many."""
    if forest.suits(problem) and not single:
        return forest.iterate(problem, side, steps)
    count = torch.zeros(len(side), dtype=torch.int64, device=side.device)
    whole = Faces(side, problem.centre, count, count > 0, torch.zeros_like(problem.right))
    index = torch.arange(problem.count, device=side.device)
    part, open_ = problem, whole
    for _ in range(steps):
        part, open_ = _step(part, open_, single)
        if bool(open_.done.all()):
            break
        if int(open_.done.sum()) * 2 > len(index):
            whole = whole.updated(index, open_)
            keep = torch.nonzero(~open_.done).squeeze(-1)
            index, part = index.index_select(0, keep), part.select(keep)
            open_ = Faces(*(value.index_select(0, keep) for value in vars(open_).values()))
    return whole.updated(index, open_)


def _step(problem: QuadraticProblem, faces: Faces, single: bool = False) -> tuple[QuadraticProblem, Faces]:
    lower, upper, w, side = problem.lower, problem.upper, problem.weight, faces.side
    free = side == 0
    goal = problem.centre if problem.linear is None else problem.centre - w * problem.linear
    point = torch.where(free, goal, torch.where(side < 0, lower, upper))
    pull, multiplier = torch.zeros_like(point), torch.zeros_like(problem.right)
    if problem.core is not None:
        factor = problem.core.factor(torch.where(free, w, HELD * problem.natural))
        multiplier = factor.solve(problem.core.apply(point) - problem.right)
        pull = problem.core.transpose(multiplier)
    shift = w * pull
    target = problem.auxiliary(point, goal) - shift
    if problem.costed is not None and problem.linear is not None:  # a held auxiliary variable pays its linear cost
        target = torch.where(problem.costed | free, target, target - w * problem.linear)
    near = NEAR * (goal.abs() + shift.abs())
    if problem.costed is not None:  # the multiplier of a held auxiliary variable is as uncertain as the others
        near = torch.where(problem.costed | free, near, NEAR * w * pull.abs().amax(-1, keepdim=True))
    below = target < lower + torch.where(side < 0, near, -near)
    above = target > upper - torch.where(side > 0, near, -near)
    fresh = above.to(torch.int8) - below.to(torch.int8)
    fresh = torch.where(lower == upper, torch.ones_like(fresh), fresh)
    value = target.clamp(lower, upper)
    asks = (fresh != side) & (w != 0)
    settled = ~asks.any(-1)
    if single:
        number = torch.arange(1, side.shape[-1] + 1, device=side.device)
        last = torch.where(asks, number, 0).amax(-1, keepdim=True)
        fresh = torch.where(number == last, fresh, side)
    if problem.costed is not None:  # proximal centres follow
        moved = torch.where(problem.costed, 0.0, (value - problem.centre).abs())
        lengths = torch.where(problem.costed, value.abs() + problem.centre.abs(), 0.0)
        size = lengths.amax(-1) + problem.right.abs().amax(-1)  # not their own: they may run away together
        settled &= moved.amax(-1) <= 1e-7 * size + 1e-300
        problem = replace(problem, centre=problem.auxiliary(value, problem.centre))
    done = faces.done | settled
    keep = faces.done.unsqueeze(-1)
    return problem, Faces(
        torch.where(keep | settled.unsqueeze(-1), side, fresh),
        torch.where(keep, faces.value, value),
        faces.steps + (~faces.done).to(torch.int64),
        done,
        torch.where(keep, faces.multiplier, multiplier),
    )
