"""Bounded quadratic problems by the primal-dual active set method, a semismooth Newton method on the dual.

It solves a ``QuadraticProblem`` for its ``Faces``. Given the sides, the free variables are projected on the rows while
the others are held at their bounds,

    (B W_F B^T) y = B p - b,      p = the centre where free, the bound elsewhere,

and each variable has the target ``t = c - w (B^T y + l)``. A target below the lower bound puts the variable on that
side, one above the upper bound on the other; between them it is free. Unchanged sides prove optimality.

Held variables keep a tiny weight. Rows without a free variable then stay regular and release the right ones. Elements
that do not settle continue from the sides of ``interior_point``. If sides cycle, only the last variable that asks for
another side gets it (Murty's rule, which cannot cycle). ``forest`` runs the same iteration on trees. What is left goes
to ``least_distance``, element by element.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard.solvers import forest, least_distance
from probhard.solvers.interior_point import central
from probhard.solvers.quadratic import HELD, NEAR, Faces, QuadraticProblem

QUICK, SLOW, SINGLE = 12, 20, 200
CLOSE = 1e-5  # how far the point on a face may be from the end of the central path, relative to its size
SETTLED = 1e-7  # change of the proximal centres at which they count as converged, relative to the problem's size


@torch.no_grad()
def solve(problem: QuadraticProblem, side: Tensor | None = None) -> Faces:
    """Find the sides of the optimal points.

    Args:
        problem: The problems, one per element of the leading dimension L.
        side: Sides to start from, (L, N); all variables free if None.

    Returns:
        The faces of the solutions; ``done`` is False where the method failed.
    """
    outside = (problem.centre > problem.upper).to(torch.int8) - (problem.centre < problem.lower).to(torch.int8)
    side = torch.where(problem.weight == 0, outside, 0 if side is None else side).to(torch.int8)
    faces = _iterate(problem, side, QUICK)
    if bool(faces.done.all()):
        return faces
    left = faces.unfinished
    faces = faces.placed(left, _from_inside(problem.select(left)))
    left = faces.unfinished
    if len(left):
        other = least_distance.solve(problem.select(left))
        faces = faces.placed(left, other.kept(other.done, faces.take(left)))
    return faces


def _from_inside(problem: QuadraticProblem) -> Faces:
    """Points on the faces where an interior point method ends; active sets again where the two disagree.

    Multipliers need not be unique, for example if a bound repeats a row, so their signs are not checked here. The
    interior point method has proved optimality, and the point on its face is compared with its own.
    """
    inner = central(problem)
    slow = inner.unfinished
    if len(slow):
        inner = inner.placed(slow, central(problem.select(slow), patient=True))
    part = replace(problem, centre=problem.auxiliary(inner.value, problem.centre))
    _, face = _step(part, replace(inner, done=torch.zeros_like(inner.done)))
    value = torch.where(inner.side == 0, face.value, inner.value)
    apart = (value - inner.value).abs().where(problem.weight > 0, 0.0)
    if problem.costed is not None:
        apart = apart.where(problem.costed, 0.0)
    size = torch.maximum(inner.value, problem.auxiliary(inner.value, problem.centre).abs()).abs().amax(-1)
    good = inner.done & ~face.done & (apart.amax(-1) <= CLOSE * size)
    faces = Faces(inner.side, value, inner.steps, face.done | good, face.multiplier)
    for steps, single in ((SLOW, False), (SINGLE, True)):
        left = faces.unfinished
        if len(left):
            faces = faces.placed(left, _iterate(part.select(left), faces.side.index_select(0, left), steps, single))
    return faces


def _iterate(problem: QuadraticProblem, side: Tensor, steps: int, single: bool = False) -> Faces:
    """Change sides up to ``steps`` times; finished elements are dropped once they are the majority."""
    if forest.suits(problem) and not single:
        return forest.iterate(problem, side, steps)
    count = torch.zeros(len(side), dtype=torch.int64, device=side.device)
    whole = Faces(side, problem.centre, count, count > 0, torch.zeros_like(problem.right))
    index = torch.arange(problem.count, device=side.device)
    part, faces = problem, whole
    for _ in range(steps):
        part, faces = _step(part, faces, single)
        if bool(faces.done.all()):
            break
        if int(faces.done.sum()) * 2 > len(index):
            whole = whole.placed(index, faces)
            keep = faces.unfinished
            index, part, faces = index.index_select(0, keep), part.select(keep), faces.take(keep)
    return whole.placed(index, faces)


def _step(problem: QuadraticProblem, faces: Faces, single: bool = False) -> tuple[QuadraticProblem, Faces]:
    """One change of sides; with ``single`` of one variable only. The problem gets new proximal centres."""
    target, near, multiplier = _targets(problem, faces.side)
    fresh = _sides(problem, faces.side, target, near)
    value = target.clamp(problem.lower, problem.upper)
    asks = (fresh != faces.side) & (problem.weight != 0)
    settled = ~asks.any(-1)
    if single:
        number = torch.arange(1, asks.shape[-1] + 1, device=asks.device)
        last = torch.where(asks, number, 0).amax(-1, keepdim=True)
        fresh = torch.where(number == last, fresh, faces.side)
    if problem.costed is not None:
        settled &= _resting(problem, value)
        problem = replace(problem, centre=problem.auxiliary(value, problem.centre))
    keep = faces.done.unsqueeze(-1)
    return problem, Faces(
        torch.where(keep | settled.unsqueeze(-1), faces.side, fresh),
        torch.where(keep, faces.value, value),
        faces.steps + (~faces.done).to(torch.int64),
        faces.done | settled,
        torch.where(keep, faces.multiplier, multiplier),
    )


def _targets(problem: QuadraticProblem, side: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``t = c - w (B^T y + l)`` and its uncertainty, (L, N), and the multipliers y, (L, q)."""
    w, free = problem.weight, side == 0
    goal = problem.centre if problem.linear is None else problem.centre - w * problem.linear
    point = torch.where(free, goal, torch.where(side < 0, problem.lower, problem.upper))
    pull, multiplier = torch.zeros_like(point), torch.zeros_like(problem.right)
    if problem.core is not None:
        factor = problem.core.factor(torch.where(free, w, HELD * problem.natural))
        multiplier = factor.solve(problem.core.apply(point) - problem.right)
        pull = problem.core.transpose(multiplier)
    shift = w * pull
    target = problem.auxiliary(point, goal) - shift
    near = NEAR * (goal.abs() + shift.abs())
    if problem.costed is not None:
        if problem.linear is not None:  # a held auxiliary variable pays its linear cost
            target = torch.where(problem.costed | free, target, target - w * problem.linear)
        # the multiplier of a held auxiliary variable is as uncertain as the largest of the others
        near = torch.where(problem.costed | free, near, NEAR * w * pull.abs().amax(-1, keepdim=True))
    return target, near, multiplier


def _sides(problem: QuadraticProblem, side: Tensor, target: Tensor, near: Tensor) -> Tensor:
    """The sides that targets belong on, (L, N) int8; within ``near`` of a bound they keep their side."""
    below = target < problem.lower + torch.where(side < 0, near, -near)
    above = target > problem.upper - torch.where(side > 0, near, -near)
    fresh = above.to(torch.int8) - below.to(torch.int8)
    return torch.where(problem.lower == problem.upper, torch.ones_like(fresh), fresh)


def _resting(problem: QuadraticProblem, value: Tensor) -> Tensor:
    """Where proximal centres have converged, (L,) bool.

    Their change is compared with the other variables: auxiliary variables may diverge together.
    """
    assert problem.costed is not None
    moved = torch.where(problem.costed, 0.0, (value - problem.centre).abs())
    lengths = torch.where(problem.costed, value.abs() + problem.centre.abs(), 0.0)
    size = lengths.amax(-1) + problem.right.abs().amax(-1)
    return moved.amax(-1) <= SETTLED * size + TINY
