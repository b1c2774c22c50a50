"""Sequential quadratic programming: which bounds and functions are active at the nearest point.

Each step minimises ``|v - z|_Q^2 + (v - u)^T C (v - u)`` over the functions linearised at u and the bounds, by
``active_set``; C is a diagonal guess of the multipliers times the Hessians (exact for separable functions). Steps are
shortened until the merit ``|u - z|_Q^2 / 2 + p sum of violations`` falls. It gives the sides; ``newton`` then finds the
point.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probhard.constraints.nonlinear import NonlinearEquality
from probhard.rows.dense import DenseRows
from probhard.solvers import active_set
from probhard.solvers.quadratic import Faces, QuadraticProblem

STEPS = 40
HALVINGS = 10
SMALL = 1e-7  # relative length of a step after which the sides are believed


@torch.no_grad()
def faces(equation: NonlinearEquality, problem: QuadraticProblem, start: Tensor, unequal: Tensor) -> Faces:
    """The sides at the nearest points.

    Args:
        equation: Functions of (u, s), with the slacks s of inequalities added.
        problem: Centre, weights and bounds of (u, s); its rows are not looked at.
        start: Where to begin, (L, n).
        unequal: Which functions are inequalities, (q,) bool.
    """
    n = start.shape[-1]
    z, w = problem.centre[..., :n], problem.weight[..., :n]
    inverse = torch.where(w > 0, 1 / torch.where(w > 0, w, 1.0), 0.0)
    u, penalty = start, torch.zeros_like(start[..., 0])
    side: Tensor | None = None
    slack = problem.centre[..., n:]
    multiplier: Tensor | None = None
    done = torch.zeros_like(penalty, dtype=torch.bool)
    total: Faces | None = None

    def merit(point: Tensor, f: Tensor) -> Tensor:
        value = 0.5 * ((point - z).square() * inverse).sum(-1) + penalty * _amount(f, unequal)
        return value.nan_to_num(torch.inf, torch.inf, torch.inf)

    for turn in range(STEPS):
        v = torch.cat([u, torch.zeros_like(slack)], -1)
        f, rows = equation.residual(v), equation.jacobian(v)
        right = (rows[..., :n] @ u.unsqueeze(-1)).squeeze(-1) - f
        bent = torch.zeros_like(u)
        if multiplier is not None and bool(unequal.any()):  # equations converge without it
            ones = torch.cat([torch.ones_like(u), torch.zeros_like(slack)], -1)
            bent = equation.curvature(v, multiplier, ones)[..., :n].clamp(min=0).nan_to_num(0.0)
        weight = torch.where(w > 0, 1 / (inverse + bent), 0.0)
        centre = torch.where(w > 0, weight * (inverse * z + bent * u), z)
        part = QuadraticProblem(
            DenseRows(rows),
            right,
            torch.cat([centre, slack], -1),
            torch.cat([weight, problem.weight[..., n:]], -1),
            torch.cat([torch.maximum(weight, 1e-12 * weight.amax(-1, keepdim=True)), problem.natural[..., n:]], -1),
            problem.lower,
            problem.upper,
            problem.costed,
        )
        found = active_set.solve(part, side)
        step = torch.where(found.done.unsqueeze(-1), found.value[..., :n] - u, 0.0)
        penalty = torch.maximum(penalty, 1.5 * found.multiplier.abs().amax(-1).nan_to_num(0.0))
        before = merit(u, f)
        small = step.norm(dim=-1) <= SMALL * (u.norm(dim=-1) + z.norm(dim=-1))
        finished = found.done & small
        total = found if total is None else _merged(total, found, done)
        done = done | finished
        if bool((done | ~found.done).all()):
            break
        length, open_, fresh = torch.ones_like(before), ~done, u
        for _ in range(HALVINGS):
            trial = u + length.unsqueeze(-1) * step
            after = merit(trial, equation.residual(torch.cat([trial, torch.zeros_like(slack)], -1)))
            good = open_ & ((after <= before - 1e-6 * length * (before - after).abs()) | (turn == 0))
            fresh = torch.where(good.unsqueeze(-1), trial, fresh)
            open_ = open_ & ~good
            if not bool(open_.any()):
                break
            length = 0.5 * length
        u = fresh
        side, multiplier = found.side, found.multiplier.nan_to_num(0.0)
    assert total is not None
    value = torch.cat([u, torch.zeros_like(slack)], -1)
    return Faces(total.side, value, total.steps, total.done, total.multiplier)


def _amount(f: Tensor, unequal: Tensor) -> Tensor:
    """Summed violations, (L,)."""
    return torch.where(unequal, f.clamp(min=0), f.abs()).sum(-1)


def _merged(old: Faces, new: Faces, keep: Tensor) -> Faces:
    parts = []
    for before, after in zip(vars(old).values(), vars(new).values()):
        parts.append(torch.where(keep.reshape(-1, *[1] * (after.dim() - 1)), before, after))
    return Faces(*parts)
