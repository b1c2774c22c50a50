"""Steps of sequential quadratic programming on ``h(u) = 0``: full, shortened, corrected, with Hessians, or restoring.

With ``J = dh/du`` and the multiplier ``l = (J W J^T)^-1 (h + J (z - u))`` the full step from u goes to

    u+ = z - W J^T l,

the projection of z on the constraint linearised at u. ``y = Q (u - z)`` is carried along, so Q itself is never needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.laws.covariance import Covariance, Diagonal
from probhard.rows.redundant import DEPENDENT
from probhard.solvers.batched import Batched
from probhard.solvers.linearised import INEXACT, Linearised

FEASIBLE = 1e-12  # relative residual to aim at, in float64
ACCEPTED = 1e-10  # relative residual up to which a point counts as feasible
SLOWER = 0.3  # a residual that falls no faster is rounding, once it is accepted
STATIONARY = 1e-9  # relative length of the full step at which a point counts as stationary
MILD = 0.1  # smallest share of the distance's curvature by which steps count as shortened, not as exact
HALVINGS = 12
FINE, COARSE = 5, 0.1  # halvings of a restoring step, before it is shortened by this factor: next to a singular point
ARMIJO = 1e-4  # share of the predicted descent that a step has to gain
BENT = 0.3  # longest correction for curvature, relative to the step
SADDLE = 10.0  # stretch of the tangential step where the Hessian is not positive
DIFFERENCE = 1e-7  # relative step of differences, near the root of rounding


@dataclass(frozen=True)
class EqualityProblem:
    """Points to project on ``h(u) = 0`` under a weight."""

    constraint: NonlinearEquality
    z: Tensor  # (*lead, n)
    weight: Covariance  # W
    dependent: float = DEPENDENT  # as in ``linearised.revealed``

    def linearised(self, u: Tensor, bent: Tensor | None = None) -> Linearised:
        """The constraint linearised at u (*lead, n).

        Args:
            u: The points.
            bent: Curvature of each variable by the constraint, (*lead, n), which adds to that of the distance where
                it is positive; the weight must be diagonal. None for no curvature.
        """
        if bent is None:
            return Linearised.at(self.constraint, u, self.weight, self.dependent)
        assert isinstance(self.weight, Diagonal)
        share = 1 / (1 + self.weight.variance * bent.clamp(min=0).nan_to_num(0.0, 0.0, 0.0))
        return Linearised.at(self.constraint, u, Diagonal(share * self.weight.variance), self.dependent, share)

    def select(self, index: Tensor) -> EqualityProblem | None:
        """The points with these indices (k,) of the flattened leading dimensions; None if they cannot be separated."""
        lead, n = self.z.shape[:-1], self.z.shape[-1]
        if not isinstance(self.weight, Diagonal):
            return None
        constraint = self.constraint.select(index, lead)
        if constraint is None:
            return None
        variance = self.weight.variance.expand(self.z.shape).reshape(-1, n)[index]
        return EqualityProblem(constraint, self.z.reshape(-1, n)[index], Diagonal(variance), self.dependent)


@dataclass(frozen=True)
class Iterates(Batched):
    """The iterates of SQP, over leading dimensions (*lead)."""

    u: Tensor  # (*lead, n)
    y: Tensor  # Q (u - z), (*lead, n)
    multiplier: Tensor  # (*lead, q)
    penalty: Tensor  # of the merit, (*lead,)
    steps: Tensor  # (*lead,)
    residual: Tensor  # relative |h|, (*lead,)
    left: Tensor  # relative length of the full step, (*lead,)
    rate: Tensor  # left over the one before, (*lead,)
    done: Tensor  # (*lead,) bool

    @property
    def converged(self) -> Tensor:
        """Whether points are feasible and stationary, (*lead,) bool."""
        return (self.residual <= ACCEPTED) & (self.left <= STATIONARY)


def measured(near: Linearised, z: Tensor, iterates: Iterates) -> tuple[Iterates, Tensor, Tensor]:
    """Measure the iterates and compute their full step.

    Args:
        near: The constraint linearised at the iterates.
        z: Points to project, (*lead, n).
        iterates: The iterates.

    Returns:
        Iterates with residual, length of the full step and ``done``; the step and its image under Q, (*lead, n).
    """
    way = near.distance(z - iterates.u)
    wanted = near.h + near.push(way)
    multiplier = near.multiplier(wanted)
    move, pull = near.images(wanted, multiplier)
    step, slope = way - move, -pull - near.distance(iterates.y)
    size = iterates.u.norm(dim=-1) + z.norm(dim=-1)
    plain = step if near.share is None else step / near.share.clamp(min=MILD)  # as long as without that curvature
    left = torch.where(near.regular, plain.norm(dim=-1) / size.clamp(min=TINY), torch.inf)
    residual = near.relative(iterates.u, z)
    keep = iterates.done
    still = left <= STATIONARY
    if bool(
        (still & (residual > FEASIBLE)).any()
    ):  # what is left is normal to the set, and that part has less rounding
        move, pull = near.images(near.h)
        step, slope = _chosen(still, -move, step), _chosen(still, -pull, slope)
    rounding = (iterates.left <= STATIONARY) & (residual > SLOWER * iterates.residual)
    settled = (residual <= FEASIBLE) | ((residual <= ACCEPTED) & rounding)
    iterates = replace(
        iterates,
        multiplier=torch.where(keep.unsqueeze(-1), iterates.multiplier, multiplier),
        residual=torch.where(keep, iterates.residual, residual),
        left=torch.where(keep, iterates.left, left),
        rate=torch.where(keep, iterates.rate, left / iterates.left.clamp(min=TINY)),
        done=keep | (settled & still),
    )
    return iterates, step, slope


@dataclass(frozen=True)
class Merit:
    """The l1 merit ``|u - z|_Q^2 / 2 + p |h|_1`` with its value and slope at the iterates."""

    z: Tensor
    penalty: Tensor  # p, (*lead,)
    before: Tensor  # (*lead,)
    descent: Tensor  # along the full step, (*lead,)

    @classmethod
    def of(cls, near: Linearised, z: Tensor, iterates: Iterates, step: Tensor) -> Merit:
        """The merit whose penalty exceeds all multipliers, at the iterates."""
        penalty = torch.maximum(iterates.penalty, 1.5 * iterates.multiplier.abs().amax(-1) + 1e-12)
        before = _merit(iterates.u - z, iterates.y, near.h, penalty)
        descent = ((iterates.y * step).sum(-1) - penalty * near.h.abs().sum(-1)).clamp(max=0)
        return cls(z, penalty, before, descent)

    def falls(self, u: Tensor, y: Tensor, h: Tensor, length: Tensor) -> Tensor:
        """Armijo's condition at a step of this length, up to rounding; (*lead,) bool."""
        slack = 1e-13 * self.before.abs()
        return _merit(u - self.z, y, h, self.penalty) <= self.before + ARMIJO * length * self.descent + slack


