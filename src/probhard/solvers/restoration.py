"""Feasible points next to given ones, by damped least squares over the violated functions, for few variables.

With functions f of v = (u, s), slacks s of inequalities included, each step solves

    (R^T R + d I) x = -R^T r,     u <- clip(u + x),     r = f(u, s),   R = df/du,

with the slacks that make inequalities hold where they can, so that r and R have the rows of violated functions only.
Curved equalities have infeasible points from which every small step makes matters worse. Many starts go on at once, and
the one that ends nearest to the centre is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard._util.tensors import divide, matvec
from probhard.constraints.nonlinear import NonlinearEquality
from probhard.solvers.quadratic import QuadraticProblem

STEPS = 60
STARTS = 24
FARTHEST, NEAREST = 3.0, 0.01  # distances of starts from the first one, relative to its size
FEASIBLE = 1e-10  # relative violation of feasible points
FIRST, LESS, MORE = 1e-3, 0.2, 5.0  # damping relative to the largest diagonal, after a step that helps, and else


@torch.no_grad()
def nearest_restored(equation: NonlinearEquality, problem: QuadraticProblem, unequal: Tensor, number: int) -> Tensor:
    """Points of the set (L, n), the nearest of several that are found.

    Args:
        equation: Functions of (u, s), with the slacks s of inequalities added.
        problem: Centres, weights and bounds of (u, s).
        unequal: Which functions are inequalities, (q,) bool.
        number: Of the random starts: 1, 2, ...
    """
    count, n = len(problem.centre), _variables(problem)
    many = torch.arange(count, device=problem.centre.device).repeat_interleave(STARTS)
    part = equation.select(many, torch.Size((count,)))
    assert part is not None
    source = torch.Generator().manual_seed(number)
    noise = torch.randn(STARTS, n, generator=source, dtype=torch.float64).to(problem.centre)
    reach = torch.logspace(0, 1, STARTS, base=FARTHEST / NEAREST, dtype=torch.float64).to(noise) * NEAREST
    noise = noise * reach.unsqueeze(-1)
    noise[0] = 0.0 if number == 1 else noise[0]
    z, weight = problem.centre[..., :n], problem.weight[..., :n]
    size = z.abs().amax(-1, keepdim=True)
    start = z.unsqueeze(1) + torch.where(size > 0, size, 1.0).unsqueeze(1) * noise
    start = torch.where(weight.unsqueeze(1) > 0, start, z.unsqueeze(1))
    u, violation = restored(part, problem.select(many), start.reshape(-1, n), unequal)
    u, good = u.unflatten(0, (count, STARTS)), (violation <= FEASIBLE).unflatten(0, (count, STARTS))
    far = divide((u - z.unsqueeze(1)).square(), weight.unsqueeze(1).expand(u.shape)).sum(-1)
    best = torch.where(good, far, torch.inf).argmin(-1)
    index = torch.arange(count, device=u.device)
    return u[index, best]


@torch.no_grad()
def restored(
    equation: NonlinearEquality, problem: QuadraticProblem, start: Tensor, unequal: Tensor
) -> tuple[Tensor, Tensor]:
    """Move points (L, n) towards the set, within their bounds.

    Args:
        equation: Functions of (u, s), with the slacks s of inequalities added.
        problem: Weights and bounds of (u, s).
        start: Where to begin, (L, n).
        unequal: Which functions are inequalities, (q,) bool.

    Returns:
        The points (L, n), and their largest violation relative to the terms, (L,).
    """
    n = start.shape[-1]
    lower, upper = (x[..., :n] for x in (problem.lower, problem.upper))
    free = (problem.weight[..., :n] > 0) & (lower < upper)
    slack = torch.zeros_like(problem.centre[..., n:])

    def violation(u: Tensor) -> Tensor:
        f = equation.residual(torch.cat([u, slack], -1))
        return torch.where(unequal, f.clamp(min=0), f).nan_to_num(1e150, 1e150, 1e150)

    def rows(u: Tensor) -> Tensor:
        found = equation.jacobian(torch.cat([u, slack], -1))[..., :n].nan_to_num(0.0, 0.0, 0.0)
        return torch.where(free.unsqueeze(-2), found, 0.0)

    u = start.clamp(lower, upper)
    length = rows(u).norm(dim=-1)
    unit = torch.where(length > 0, length, 1.0)  # rows of length 1 at the start
    r = violation(u) / unit
    damping = torch.full_like(u[..., 0], FIRST)
    identity = torch.eye(n, dtype=u.dtype, device=u.device)
    for _ in range(STEPS):
        before = r.square().sum(-1)
        if bool((before == 0).all()):
            break
        matrix = rows(u) / unit.unsqueeze(-1)
        matrix = torch.where((unequal & (r <= 0)).unsqueeze(-1), 0.0, matrix)
        slope = matvec(matrix.mT, -r)
        # variables at a bound that the step would leave stay there
        stuck = ((u <= lower) & (slope < 0)) | ((u >= upper) & (slope > 0))
        matrix = matrix.masked_fill(stuck.unsqueeze(-2), 0.0)
        gram = matrix.mT @ matrix
        most = gram.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=TINY)
        lifted = gram + (damping * most)[..., None, None] * identity
        x = torch.linalg.solve_ex(lifted, slope.masked_fill(stuck, 0.0).unsqueeze(-1)).result.squeeze(-1)
        trial = (u + x.nan_to_num(0.0, 0.0, 0.0)).clamp(lower, upper)
        fresh = violation(trial) / unit
        better = fresh.square().sum(-1) < before
        u, r = torch.where(better.unsqueeze(-1), trial, u), torch.where(better.unsqueeze(-1), fresh, r)
        damping = (damping * torch.where(better, LESS, MORE)).clamp(1e-14, 1e6)
    scale = equation.scale(torch.cat([u, slack], -1))
    return u, (violation(u).abs() / scale.clamp(min=TINY)).amax(-1)


def _variables(problem: QuadraticProblem) -> int:
    """Number of variables without slacks."""
    return problem.centre.shape[-1] if problem.costed is None else int(problem.costed.sum())
