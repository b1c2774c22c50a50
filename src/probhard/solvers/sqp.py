"""Projection on ``h(u) = 0`` by safeguarded sequential quadratic programming (paper, proposition "newton_solve").

    u* = argmin |u - z|_Q^2 / 2     subject to  h(u) = 0,     Q = W^-1.

All points first take full steps (``sqp_steps``), shortened until an l1 merit falls. Points that are slow then take
Newton steps with the exact Hessian in rounds, and points that are stuck restore feasibility first. The result is
``Iterates``: the points, their multipliers and how well they satisfy the optimality conditions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from probhard._util.tensors import divide
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.laws.covariance import Covariance, Diagonal
from probhard.solvers.sqp_steps import (
    ACCEPTED,
    STATIONARY,
    EqualityProblem,
    Iterates,
    advanced,
    measured,
    newton_step,
    restored,
)

QUICK, MORE = 6, 8  # steps for all points, and for those that will finish at their present rate
SLOW = ((4, True), (4, True), (4, True), (8, False), (8, False), *(((6, True),) * 5))
ROUNDS = ((MORE, False), *SLOW, *SLOW)  # numbers of further steps, with Hessians or without
RESTART = 1 + len(SLOW)  # the round that begins again, from the feasible point next to z
RESTORING = 30  # steps towards that point


@torch.no_grad()
def solve(
    constraint: NonlinearEquality,
    z: Tensor,  # (*lead, n), float64
    weight: Covariance,
    start: Tensor | None = None,  # (*lead, n), a warm start
    hessian: bool = False,
) -> Iterates:
    """Find the nearest feasible points.

    Args:
        constraint: h.
        z: Points to project, (*lead, n), in float64.
        weight: W, broadcasting with z.
        start: Where to begin, (*lead, n); at z if None.
        hessian: Use the exact Hessian from the first step on, not only for slow points.

    Returns:
        The last iterates over (*lead); points that finish early are no longer moved.
    """
    if z.dim() == 1:  # one point is a batch of one
        start = None if start is None else start.unsqueeze(0)
        return solve(constraint, z.unsqueeze(0), weight, start, hessian).map(lambda value: value.squeeze(0))
    lead, problem = z.shape[:-1], EqualityProblem(constraint, z, weight)
    iterates = _run(problem, begin(problem, start), QUICK, exact=hessian)
    flat = iterates.map(lambda value: value.flatten(0, len(lead) - 1))
    promising = flat.left * flat.rate**MORE <= STATIONARY
    for number, (steps, exact) in enumerate(ROUNDS):
        if bool(flat.done.all()):
            break
        slow = torch.nonzero(~flat.done & (promising if number == 0 else True)).squeeze(-1)
        part = problem.select(slow)
        if number == 0 and (part is None or len(slow) == 0):  # the others would have to come along
            continue
        if part is not None:
            moved = _round(part, flat.take(slow), steps, exact, number == RESTART)
            flat = flat.placed(slow, moved)
        else:  # points that cannot be separated continue together
            moved = _round(problem, flat.map(lambda x: x.unflatten(0, lead)), steps, exact, number == RESTART)
            flat = moved.map(lambda value: value.flatten(0, len(lead) - 1))
    return flat.map(lambda value: value.unflatten(0, lead))


def begin(problem: EqualityProblem, start: Tensor | None) -> Iterates:
    """Iterates at z, or at a warm start with least-squares multipliers.

    Args:
        problem: The points to project.
        start: Warm start, (*lead, n); z if None.
    """
    z, weight = problem.z, problem.weight
    point, zero, y = z, z.new_zeros(z.shape[:-1]), torch.zeros_like(z)
    if start is None:
        multiplier = torch.zeros_like(problem.constraint.residual(z))
    else:
        near, point = problem.linearised(start), start
        if isinstance(weight, Diagonal):
            y = divide(point - z, weight.variance)
            multiplier = -near.multiplier(near.push(weight.apply(y)))
        else:  # a full step first: Q (u - z) of an arbitrary point would need Q
            multiplier = near.multiplier(near.h + near.push(z - point))
            point, y = z - near.move(multiplier), -near.pull(multiplier)
    done = torch.zeros_like(zero, dtype=torch.bool)
    steps = torch.zeros_like(zero, dtype=torch.int64)
    return Iterates(point, y, multiplier, zero, steps, zero + torch.inf, zero + torch.inf, zero + 1, done)


def _round(problem: EqualityProblem, iterates: Iterates, steps: int, exact: bool, restart: bool) -> Iterates:
    return _run(problem, _restarted(problem, iterates) if restart else iterates, steps, exact)


def _restarted(problem: EqualityProblem, iterates: Iterates) -> Iterates:
    """Unfinished points moved from z towards ``h = 0`` alone; the first attempt is forgotten."""
    keep = iterates.done.unsqueeze(-1)
    iterates = replace(
        iterates,
        u=torch.where(keep, iterates.u, problem.z),
        y=torch.where(keep, iterates.y, 0.0),
        penalty=torch.where(iterates.done, iterates.penalty, 0.0),
    )
    for _ in range(RESTORING):
        near = problem.linearised(iterates.u)
        open_ = ~iterates.done & (near.relative(iterates.u) > ACCEPTED)
        if not bool(open_.any()):
            break
        iterates = restored(problem.constraint, near, iterates, open_ & near.regular, iterates)
    return iterates


def _run(problem: EqualityProblem, iterates: Iterates, steps: int, exact: bool) -> Iterates:
    """Up to ``steps + 1`` steps, with the exact Hessian or without; the result is measured at its last point."""
    for _ in range(steps + 1):
        near = problem.linearised(iterates.u)
        iterates, step, slope = measured(near, problem.z, iterates)
        if bool(iterates.done.all()):
            return iterates
        if exact:
            step, slope = newton_step(problem.constraint, near, iterates, step, slope)
        iterates = advanced(problem, near, iterates, step, slope)
    return measured(problem.linearised(iterates.u), problem.z, iterates)[0]