def _merit(offset: Tensor, y: Tensor, h: Tensor, penalty: Tensor) -> Tensor:
    value = 0.5 * (offset * y).sum(-1) + penalty * h.abs().sum(-1)
    return value.nan_to_num(torch.inf, torch.inf, torch.inf)


def advanced(problem: EqualityProblem, near: Linearised, iterates: Iterates, step: Tensor, slope: Tensor) -> Iterates:
    """Take one step, halved until the merit falls; points where it does not fall only move towards ``h = 0``.

    A full step that fails is first corrected for the curvature of h (Maratos effect).

    Args:
        problem: The points to project.
        near: The constraint linearised at the iterates.
        iterates: The iterates.
        step: The full step, (*lead, n).
        slope: Its image under Q, (*lead, n).
    """
    merit = Merit.of(near, problem.z, iterates, step)
    u, y = iterates.u, iterates.y
    open_ = ~iterates.done & near.regular
    length = torch.ones_like(merit.before)
    for halving in range(HALVINGS):
        trial_u = iterates.u + length.unsqueeze(-1) * step
        trial_y = iterates.y + length.unsqueeze(-1) * slope
        h = problem.constraint.residual(trial_u)
        good = open_ & merit.falls(trial_u, trial_y, h, length)
        u, y, open_ = _chosen(good, trial_u, u), _chosen(good, trial_y, y), open_ & ~good
        if halving == 0 and bool(open_.any()):
            bent, pulled = near.images(h)
            trusted = open_ & (bent.norm(dim=-1) <= BENT * step.norm(dim=-1))
            trial_u, trial_y = trial_u - bent, trial_y - pulled
            good = trusted & merit.falls(trial_u, trial_y, problem.constraint.residual(trial_u), length)
            u, y, open_ = _chosen(good, trial_u, u), _chosen(good, trial_y, y), open_ & ~good
        if not bool(open_.any()):
            break
        length = torch.where(open_, 0.5 * length, length)
    moved = replace(iterates, u=u, y=y)
    if bool(open_.any()):
        moved = restored(problem.constraint, near, iterates, open_, moved)
    steps = iterates.steps + (~iterates.done).to(iterates.steps.dtype)
    return replace(moved, penalty=torch.where(iterates.done, iterates.penalty, merit.penalty), steps=steps)


