"""Projection on ``h(u) = 0`` by safeguarded sequential quadratic programming (paper, proposition "newton_solve").

    u* = argmin |u - z|_Q^2 / 2     subject to  h(u) = 0,     Q = W^-1.

All points first take full steps (``sqp_steps``), shortened until an l1 merit falls. Points that are slow then take
Newton steps with the exact Hessian in rounds (``sqp_dense`` for few variables). Few variables under a weight that
couples them are solved again in coordinates in which it is the identity. Points that are stuck begin again, from
the feasible point next to z, then from shifted ones. The result is ``Iterates``: the points, their multipliers and how
well they satisfy the optimality conditions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard._util.tensors import divide, matvec
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.laws.covariance import Covariance, Diagonal
from probhard.solvers import sqp_dense
from probhard.solvers.linearised import Linearised
from probhard.solvers.sqp_dense import small
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
SLOW = ((4, True), (4, True), (4, True), (8, False), (8, False), *(((6, True),) * 5))  # steps, with Hessians or without
NEWTON = ((6, True), (10, True), (14, True))  # the same where Hessians are dense
AGAIN = ((8, False), (8, True), (8, True))  # from a shifted start
RESTORING = 30  # steps towards the feasible point next to a start
SHARPER = 2  # Newton steps after convergence, where units change
RESTARTS = 2  # number of shifted starts
SHIFTS = (0.03, 0.3, 1.0, 3.0)  # their distances, relative to the point
LOOSE = 1e-5  # eigenvalues of M that count as 0 after every second shift: rows that depend on each other at u* alone


@dataclass(frozen=True)
class Round:
    """Steps for the points that are left: with Hessians or without, going on, or from start 0 (z), 1, 2, ... again."""

    steps: int
    exact: bool
    start: int | None = None


def rounds(problem: EqualityProblem, restarts: int | None) -> list[Round]:
    """What is tried for slow points, in order; see ``solve``."""
    dense = small(problem.constraint, problem.weight)
    slow, again = (NEWTON, NEWTON) if dense else (SLOW, AGAIN)
    tries = [slow] if restarts is None else [slow, slow, *[again] * restarts]
    return [
        Round(steps, exact, number - 1 if first and number else None)
        for number, group in enumerate(tries)
        for first, (steps, exact) in zip((True, *[False] * len(group)), group)
    ]


@torch.no_grad()
def solve(
    constraint: NonlinearEquality,
    z: Tensor,  # (*lead, n), float64
    weight: Covariance,
    start: Tensor | None = None,  # (*lead, n), a warm start
    hessian: bool = False,
    restarts: int | None = RESTARTS,
) -> Iterates:
    """Find the nearest feasible points.

    Args:
        constraint: h.
        z: Points to project, (*lead, n), in float64.
        weight: W, broadcasting with z.
        start: Where to begin, (*lead, n); at z if None.
        hessian: Use the exact Hessian from the first step on, not only for slow points.
        restarts: Number of shifted starts for points that fail from z; None for a single attempt.

    Returns:
        The last iterates over (*lead); points that finish early are no longer moved.
    """
    if z.dim() == 1:  # one point is a batch of one
        start = None if start is None else start.unsqueeze(0)
        alone = solve(constraint, z.unsqueeze(0), weight, start, hessian, restarts)
        return alone.map(lambda value: value.squeeze(0))
    lead, problem = z.shape[:-1], EqualityProblem(constraint, z, weight)
    iterates = _run(problem, begin(problem, start), QUICK, exact=hessian)
    flat = iterates.map(lambda value: value.flatten(0, len(lead) - 1))
    promising = flat.left * flat.rate**MORE <= STATIONARY
    if bool((promising & ~flat.done).any()) and problem.select(promising.nonzero().squeeze(-1)) is not None:
        flat = _round(problem, flat, promising & ~flat.done, Round(MORE, False))
    if restarts is not None and not bool(flat.done.all()):
        flat = _whitened(problem, flat, restarts)
    best = flat
    for each in rounds(problem, restarts):
        if bool(flat.done.all()):
            break
        if each.start is not None:
            best = flat if each.start == 0 else _better(flat, best)
        flat = _round(problem, flat, ~flat.done, each)
    if restarts is not None and not bool(flat.done.all()):
        flat = _better(flat, best)
    return flat.map(lambda value: value.unflatten(0, lead))


def _whitened(problem: EqualityProblem, flat: Iterates, restarts: int) -> Iterates:
    """Unfinished points of few variables under a weight ``W = R R^T`` that couples them, by ``v`` with ``u = z + R v``.

    The weight of v is the identity, so that each point has its own steps, with dense Hessians.
    """
    z, weight, lead = problem.z, problem.weight, problem.z.shape[:-1]
    index = torch.nonzero(~flat.done).squeeze(-1)
    dense = problem.constraint.pattern is None and problem.constraint.linearise is None
    constraint = problem.constraint.select(index, lead) if dense and z.shape[-1] <= sqp_dense.DENSE else None
    if isinstance(weight, Diagonal) or constraint is None:
        return flat
    n, root = z.shape[-1], _graded_root(weight).to(z)
    size = root.shape[-1]
    root = root.expand(*lead, n, size).reshape(-1, n * size)[index]
    inner, centre = constraint.fn, z.reshape(-1, n)[index]

    def moved(v: Tensor, factor: Tensor, start: Tensor, *data: Any) -> Tensor:
        return inner(start + matvec(factor.unflatten(-1, (n, size)), v), *data)

    white = NonlinearEquality(moved, (root, centre, *constraint.args))
    unit = EqualityProblem(white, root.new_zeros(len(index), size), Diagonal(root.new_ones(len(index), size)))
    v = _sharpened(unit, solve(white, unit.z, unit.weight, None, True, restarts))
    point = centre + matvec(root.unflatten(-1, (n, size)), v.u)
    u = flat.u.index_copy(0, index, point)
    multiplier = flat.multiplier.index_copy(0, index, v.multiplier)
    pull = constraint.jacobian_rows(point).transpose(v.multiplier)
    fresh = replace(
        flat,
        u=u,
        multiplier=multiplier,
        y=flat.y.index_copy(0, index, -pull),
        steps=flat.steps.index_add(0, index, v.steps),
        left=torch.where(flat.done, flat.left, torch.inf),
    )
    fresh = fresh.map(lambda value: value.unflatten(0, lead))
    fresh = measured(problem.linearised(fresh.u), problem.z, fresh)[0].map(lambda x: x.flatten(0, len(lead) - 1))
    # Stationary in either unit: curvature may magnify the rounding of u beyond what v has left.
    left = fresh.left.index_copy(0, index, torch.minimum(fresh.left[index], v.left))
    done = fresh.done | ((left <= STATIONARY) & (fresh.residual <= ACCEPTED))
    return _better(replace(fresh, left=left, done=done), flat)


def _graded_root(weight: Covariance) -> Tensor:
    """A root of W (*batch, n, r), triangular once its rows are sorted from the largest to the smallest.

    Each column then has a size of its own; else all would share the largest, and hide the small ones.
    """
    root = weight.root_matrix()
    order = root.norm(dim=-1).argsort(-1, descending=True).unsqueeze(-1)
    upper = torch.linalg.qr(root.gather(-2, order.expand(root.shape)).mT, mode="r").R
    return torch.zeros_like(upper.mT).scatter(-2, order.expand(upper.mT.shape), upper.mT)


def _sharpened(problem: EqualityProblem, iterates: Iterates) -> Iterates:
    """Converged points after full Newton steps: strong curvature magnifies what is left, in other units."""
    for _ in range(SHARPER):
        near, curvature = _bent(problem, iterates)
        multiplier = near.multiplier(near.h + near.push(near.distance(problem.z - iterates.u)))
        step, slope = sqp_dense.newton_step(near, curvature, iterates.y)
        open_ = (iterates.converged & near.regular).unsqueeze(-1) & torch.isfinite(step)
        step, slope = torch.where(open_, step, 0.0), torch.where(open_, slope, 0.0)
        iterates = replace(iterates, u=iterates.u + step, y=iterates.y + slope, multiplier=multiplier)
    iterates = replace(iterates, done=torch.zeros_like(iterates.done))
    return measured(_bent(problem, iterates)[0], problem.z, iterates)[0]


def _bent(problem: EqualityProblem, iterates: Iterates) -> tuple[Linearised, Tensor]:
    """The constraint linearised at a flat batch, with the curvature C that its multipliers give, (L, n, n)."""
    curvature = sqp_dense.hessian(problem.constraint, iterates.u, iterates.multiplier)
    return problem.linearised(iterates.u, curvature.diagonal(dim1=-2, dim2=-1)), curvature


def _better(one: Iterates, two: Iterates) -> Iterates:
    """Of two attempts those that are done, else with the smaller residual, else nearer to stationary."""
    first, second = one.residual.clamp(min=ACCEPTED), two.residual.clamp(min=ACCEPTED)
    keep = one.done | (first < second) | ((first == second) & (one.left <= two.left))
    return one.kept(keep, replace(two, steps=one.steps))


def _round(problem: EqualityProblem, flat: Iterates, open_: Tensor, each: Round) -> Iterates:
    """Further steps for open points (L,); points that cannot be separated continue together."""
    lead, index = problem.z.shape[:-1], torch.nonzero(open_).squeeze(-1)
    part = problem.select(index)
    if part is not None:
        return flat.placed(index, _moved(part, flat.take(index), each))
    moved = _moved(problem, flat.map(lambda x: x.unflatten(0, lead)), each)
    return moved.map(lambda value: value.flatten(0, len(lead) - 1))


def _moved(problem: EqualityProblem, iterates: Iterates, each: Round) -> Iterates:
    # A penalty that grew far from the solution slows all steps; rounding shows between measurements of one round.
    penalty, left = (torch.where(iterates.done, x, y) for x, y in ((iterates.penalty, 0.0), (iterates.left, torch.inf)))
    iterates = replace(iterates, penalty=penalty, left=left)
    if each.start is None:
        return _run(problem, iterates, each.steps, each.exact)
    if each.start and each.start % 2 == 0:
        problem = replace(problem, dependent=LOOSE)
    return _run(problem, _restarted(problem, iterates, each.start), each.steps, each.exact)


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
            wanted = near.h + near.push(z - point)
            multiplier = near.multiplier(wanted)
            move, pull = near.images(wanted, multiplier)
            point, y = z - move, -pull
    done = torch.zeros_like(zero, dtype=torch.bool)
    steps = torch.zeros_like(zero, dtype=torch.int64)
    return Iterates(point, y, multiplier, zero, steps, zero + torch.inf, zero + torch.inf, zero + 1, done)


def _restarted(problem: EqualityProblem, iterates: Iterates, number: int) -> Iterates:
    """Unfinished points moved from a start towards ``h = 0`` alone; earlier attempts are forgotten."""
    fresh = begin(problem, shifted(problem.z, problem.weight, number) if number else None)
    for _ in range(RESTORING):
        near = problem.linearised(fresh.u)
        open_ = ~iterates.done & near.regular & (near.relative(fresh.u, problem.z) > ACCEPTED)
        if not bool(open_.any()):
            break
        fresh = restored(problem.constraint, near, fresh, open_, fresh)
    fresh = replace(fresh, steps=iterates.steps, multiplier=torch.zeros_like(fresh.multiplier))  # that of the start

    def chosen(name: str) -> Tensor:
        own, other = getattr(iterates, name), getattr(fresh, name)
        return torch.where(
            iterates.done.reshape(*iterates.done.shape, *[1] * (own.dim() - iterates.done.dim())), own, other
        )

    return Iterates(**{field.name: chosen(field.name) for field in fields(Iterates)})


def shifted(z: Tensor, weight: Covariance, number: int) -> Tensor:
    """The start with this number (1, 2, ...), (*lead, n): z plus noise that is the same for all points.

    Points on a symmetry, such as the centre of a sphere, have no direction of their own.
    """
    source = torch.Generator().manual_seed(number)
    noise = torch.randn(z.shape[-1], generator=source, dtype=torch.float64).to(z)
    spread = weight.diagonal().sqrt()
    spread = spread / spread.square().mean(-1, keepdim=True).sqrt().clamp(min=TINY)
    size = z.square().mean(-1, keepdim=True).sqrt()
    return z + SHIFTS[(number - 1) % len(SHIFTS)] * torch.where(size > 0, size, 1.0) * spread * noise


def _run(problem: EqualityProblem, iterates: Iterates, steps: int, exact: bool) -> Iterates:
    """Up to ``steps + 1`` steps, with the exact Hessian or without; the result is measured at its last point."""
    dense = exact and small(problem.constraint, problem.weight) and problem.z.dim() == 2
    for turn in range(steps + 2):
        near, curvature = _bent(problem, iterates) if dense else (problem.linearised(iterates.u), None)
        iterates, step, slope = measured(near, problem.z, iterates)
        if turn > steps or bool(iterates.done.all()):
            break
        if curvature is not None:
            moved = sqp_dense.newton_step(near, curvature, iterates.y)
            rest = (iterates.left <= STATIONARY).unsqueeze(-1)
            step, slope = torch.where(rest, step, moved[0]), torch.where(rest, slope, moved[1])
        elif exact:
            step, slope = newton_step(problem.constraint, near, iterates, step, slope)
        iterates = advanced(problem, near, iterates, step, slope)
    return iterates
