"""Convex points that other methods flagged, by Newton's method in u alone: balls and smooth convex programs.

Cone solvers lift a program, ``|u|_3 <= r`` say, to cones in many more variables. Where u has zeros, the cones meet at
their tips and few digits are left. In u itself the set is smooth there. Weights over many decades are no obstacle for
the quadratic problems of ``solvers.convex_newton``.

With the tangent P and the lift L of the last quadratic problem, ``du = P ((I + W H)^-1 (dz + dW p) - W' d(y g')) +
L dside``, where ``p = W^-1 (u - z)`` and the sides of g are ``-g``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from probhard._util.numerics import TINY, TOLERANCE
from probhard._util.tensors import checking, matvec
from probhard.constraints.ball import Ball
from probhard.constraints.convex_program import ConvexProgram
from probhard.laws.covariance import Covariance
from probhard.projection.base import Solution, Stats
from probhard.projection.checked import placed, replaced, within
from probhard.projection.lifting import root_of, sides_of
from probhard.projection.parts import Parts
from probhard.solvers.convex_newton import STEPS, Found, solve
from probhard.solvers.decimals import Sides
from probhard.tangent import MatrixTangent

LARGEST = 32  # variables with auxiliary ones
MOST = 2000  # quadratic problems times that number, some seconds; further elements stay flagged
HESSIAN = 1e-5  # step of differences of slopes, relative to the point


class BallFunctions:
    """``|u - c| - r`` of balls; with the curvature of ``(|u - c|^2 - r^2) / 2 r``, which is the same along the edge."""

    def __init__(self, radius: np.ndarray, center: np.ndarray) -> None:
        self.radius, self.center = radius, center  # (k,) and (k, n)

    def values(self, u: np.ndarray) -> np.ndarray:
        return np.linalg.norm(u - self.center, axis=1) - self.radius

    def slopes(self, u: np.ndarray) -> np.ndarray:
        away = u - self.center
        return away / np.maximum(np.linalg.norm(away, axis=1, keepdims=True), TINY)

    def bend(self, u: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (y / self.radius).sum() * np.eye(len(u))


class ProgramFunctions:
    """The inequalities of convex programs, evaluated by cvxpy; curvature by differences of slopes.

    Args:
        programs: The programs, of inequalities between expressions.
        data: Values of their parameters.
    """

    def __init__(self, programs: tuple[ConvexProgram, ...], data: list[list[np.ndarray]]) -> None:
        self.programs, self.data = programs, data

    def values(self, u: np.ndarray) -> np.ndarray:
        return np.concatenate([p.compiled.smooth(u, data)[0] for p, data in zip(self.programs, self.data)])

    def slopes(self, u: np.ndarray) -> np.ndarray:
        return np.concatenate([p.compiled.smooth(u, data)[1] for p, data in zip(self.programs, self.data)])

    def bend(self, u: np.ndarray, y: np.ndarray) -> np.ndarray:
        step, eye = HESSIAN * max(float(np.abs(u).max()), TINY), np.eye(len(u))
        ends = [[y @ self.slopes(u + sign * step * unit) for unit in eye] for sign in (1, -1)]
        hessian = (np.array(ends[0]) - np.array(ends[1])) / (2 * step)
        if not np.isfinite(hessian).all():
            return hessian
        values, vectors = np.linalg.eigh(0.5 * (hessian + hessian.T))
        return (vectors * np.maximum(values, 0.0)) @ vectors.T


def smoothly(
    parts: Parts, weight: Covariance, z: Tensor, solution: Solution, solve: Callable[[Tensor], Solution]
) -> Solution:
    """The solution with flagged points by Newton's method in u, if the curved parts are smooth and n is small.

    Args:
        parts: The parts of the constraint: balls or convex programs, rows, bounds and shapes.
        weight: W, over (*batch, n).
        z: Points to project, (*lead, n).
        solution: Their solution so far.
        solve: The projector that it is from.
    """
    if not checking() or bool(solution.stats.converged.all()) or not _served(parts):
        return solution
    other = _Search(parts, weight, z, solution.stats).solution()
    return solution if other is None else replaced(solution, other, z, solve)


def _served(parts: Parts) -> bool:
    """Whether the curved parts are balls or programs of smooth inequalities whose data are constant."""
    if parts.cones or parts.nonlinear is not None or parts.diminishing is not None or parts.semicontinuous:
        return False
    balls = all(isinstance(part, Ball) and bool((part.radius > 0).all()) for part in parts.curved)
    programs = all(p.compiled.plain and not any(x.requires_grad for x in p.args) for p in parts.convex_programs)
    return balls and programs and bool(parts.curved) != bool(parts.convex_programs)


class _Search:
    """Flagged points of a solution, one by one, on the CPU."""

    def __init__(self, parts: Parts, weight: Covariance, z: Tensor, stats: Stats) -> None:
        self.parts, self.stats, self.weight = parts, stats, weight.to("cpu", torch.float64)
        self.n, self.lead, self.given = parts.variables, stats.converged.shape, z
        self.z = z.cpu().to(torch.float64).expand(*self.lead, self.n)
        rows, self.own, lower, upper = sides_of(parts, self.z.new_empty(0))
        self.rows = rows.expand(*self.lead, *rows.shape[-2:])
        self.lower, self.upper = (x.expand(*self.lead, x.shape[-1]) for x in (lower, upper))
        self.balls = [self._ball(ball) for ball in parts.curved if isinstance(ball, Ball)]

    def solution(self) -> Solution | None:
        """A solution that has converged where points were found; None if the set is too large."""
        size = self.n + self.own.shape[-1]
        if size > LARGEST:
            return None
        root = root_of(self.parts, self.weight).expand(*self.lead, self.n, -1).detach()
        found: dict[tuple[int, ...], Found] = {}
        left = MOST // size
        for at in map(tuple, torch.nonzero(~self.stats.converged.cpu()).tolist()):
            if left > 0:
                z, own, rows, lower, upper = (
                    x[at].detach().numpy() for x in (self.z, root, self.rows, self.lower, self.upper)
                )
                answer = solve(z, own, Sides(rows, self.own.numpy(), lower, upper), self._functions(at), left)
                left -= STEPS if answer is None else answer.steps
                found |= {} if answer is None else {at: answer}
        return self._checked(found) if found else None

    def _ball(self, ball: Ball) -> tuple[Tensor, Tensor]:
        """Radius (*lead,) and center (*lead, n)."""
        center = self.z.new_zeros(self.n) if ball.center is None else ball.center.to(self.z.detach())
        return ball.radius.to(self.z.detach()).expand(self.lead), center.expand(*self.lead, self.n)

    def _functions(self, at: tuple[int, ...]) -> BallFunctions | ProgramFunctions:
        """The functions of one element."""
        if self.balls:
            radius, center = ([x[i][at].detach().numpy() for x in self.balls] for i in (0, 1))
            return BallFunctions(np.stack(radius), np.stack(center))
        programs, values = self.parts.convex_programs, []
        for program in programs:
            pairs = zip(program.args, program.compiled.shapes)
            values.append([x.cpu().double().expand((*self.lead, *shape))[at].numpy() for x, shape in pairs])
        return ProgramFunctions(programs, values)

    def _checked(self, found: dict[tuple[int, ...], Found]) -> Solution:
        """Points with their gradients, converged where they are feasible."""
        known, curved = torch.zeros(self.lead, dtype=torch.bool), len(next(iter(found.values())).multiplier)

        def placed_in(shape: tuple[int, ...], one: Callable[[Found], np.ndarray]) -> Tensor:
            whole = self.z.new_zeros((*self.lead, *shape))
            for at, answer in found.items():
                whole[at], known[at] = torch.from_numpy(np.asarray(one(answer), dtype=float)), True
            return whole

        n, count = self.n, self.rows.shape[-2]
        tangent = placed_in((n, n), lambda x: x.answer.tangent @ x.bent)
        lift = placed_in((n, count + curved), lambda x: x.answer.lift)
        side = placed_in((count,), lambda x: x.answer.side[:count])
        pull, face = placed_in((n,), lambda x: x.answer.pull), placed_in((n,), lambda x: x.answer.face)
        ends = torch.where(side < 0, self.lower, torch.where(side > 0, self.upper, 0.0))
        moves = self.z + self.weight.apply(pull)  # only their changes matter
        moved = matvec(tangent, moves) + matvec(lift[..., :count], torch.where(side != 0, ends, 0.0))
        if self.balls:
            turned = placed_in((n, n), lambda x: x.answer.tangent @ x.weight)
            y = placed_in((curved,), lambda x: x.multiplier)
            for i, (radius, center) in enumerate(self.balls):
                away, r = face - center, radius.unsqueeze(-1)
                beyond = 0.5 * (away.square().sum(-1, keepdim=True) - r.square()) / r
                moved = moved - lift[..., count + i].mul(beyond) - matvec(turned, y[..., i : i + 1] * away / r)
        value = self._feasible(face, placed_in((n,), lambda x: x.answer.value))
        value = placed(moved, value).to(self.given)
        residual = self._violation(value.detach())
        converged = known.to(residual.device) & (residual <= TOLERANCE[self.given.dtype])
        steps = placed_in((), lambda x: np.asarray(x.steps)).to(torch.int64).to(residual.device)
        return Solution(value, MatrixTangent(tangent.to(value.device)), Stats(steps, residual, converged))

    def _feasible(self, face: Tensor, relaxed: Tensor) -> Tensor:
        """Points within their bounds in the caller's precision: of the face, or of the solver where that is nearer."""
        box = self.parts.bounds(self.given.detach().cpu())
        first, second = (
            within(x, self.z, *self.parts.bounds(self.z)).to(self.given.dtype).clamp(*box) for x in (face, relaxed)
        )
        nearer = self._violation(second.to(self.given)) < self._violation(first.to(self.given))
        return torch.where(nearer.cpu().unsqueeze(-1), second, first).to(torch.float64)

    @torch.no_grad()
    def _violation(self, value: Tensor) -> Tensor:
        size = torch.maximum(self.given.abs(), value.abs()).amax(-1, keepdim=True)
        return self.parts.constraint.relative_violation(value, size).nan_to_num(torch.inf)
