"""Projection on ``h(u) = 0`` by safeguarded sequential quadratic programming (paper, proposition "newton_solve").

With ``J = dh/du``, ``M = J W J^T`` and the multiplier ``l = M^-1 (h + J (z - u))`` the full step goes to

    u+ = z - W J^T l,

the projection of z on the constraint linearised at u. Steps are shortened until the merit ``|u - z|_Q^2 / 2 + v |h|_1``
falls; a full step that fails is first corrected for the curvature of h. Points that are slow take Newton steps with the
exact Hessian ``Q + sum l_i hess(h_i)`` (projected conjugate gradients); points that are stuck take steps that only
restore feasibility. ``y = Q (u - z)`` is carried along, so that Q itself is never needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from probhard._util.tensors import divide
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.laws.covariance import Covariance, Diagonal
from probhard.rows.system import LinearSystem
from probhard.tangent import Tangent, tangent_of

FEASIBLE = 1e-12  # relative residual to aim at, in float64
ACCEPTED = 1e-10  # relative residual up to which a point counts as feasible
STATIONARY = 1e-9  # relative length of the step that is left
QUICK, MORE = 6, 8  # steps for all points, and for those that are not finished but will be at their present rate
# Then rounds of some steps, with Hessians or without:
SLOW = ((4, True), (4, True), (4, True), (8, False), (8, False), *(((6, True),) * 5))
HALVINGS = 12
CONJUGATE = 30
INEXACT, EXACT = 1e-4, 1e-10  # relative accuracy of conjugate gradients: of a step on the way, of derivatives
SADDLE = 10.0
RESTORING = 30
DIFFERENCE = 1e-7  # relative step of differences, near the root of rounding


@dataclass(frozen=True)
class State:
    """Points on their way, over leading dimensions (*lead)."""

    u: Tensor  # (*lead, n)
    y: Tensor  # Q (u - z)
    multiplier: Tensor  # (*lead, q)
    penalty: Tensor  # (*lead,)
    steps: Tensor  # (*lead,)
    residual: Tensor  # relative |h|, (*lead,)
    left: Tensor  # relative length of the full step, (*lead,)
    rate: Tensor  # left over the one before, (*lead,)
    done: Tensor  # (*lead,)


@dataclass(frozen=True)
class Linearised:
    """The constraint linearised at u: its residual, and the tangent of its rows under the weight."""

    h: Tensor
    tangent: Tangent
    weight: Covariance
    regular: Tensor  # (*lead,)

    @classmethod
    def at(cls, constraint: NonlinearEquality, u: Tensor, weight: Covariance) -> Linearised:
        """Evaluate the constraint and factor its Schur complement."""
        h, rows = constraint.linearised(u)
        tangent = tangent_of(LinearSystem.of_structure(rows), weight)
        pivots = tangent.pivots().expand(*h.shape[:-1], -1)
        regular = (pivots.amin(-1) > 1e-7 * pivots.amax(-1)) & torch.isfinite(h).all(-1)
        return cls(h, tangent, weight, regular)

    def push(self, x: Tensor) -> Tensor:
        """``J x``."""
        return self.tangent.core.apply(x)

    def multiplier(self, r: Tensor) -> Tensor:
        """``M^-1 r``; 0 where M is singular."""
        return torch.where(self.regular.unsqueeze(-1), self.tangent.multiplier(r), 0.0)

    def move(self, multiplier: Tensor) -> Tensor:
        """``W J^T l``."""
        return self.weight.apply(self.pull(multiplier))

    def pull(self, multiplier: Tensor) -> Tensor:
        """``J^T l``."""
        return self.tangent.core.transpose(multiplier)

    def dual(self, v: Tensor) -> Tensor:
        """``P^T v``: what is left of a dual vector on the tangent space."""
        return v - self.pull(self.multiplier(self.push(self.weight.apply(v))))

    def relative(self, u: Tensor) -> Tensor:
        """Largest residual relative to the terms that should cancel, (*lead,)."""
        size = self.tangent.core.magnitude(u.abs() + 1e-8)
        return (self.h.abs() / size.clamp(min=1e-300)).amax(-1).nan_to_num(torch.inf)


@torch.no_grad()
def solve(
    constraint: NonlinearEquality,
    z: Tensor,  # (*lead, n), float64
    weight: Covariance,
    start: Tensor | None = None,  # (*lead, n), a warm start
    hessian: bool = False,
) -> State:
    """The nearest feasible points; elements that are finished early are left alone.

    With ``hessian`` the exact Hessian is used from the first step on, not only for points that are slow.
    """
    if z.dim() == 1:  # one point is a batch of one
        start = None if start is None else start.unsqueeze(0)
        state = solve(constraint, z.unsqueeze(0), weight, start, hessian)
        return State(*(value.squeeze(0) for value in vars(state).values()))
    lead, n = z.shape[:-1], z.shape[-1]
    state = _run(constraint, z, weight, _begin(constraint, z, weight, start), QUICK, exact=hessian)
    flat = State(*(value.flatten(0, len(lead) - 1) for value in vars(state).values()))
    promising = flat.left * flat.rate**MORE <= STATIONARY
    for attempt, (steps, exact) in enumerate(((MORE, False), *SLOW, *SLOW)):
        slow = torch.nonzero(~flat.done & (promising if attempt == 0 else True)).squeeze(-1)
        if bool(flat.done.all()):
            break
        subset = constraint.select(slow, lead) if isinstance(weight, Diagonal) else None
        if attempt == 0 and (subset is None or len(slow) == 0):  # the others would have to come along
            continue
        if subset is None or not isinstance(weight, Diagonal):  # points that cannot be told apart go on together
            subset, points, few = constraint, z, weight
            part = State(*(value.unflatten(0, lead) for value in vars(flat).values()))
        else:
            points = z.reshape(-1, n)[slow]
            few = Diagonal(weight.variance.expand(z.shape).reshape(-1, n)[slow])
            part = State(*(value[slow] for value in vars(flat).values()))
        if attempt == len(SLOW) + 1:  # once more, from the feasible point next to z
            part = _restart(subset, points, few, part)
        part = _run(subset, points, few, part, steps, exact)
        if subset is constraint:
            flat = State(*(value.flatten(0, len(lead) - 1) for value in vars(part).values()))
        else:
            flat = State(*(a.index_copy(0, slow, b) for a, b in zip(vars(flat).values(), vars(part).values())))
    return State(*(value.unflatten(0, lead) for value in vars(flat).values()))


def _begin(constraint: NonlinearEquality, z: Tensor, weight: Covariance, start: Tensor | None) -> State:
    point, zero, y = z, z.new_zeros(z.shape[:-1]), torch.zeros_like(z)
    if start is None:
        multiplier = torch.zeros_like(constraint.residual(z))
    else:
        near, point = Linearised.at(constraint, start, weight), start
        if isinstance(weight, Diagonal):
            y = divide(point - z, weight.variance)
            multiplier = -near.multiplier(near.push(weight.apply(y)))
        else:  # a full step first: Q (u - z) of an arbitrary point would need Q
            multiplier = near.multiplier(near.h + near.push(z - point))
            point, y = z - near.move(multiplier), -near.pull(multiplier)
    done = torch.zeros_like(zero, dtype=torch.bool)
    steps = torch.zeros_like(zero, dtype=torch.int64)
    return State(point, y, multiplier, zero, steps, zero + torch.inf, zero + torch.inf, zero + 1, done)


def _restart(constraint: NonlinearEquality, z: Tensor, weight: Covariance, state: State) -> State:
    """Unfinished points moved from z towards ``h = 0`` alone, with nothing remembered of the first attempt."""
    keep = state.done.unsqueeze(-1)
    state = replace(
        state,
        u=torch.where(keep, state.u, z),
        y=torch.where(keep, state.y, 0.0),
        penalty=torch.where(state.done, state.penalty, 0.0),
    )
    for _ in range(RESTORING):
        near = Linearised.at(constraint, state.u, weight)
        open_ = ~state.done & (near.relative(state.u) > ACCEPTED)
        if not bool(open_.any()):
            break
        u, y = _restore(constraint, near, state, open_ & near.regular, state.u, state.y)
        state = replace(state, u=u, y=y)
    return state


def _run(constraint: NonlinearEquality, z: Tensor, weight: Covariance, state: State, steps: int, exact: bool) -> State:
    for _ in range(steps + 1):
        near = Linearised.at(constraint, state.u, weight)
        state, full, slope = _measured(near, z, state)
        if bool(state.done.all()):
            break
        if exact:
            full, slope = _newton_step(constraint, near, weight, state, full, slope)
        state = _advance(constraint, near, z, state, full, slope)
    else:
        near = Linearised.at(constraint, state.u, weight)
        state, _, _ = _measured(near, z, state)
    return state


def _measured(near: Linearised, z: Tensor, state: State) -> tuple[State, Tensor, Tensor]:
    """The full step (and its image under Q), and who is finished."""
    multiplier = near.multiplier(near.h + near.push(z - state.u))
    step = z - near.move(multiplier) - state.u
    slope = -near.pull(multiplier) - state.y
    size = state.u.norm(dim=-1) + z.norm(dim=-1)
    left = torch.where(near.regular, step.norm(dim=-1) / size.clamp(min=1e-300), torch.inf)
    residual = near.relative(state.u)
    done = state.done | ((residual <= FEASIBLE) & (left <= STATIONARY))
    keep = state.done
    state = replace(
        state,
        multiplier=torch.where(keep.unsqueeze(-1), state.multiplier, multiplier),
        residual=torch.where(keep, state.residual, residual),
        left=torch.where(keep, state.left, left),
        rate=torch.where(keep, state.rate, left / state.left.clamp(min=1e-300)),
        done=done,
    )
    return state, step, slope


def _advance(
    constraint: NonlinearEquality, near: Linearised, z: Tensor, state: State, step: Tensor, slope: Tensor
) -> State:
    """One step, shortened until the merit falls; else one that only restores feasibility."""
    penalty = torch.maximum(state.penalty, 1.5 * state.multiplier.abs().amax(-1) + 1e-12)
    infeasible = near.h.abs().sum(-1)

    def merit(u: Tensor, y: Tensor, h: Tensor) -> Tensor:
        value = 0.5 * ((u - z) * y).sum(-1) + penalty * h.abs().sum(-1)
        return value.nan_to_num(torch.inf, torch.inf, torch.inf)

    before = merit(state.u, state.y, near.h)
    descent = ((state.y * step).sum(-1) - penalty * infeasible).clamp(max=0)
    slack = 1e-13 * before.abs()
    u, y = state.u, state.y
    open_ = ~state.done & near.regular
    length = torch.ones_like(before)
    for halving in range(HALVINGS):
        trial_u = state.u + length.unsqueeze(-1) * step
        trial_y = state.y + length.unsqueeze(-1) * slope
        h = constraint.residual(trial_u)
        for corrected in (False, True) if halving == 0 else (False,):
            trusted = open_
            if corrected and not bool(open_.any()):
                break
            if corrected:  # for the curvature of h, which makes good full steps look bad; not for leaps
                extra = near.multiplier(h)
                bent = near.move(extra)
                trusted = open_ & (bent.norm(dim=-1) <= 0.3 * step.norm(dim=-1))
                trial_u, trial_y = trial_u - bent, trial_y - near.pull(extra)
                h = constraint.residual(trial_u)
            good = trusted & (merit(trial_u, trial_y, h) <= before + 1e-4 * length * descent + slack)
            u = torch.where(good.unsqueeze(-1), trial_u, u)
            y = torch.where(good.unsqueeze(-1), trial_y, y)
            open_ = open_ & ~good
        if not bool(open_.any()):
            break
        length = torch.where(open_, 0.5 * length, length)
    if bool(open_.any()):
        u, y = _restore(constraint, near, state, open_, u, y)
    moved = state.steps + (~state.done).to(state.steps.dtype)
    return replace(state, u=u, y=y, penalty=torch.where(state.done, state.penalty, penalty), steps=moved)


def _restore(
    constraint: NonlinearEquality, near: Linearised, state: State, open_: Tensor, u: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Shortest move towards ``h = 0`` for points without an acceptable step, shortened until ``|h|`` falls."""
    multiplier = near.multiplier(near.h)
    move, pull = near.move(multiplier), near.pull(multiplier)
    before = near.h.norm(dim=-1)
    length = torch.ones_like(before)
    for _ in range(HALVINGS):
        trial = state.u - length.unsqueeze(-1) * move
        after = constraint.residual(trial).norm(dim=-1).nan_to_num(torch.inf)
        good = open_ & (after <= (1 - 0.1 * length) * before)
        u = torch.where(good.unsqueeze(-1), trial, u)
        y = torch.where(good.unsqueeze(-1), state.y - length.unsqueeze(-1) * pull, y)
        open_ = open_ & ~good
        length = 0.5 * length
    return u, y