def restored(
    constraint: NonlinearEquality, near: Linearised, iterates: Iterates, open_: Tensor, others: Iterates
) -> Iterates:
    """Move open points by the shortest step towards ``h = 0``, shortened until ``|h|`` falls.

    Args:
        constraint: h.
        near: The constraint linearised at the iterates.
        iterates: Where the step begins.
        open_: Points to move, (*lead,) bool.
        others: Iterates to return for all other points.
    """
    move, pull = near.images(near.h)
    before = near.h.norm(dim=-1)
    length = torch.ones_like(before)
    u, y = others.u, others.y
    for halving in range(HALVINGS):
        trial = iterates.u - length.unsqueeze(-1) * move
        after = constraint.residual(trial).norm(dim=-1).nan_to_num(torch.inf)
        good = open_ & (after <= (1 - 0.1 * length) * before)
        u, y = _chosen(good, trial, u), _chosen(good, iterates.y - length.unsqueeze(-1) * pull, y)
        open_ = open_ & ~good
        if not bool(open_.any()):
            break
        length = (0.5 if halving < FINE else COARSE) * length
    return replace(others, u=u, y=y)


def newton_step(
    constraint: NonlinearEquality, near: Linearised, iterates: Iterates, step: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor]:
    """The step with the exact Hessian ``Q + sum l_i hess(h_i)`` and its image under Q.

    It is the sum of a normal step and a tangential one by projected conjugate gradients, which stop at negative
    curvature. Near a saddle the plain step is slow, so its tangential part is stretched.

    Args:
        constraint: h.
        near: The constraint linearised at the iterates.
        iterates: The iterates.
        step: The full step, (*lead, n).
        slope: Its image under Q, (*lead, n).
    """
    d, d_dual = (-image for image in near.images(near.h))

    def bend(x: Tensor) -> Tensor:
        return _bent(constraint, near, iterates, x)

    tangent, tangent_dual, positive = near.tangential(bend, near.dual(-iterates.y - bend(d)), INEXACT)
    far, far_dual = d + SADDLE * (step - d), d_dual + SADDLE * (slope - d_dual)
    use, plain = positive.unsqueeze(-1), ~near.regular.unsqueeze(-1)
    return (
        torch.where(plain, step, torch.where(use, d + tangent, far)),
        torch.where(plain, slope, torch.where(use, d_dual + tangent_dual, far_dual)),
    )


def _bent(constraint: NonlinearEquality, near: Linearised, iterates: Iterates, x: Tensor) -> Tensor:
    """``sum_i l_i hess(h_i) x``, by a difference of the Jacobian if the constraint has a formula for it."""
    u, multiplier = iterates.u, iterates.multiplier
    if constraint.linearise is None:
        return constraint.curvature(u, multiplier, x)
    length = DIFFERENCE * (u.norm(dim=-1, keepdim=True) + 1) / x.norm(dim=-1, keepdim=True).clamp(min=TINY)
    return (constraint.linearised(u + length * x)[1].transpose(multiplier) - near.pull(multiplier)) / length


def _chosen(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """``new`` (*lead, n) where the mask (*lead,) is True, else ``old``."""
    return torch.where(mask.unsqueeze(-1), new, old)
