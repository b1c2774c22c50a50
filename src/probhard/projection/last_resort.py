"""Polyhedral points that float64 does not find, by the decimal arithmetic of ``solvers.decimals``.

Points are replaced only where the projector flagged its own, and only if the check of all points calls the new one
feasible. Their gradients are those of their face, ``du = P (dz + dW g) + L dside`` with ``g = W^-1 (u - z)``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from probhard._util.tensors import checking, matvec
from probhard.laws.covariance import Covariance
from probhard.projection.base import Solution
from probhard.projection.checked import feasible, finished, placed, replaced, within
from probhard.projection.lifting import linear_costs, root_of, sides_of
from probhard.projection.parts import Parts
from probhard.projection.second_try import by_program
from probhard.solvers.decimals import Nearest, Sides, nearest
from probhard.tangent import MatrixTangent

LARGEST = 48  # variables with auxiliary ones
MISSES = 2  # elements without a point, after which the set counts as empty
MOST = 400  # elements times that number, about 2 s; further elements stay flagged


def completed(parts: Parts, weight: Covariance, z: Tensor, solve: Callable[[Tensor], Solution]) -> Solution:
    """Solve, and find flagged points again: small ones in decimals, the rest as convex programs.

    Args:
        parts: The parts of the constraint, all polyhedral.
        weight: W, over (*batch, n).
        z: Points to project, (*lead, n).
        solve: Projects points in float64.
    """
    solution = solve(z)
    if not checking() or bool(solution.stats.converged.all()) or not parts.polyhedral or parts.semicontinuous:
        return solution
    if linear_costs(parts, torch.empty(0, dtype=torch.float64, device=z.device)) is not None:
        return solution

    def exact(point: Tensor) -> Solution:
        return _in_decimals(parts, weight, point, solve)

    return by_program(parts, weight, z, exact(z), exact)


def _in_decimals(parts: Parts, weight: Covariance, z: Tensor, solve: Callable[[Tensor], Solution]) -> Solution:
    """Solve, and find flagged points again if they are small, up to a number of them."""
    solution = solve(z)
    like = torch.empty(0, dtype=torch.float64, device=z.device)
    at = torch.nonzero(~solution.stats.converged)
    rows, own, lower, upper = sides_of(parts, like)
    n, lead = parts.variables, solution.value.shape[:-1]
    size = n + own.shape[-1]
    if size > LARGEST or not len(at):
        return solution
    root = root_of(parts, weight).expand(*lead, n, -1).detach()
    point = z.to(torch.float64).expand(*lead, n)
    rows = rows.expand(*lead, *rows.shape[-2:])
    lower, upper = (x.expand(*lead, x.shape[-1]) for x in (lower, upper))
    found = _Found(lead, n, rows.shape[-2], like)
    missed = 0
    for index in at[: MOST // size]:
        one = tuple(index.tolist())
        arrays = (x.detach()[one].numpy(force=True) for x in (point, root, rows, lower, upper))
        centre, factor, matrix, low, high = arrays
        answer = nearest(centre, factor, Sides(matrix, own.numpy(force=True), low, high))
        if answer is not None:
            found.place(one, answer)
        elif (missed := missed + 1) == MISSES:
            break
    side = torch.where(found.side < 0, lower, torch.where(found.side > 0, upper, 0.0))
    moves = point + weight.to(torch.float64).apply(found.pull)  # only their changes matter
    moved = matvec(found.tangent, moves) + matvec(found.lift, torch.where(found.side != 0, side, 0.0))
    value = feasible(parts, point, *(within(x, point, *parts.bounds(like)) for x in (found.face, found.value)))
    value = placed(moved, value)
    other = finished(parts, z, value, MatrixTangent(found.tangent), solution.stats.steps, found.known)
    return replaced(solution, other, z, solve)


class _Found:
    """What the solver found, over (*lead, ...)."""

    def __init__(self, lead: torch.Size, n: int, rows: int, like: Tensor) -> None:
        self.known = torch.zeros(lead, dtype=torch.bool, device=like.device)
        self.value, self.face, self.pull = (like.new_zeros(*lead, n) for _ in range(3))
        self.tangent, self.lift = like.new_zeros(*lead, n, n), like.new_zeros(*lead, n, rows)
        self.side = like.new_zeros(*lead, rows)

    def place(self, at: tuple[int, ...], answer: Nearest) -> None:
        """Keep the answer of one element."""
        for name in ("value", "face", "pull", "tangent", "lift", "side"):
            own: np.ndarray = getattr(answer, name)
            kept: Tensor = getattr(self, name)
            kept[at] = torch.from_numpy(own).to(kept)
        self.known[at] = True