def _newton_step(
    constraint: NonlinearEquality, near: Linearised, weight: Covariance, state: State, step: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor]:
    """The step of the exact Hessian, by conjugate gradients on the tangent space; stops at negative curvature."""
    normal = near.multiplier(near.h)
    d, d_dual = -near.move(normal), -near.pull(normal)

    def bend(x: Tensor) -> Tensor:
        return _bent(constraint, near, state, x)

    target = near.dual(-state.y - bend(d))
    found, image, ok = tangential(near, weight, bend, target, INEXACT)
    # at a saddle the plain step creeps away from it: stretch its tangential part
    far, far_dual = d + SADDLE * (step - d), d_dual + SADDLE * (slope - d_dual)
    use, plain = ok.unsqueeze(-1), ~near.regular.unsqueeze(-1)
    step = torch.where(plain, step, torch.where(use, d + found, far))
    return step, torch.where(plain, slope, torch.where(use, d_dual + image, far_dual))


def _bent(constraint: NonlinearEquality, near: Linearised, state: State, x: Tensor) -> Tensor:
    """``sum_i l_i hess(h_i) x`` as well as a step needs it: a difference of the Jacobian's formula, if there is one."""
    u, multiplier = state.u, state.multiplier
    if constraint.linearise is None:
        return constraint.curvature(u, multiplier, x)
    length = DIFFERENCE * (u.norm(dim=-1, keepdim=True) + 1) / x.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    return (constraint.linearised(u + length * x)[1].transpose(multiplier) - near.pull(multiplier)) / length


