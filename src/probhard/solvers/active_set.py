"""Primal-dual active sets: a semismooth Newton method on the dual of the programme.

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
from probhard.solvers.quadratic import HELD, NEAR, Faces, Programme

QUICK, SLOW, SINGLE = 12, 20, 200
CLOSE = 1e-5  # how far the point on a face may be from the central path's end, relative to its size


@torch.no_grad()
def nearest(programme: Programme, side: Tensor | None = None) -> Faces:
    """The sides of the optimal points; ``done`` is False where none were found."""
    outside = (programme.centre > programme.upper).to(torch.int8) - (programme.centre < programme.lower).to(torch.int8)
    side = torch.where(programme.weight == 0, outside, 0 if side is None else side).to(torch.int8)
    found = _iterate(programme, side, QUICK)
    left = torch.nonzero(~found.done).squeeze(-1)
    if len(left):
        found = found.updated(left, _from_inside(programme.select(left)))
    return found


def _from_inside(programme: Programme) -> Faces:
    """Points on the faces that an interior point method leads to; where these are not its points, active sets again.

    Multipliers need not be unique (a bound and a row may say the same), so signs cannot be asked for here: the interior
    point has proved optimality, and the point on its face is compared with it.
    """
    inner = central(programme)
    slow = torch.nonzero(~inner.done).squeeze(-1)
    if len(slow):
        inner = inner.updated(slow, central(programme.select(slow), patient=True))
    part = replace(programme, centre=programme.auxiliary(inner.value, programme.centre))
    _, face = _step(part, replace(inner, done=torch.zeros_like(inner.done)))
    value = torch.where(inner.side == 0, face.value, inner.value)
    apart = (value - inner.value).abs().where(programme.weight > 0, 0.0)
    if programme.costed is not None:
        apart = apart.where(programme.costed, 0.0)
    size = torch.maximum(inner.value, programme.auxiliary(inner.value, programme.centre).abs()).abs().amax(-1)
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


def _iterate(programme: Programme, side: Tensor, steps: int, single: bool = False) -> Faces:
    """Up to so many changes of sides; finished elements are left alone, and put away when they are many."""
    if forest.suits(programme) and not single:
        return forest.iterate(programme, side, steps)
    count = torch.zeros(len(side), dtype=torch.int64, device=side.device)
    whole = Faces(side, programme.centre, count, count > 0, torch.zeros_like(programme.right))
    index = torch.arange(programme.count, device=side.device)
    part, open_ = programme, whole
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


def _step(programme: Programme, faces: Faces, single: bool = False) -> tuple[Programme, Faces]:
    lower, upper, w, side = programme.lower, programme.upper, programme.weight, faces.side
    free = side == 0
    goal = programme.centre if programme.linear is None else programme.centre - w * programme.linear
    point = torch.where(free, goal, torch.where(side < 0, lower, upper))
    pull, multiplier = torch.zeros_like(point), torch.zeros_like(programme.right)
    if programme.core is not None:
        factor = programme.core.factor(torch.where(free, w, HELD * programme.natural))
        multiplier = factor.solve(programme.core.apply(point) - programme.right)
        pull = programme.core.transpose(multiplier)
    shift = w * pull
    target = programme.auxiliary(point, goal) - shift
    if programme.costed is not None and programme.linear is not None:  # a held auxiliary variable pays its linear cost
        target = torch.where(programme.costed | free, target, target - w * programme.linear)
    near = NEAR * (goal.abs() + shift.abs())
    if programme.costed is not None:  # the multiplier of a held auxiliary variable is as uncertain as the others
        near = torch.where(programme.costed | free, near, NEAR * w * pull.abs().amax(-1, keepdim=True))
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
    if programme.costed is not None:  # proximal centres follow
        moved = torch.where(programme.costed, 0.0, (value - programme.centre).abs())
        lengths = torch.where(programme.costed, value.abs() + programme.centre.abs(), 0.0)
        size = lengths.amax(-1) + programme.right.abs().amax(-1)  # not their own: they may run away together
        settled &= moved.amax(-1) <= 1e-7 * size + 1e-300
        programme = replace(programme, centre=programme.auxiliary(value, programme.centre))
    done = faces.done | settled
    keep = faces.done.unsqueeze(-1)
    return programme, Faces(
        torch.where(keep | settled.unsqueeze(-1), side, fresh),
        torch.where(keep, faces.value, value),
        faces.steps + (~faces.done).to(torch.int64),
        done,
        torch.where(keep, faces.multiplier, multiplier),
    )
