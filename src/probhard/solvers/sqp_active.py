"""Active bounds and functions at the nearest point, by sequential quadratic programming (SQP) with inequalities.

With functions f of (u, s), slacks s of inequalities included, the problem is

    minimise  |u - z|_Q^2 / 2     subject to  f(u, s) = 0,   lower <= (u, s) <= upper.

Each step minimises ``|v - z|_Q^2 + (v - u)^T C (v - u)`` over the functions linearised at u and the bounds, by
``active_set``. C is the diagonal of the multipliers times the Hessians, exact for separable functions. Steps are
shortened until the l1 merit ``|u - z|_Q^2 / 2 + p sum of violations`` falls. The result is the ``Faces`` of the
solution; ``sqp`` then finds the point there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from probhard._util.numerics import floored
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.rows.dense import DenseRows
from probhard.solvers import active_set
from probhard.solvers.quadratic import Faces, QuadraticProblem

STEPS = 20
HALVINGS = 10
SMALL = 1e-7  # relative length of a step after which the sides are accepted
DECREASE = 1e-6  # share of the merit's change that a step has to gain


@torch.no_grad()
def faces(equation: NonlinearEquality, problem: QuadraticProblem, start: Tensor, unequal: Tensor) -> Faces:
    """Find the sides at the nearest points.

    Args:
        equation: Functions of (u, s), with the slacks s of inequalities added.
        problem: Centre, weights and bounds of (u, s); its rows are ignored.
        start: Where to begin, (L, n).
        unequal: Which functions are inequalities, (q,) bool.

    Returns:
        The faces; ``value`` holds the last u with slacks of 0, (L, N).
    """
    search = Search(equation, problem, unequal, start.shape[-1])
    u, penalty = start, torch.zeros_like(start[..., 0])
    last: Faces | None = None
    total: Faces | None = None
    done = torch.zeros_like(penalty, dtype=torch.bool)
    for turn in range(STEPS):
        f, part = search.linearised(u, None if last is None else last.multiplier.nan_to_num(0.0))
        last = active_set.solve(part, None if last is None else last.side)
        step = torch.where(last.done.unsqueeze(-1), last.value[..., : search.variables] - u, 0.0)
        penalty = torch.maximum(penalty, 1.5 * last.multiplier.abs().amax(-1).nan_to_num(0.0))
        small = step.norm(dim=-1) <= SMALL * (u.norm(dim=-1) + search.z.norm(dim=-1))
        total = last if total is None else total.kept(done, last)
        done = done | (last.done & small)
        if bool((done | ~last.done).all()):
            break
        u = search.advanced(u, f, step, penalty, ~done, anyhow=turn == 0)
    assert total is not None
    return Faces(total.side, search.padded(u), total.steps, total.done, total.multiplier)


@dataclass(frozen=True)
class Search:
    """The problem whose active set is searched for."""

    equation: NonlinearEquality
    problem: QuadraticProblem
    unequal: Tensor  # (q,) bool
    variables: int  # n, without slacks

    @property
    def z(self) -> Tensor:
        """The points to project, (L, n)."""
        return self.problem.centre[..., : self.variables]

    @property
    def weight(self) -> Tensor:
        """The weights of the variables, (L, n)."""
        return self.problem.weight[..., : self.variables]

    @cached_property
    def inverse(self) -> Tensor:
        """The diagonal of Q, (L, n); 0 for variables without weight."""
        return torch.where(self.weight > 0, 1 / torch.where(self.weight > 0, self.weight, 1.0), 0.0)

    def padded(self, u: Tensor) -> Tensor:
        """``(u, 0)``, (L, N)."""
        return torch.cat([u, torch.zeros_like(self.problem.centre[..., self.variables :])], -1)

    def linearised(self, u: Tensor, multiplier: Tensor | None) -> tuple[Tensor, QuadraticProblem]:
        """The values f (L, q) at u, and the quadratic problem of the functions linearised there."""
        n, w, inverse, v = self.variables, self.weight, self.inverse, self.padded(u)
        f, rows = self.equation.residual(v), self.equation.jacobian(v)
        right = (rows[..., :n] @ u.unsqueeze(-1)).squeeze(-1) - f
        bent = self._curvature(v, multiplier)
        weight = torch.where(w > 0, 1 / (inverse + bent), 0.0)
        centre = torch.where(w > 0, weight * (inverse * self.z + bent * u), self.z)
        natural = floored(weight)
        return f, QuadraticProblem(
            DenseRows(rows),
            right,
            torch.cat([centre, self.problem.centre[..., n:]], -1),
            torch.cat([weight, self.problem.weight[..., n:]], -1),
            torch.cat([natural, self.problem.natural[..., n:]], -1),
            self.problem.lower,
            self.problem.upper,
            self.problem.costed,
        )

    def _curvature(self, v: Tensor, multiplier: Tensor | None) -> Tensor:
        """The diagonal C, (L, n); 0 without multipliers, and without inequalities, where SQP converges anyway."""
        if multiplier is None or not bool(self.unequal.any()):
            return torch.zeros_like(v[..., : self.variables])
        ones = self.padded(torch.ones_like(v[..., : self.variables]))
        bent = self.equation.curvature(v, multiplier, ones)[..., : self.variables]
        return bent.clamp(min=0).nan_to_num(0.0)

    def merit(self, u: Tensor, f: Tensor, penalty: Tensor) -> Tensor:
        """``|u - z|_Q^2 / 2 + p sum of violations``, (L,)."""
        violation = torch.where(self.unequal, f.clamp(min=0), f.abs()).sum(-1)
        value = 0.5 * ((u - self.z).square() * self.inverse).sum(-1) + penalty * violation
        return value.nan_to_num(torch.inf, torch.inf, torch.inf)

    def advanced(
        self, u: Tensor, f: Tensor, step: Tensor, penalty: Tensor, open_: Tensor, anyhow: bool = False
    ) -> Tensor:
        """Open points moved by a step that is halved until the merit falls; with ``anyhow`` by the full step."""
        before = self.merit(u, f, penalty)
        length, fresh = torch.ones_like(before), u
        for _ in range(HALVINGS):
            trial = u + length.unsqueeze(-1) * step
            after = self.merit(trial, self.equation.residual(self.padded(trial)), penalty)
            good = open_ & ((after <= before - DECREASE * length * (before - after).abs()) | anyhow)
            fresh = torch.where(good.unsqueeze(-1), trial, fresh)
            open_ = open_ & ~good
            if not bool(open_.any()):
                break
            length = 0.5 * length
        return fresh
