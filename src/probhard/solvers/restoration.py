"""Feasible points next to given ones, by damped least squares over the violated functions, for few variables.

With functions f of v = (u, s), slacks s of inequalities included, each step solves

    (R^T R + d I) x = -R^T r,     u <- clip(u + W^1/2 x),     r = f(u, s),   R = df/du W^1/2,

with the slacks that make inequalities hold where they can, so that r and R have the rows of violated functions only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard._util.tensors import matvec
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.solvers.quadratic import QuadraticProblem

STEPS = 60
FEASIBLE = 1e-11  # sum of squares, relative to that of the terms, at which points are left
FIRST, LESS, MORE = 1e-3, 0.2, 5.0  # damping relative to the largest diagonal, after a step that helps, and else


@torch.no_grad()
def restored(equation: NonlinearEquality, problem: QuadraticProblem, start: Tensor, unequal: Tensor) -> Tensor:
    """Move points (L, n) towards the set, within their bounds.

    Args:
        equation: Functions of (u, s), with the slacks s of inequalities added.
        problem: Weights and bounds of (u, s).
        start: Where to begin, (L, n).
        unequal: Which functions are inequalities, (q,) bool.
    """
    n = start.shape[-1]
    lower, upper, weight = (x[..., :n] for x in (problem.lower, problem.upper, problem.weight))
    root = (weight / weight.amax(-1, keepdim=True).clamp(min=TINY)).sqrt()
    slack = torch.zeros_like(problem.centre[..., n:])

    def violation(u: Tensor) -> Tensor:
        f = equation.residual(torch.cat([u, slack], -1))
        return torch.where(unequal, f.clamp(min=0), f).nan_to_num(1e150, 1e150, 1e150)

    def rows(u: Tensor) -> Tensor:
        return equation.jacobian(torch.cat([u, slack], -1))[..., :n].nan_to_num(0.0, 0.0, 0.0)

    u = start.clamp(lower, upper)
    length = (rows(u) * root.unsqueeze(-2)).norm(dim=-1)
    unit = torch.where(length > 0, length, 1.0)  # rows of length 1 at the start
    r = violation(u) / unit
    damping = torch.full_like(u[..., 0], FIRST)
    identity = torch.eye(n, dtype=u.dtype, device=u.device)
    size = (equation.scale(torch.cat([u, slack], -1)) / unit).square().sum(-1)
    for _ in range(STEPS):
        before = r.square().sum(-1)
        if bool((before <= FEASIBLE**2 * size).all()):
            break
        matrix = rows(u) / unit.unsqueeze(-1) * root.unsqueeze(-2)
        matrix = torch.where((unequal & (r <= 0)).unsqueeze(-1), 0.0, matrix)
        slope = matvec(matrix.mT, -r)
        # variables at a bound that the step would leave stay there
        stuck = ((u <= lower) & (slope < 0)) | ((u >= upper) & (slope > 0))
        matrix = matrix.masked_fill(stuck.unsqueeze(-2), 0.0)
        gram = matrix.mT @ matrix
        most = gram.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=TINY)
        lifted = gram + (damping * most)[..., None, None] * identity
        x = torch.linalg.solve_ex(lifted, slope.masked_fill(stuck, 0.0).unsqueeze(-1)).result.squeeze(-1)
        trial = (u + root * x.nan_to_num(0.0, 0.0, 0.0)).clamp(lower, upper)
        fresh = violation(trial) / unit
        better = fresh.square().sum(-1) < before
        u, r = torch.where(better.unsqueeze(-1), trial, u), torch.where(better.unsqueeze(-1), fresh, r)
        damping = (damping * torch.where(better, LESS, MORE)).clamp(1e-14, 1e6)
    return u