def tangential(
    near: Linearised, weight: Covariance, bend: object, target: Tensor, accuracy: float = EXACT
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve ``x + P W C x = P W t`` on the tangent space; returns x, ``Q x`` and where curvature stayed positive.

    Args:
        near: The linearised constraint.
        weight: W.
        bend: The product with ``C = sum l_i hess(h_i)``.
        target: ``P^T t``, a dual vector.
        accuracy: Relative residual to stop at.
    """
    assert callable(bend)
    residual_dual, residual = target, weight.apply(target)
    p_dual, p = residual_dual, residual
    x, image = torch.zeros_like(p), torch.zeros_like(p)
    size = (residual * residual_dual).sum(-1)
    first = size
    ok = torch.ones_like(size, dtype=torch.bool)
    for _ in range(min(CONJUGATE, p.shape[-1] - near.h.shape[-1] + 2)):
        curved = p_dual + bend(p)
        along = (p * curved).sum(-1)
        open_ = ok & (size > accuracy**2 * first) & (size > 0)
        ok = ok & ~(open_ & (along <= 1e-10 * (p * p_dual).sum(-1)))
        open_ = open_ & ok
        if not bool(open_.any()):
            break
        rate = torch.where(open_, size / torch.where(open_, along, 1.0), 0.0).unsqueeze(-1)
        x, image = x + rate * p, image + rate * p_dual
        residual_dual = near.dual(residual_dual - rate * curved)
        residual = weight.apply(residual_dual)
        fresh = (residual * residual_dual).sum(-1)
        turn = torch.where(open_, fresh / torch.where(size > 0, size, 1.0), 0.0).unsqueeze(-1)
        p, p_dual, size = residual + turn * p, residual_dual + turn * p_dual, torch.where(open_, fresh, size)
    return x, image, ok
