"""The nearest point of rows and smooth convex functions, by quadratic problems in decimal arithmetic.

    minimise  |u - z|^2_Q / 2   subject to  lower <= rows u <= upper,   g(u) <= 0,      W = Q^-1 = R R^T.

A step of Newton's method from u_k with multipliers y of g linearises g and bends the distance by ``H = sum y g''``,

    u_{k+1} = argmin |u - z'|^2_{Q + H} / 2,     (Q + H)^-1 = W' = R (I + R^T H R)^-1 R^T,     z' = z + W' H (u_k - z),

over the rows and ``g(u_k) + g'(u_k) (u - u_k) <= 0``. ``decimals`` finds its answer whatever the weights. Where a step
has length 0, the optimality conditions hold and prove that u is nearest, since the set is convex. Steps that do not
shrink are halved until ``|u - z|^2_Q / 2 + 2 max(y) sum max(g, 0)`` falls; the rows hold from the first step on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from probhard.solvers.decimals import Nearest, Sides, nearest

STEPS, HALVINGS = 30, 12
SETTLED = 1e-11  # length of the last step, relative to the point and, in the metric, to the distance
BALANCED = 1e-9  # largest force of the bend on the last step, relative to that of g


class Functions(Protocol):
    """Smooth convex functions g of u (n,), at the data of one element."""

    def values(self, u: np.ndarray) -> np.ndarray:
        """``g(u)``, (k,)."""

    def slopes(self, u: np.ndarray) -> np.ndarray:
        """``g'(u)``, (k, n); not finite where there is none."""

    def bend(self, u: np.ndarray, y: np.ndarray) -> np.ndarray:
        """``sum y g''(u)``, positive semidefinite, (n, n)."""


@dataclass(frozen=True)
class Found:
    """A nearest point, with the derivatives of its quadratic problem.

    Args:
        answer: Of the last quadratic problem; its last rows are those of g.
        bent: ``(I + W H)^-1``, which a change of z passes first, (n, n).
        weight: W', (n, n).
        multiplier: y of g, not negative, (k,).
        steps: Number of quadratic problems.
    """

    answer: Nearest
    bent: np.ndarray
    weight: np.ndarray
    multiplier: np.ndarray
    steps: int


def solve(z: np.ndarray, root: np.ndarray, sides: Sides, functions: Functions, steps: int = STEPS) -> Found | None:
    """The nearest point; None if it was not found within a number of steps.

    Args:
        z: The point, (n,).
        root: R, (n, r).
        sides: The rows.
        functions: g.
        steps: Largest number of quadratic problems.
    """
    u, y = z, np.zeros(len(functions.values(z)))
    none, last, penalty = np.zeros((len(y), sides.own.shape[1])), np.inf, 0.0
    inverse = np.diag(_inverse(root.diagonal())) if _diagonal(root) else np.linalg.pinv(root)
    for step in range(1, min(steps, STEPS) + 1):
        value, slope = functions.values(u), functions.slopes(u)
        bend = functions.bend(u, y) if y.any() else np.zeros((len(z), len(z)))
        if not all(np.isfinite(x).all() for x in (value, slope, bend)):
            return None
        turned = _bent(root, bend)
        weight = turned @ turned.T
        centre = z + weight @ (bend @ (u - z))
        rows = np.concatenate([sides.on_u, slope]), np.concatenate([sides.own, none])
        lower = np.concatenate([sides.lower, np.full(len(y), -np.inf)])
        upper = np.concatenate([sides.upper, slope @ u - value])
        answer = nearest(centre, turned, Sides(*rows, lower, upper))
        if answer is None:
            return None
        moved, y = answer.face - u, np.maximum(-answer.multiplier[len(sides.lower) :], 0.0)
        balanced = np.abs(bend @ moved).max() <= BALANCED * np.abs(y @ slope).max()  # the bend exerts no force
        if step > 1 and balanced and _settled(root, answer.face, moved, answer.face - z):
            return Found(answer, np.eye(len(z)) - weight @ bend, weight, y, step)
        length, size, penalty = 1.0, np.abs(moved).max(), max(penalty, 2 * float(y.max(initial=0.0)))
        if step > 1 and size > 0.5 * last:

            def merit(u: np.ndarray, penalty: float = penalty) -> float:
                away = inverse @ (u - z)
                return float(0.5 * away @ away + penalty * np.maximum(functions.values(u), 0.0).sum())

            start = merit(u)
            while length > 0.5**HALVINGS and not merit(u + length * moved) < start:
                length *= 0.5
        u, last = (answer.face, size) if length == 1 else (u + length * moved, length * size)
    return None


def _inverse(x: np.ndarray) -> np.ndarray:
    """``1 / x``, and 0 where x is 0."""
    return np.where(x > 0, 1 / np.where(x > 0, x, 1.0), 0.0)


def _bent(root: np.ndarray, bend: np.ndarray) -> np.ndarray:
    """R' with ``R' R'^T = W'``; by its diagonal if all matrices are diagonal."""
    if not bend.any():
        return root
    if _diagonal(root) and _diagonal(bend):
        own = root.diagonal()
        return np.diag(own / np.sqrt(1 + own * own * bend.diagonal()))
    values, vectors = np.linalg.eigh(root.T @ bend @ root)
    return root @ (vectors / np.sqrt(1 + np.maximum(values, 0.0)))


def _diagonal(matrix: np.ndarray) -> bool:
    return matrix.shape[0] == matrix.shape[1] and not (matrix - np.diag(matrix.diagonal())).any()


def _settled(root: np.ndarray, u: np.ndarray, moved: np.ndarray, away: np.ndarray) -> bool:
    """Whether a step is only rounding: in the largest numbers and, for each variable that moves, in the distance."""
    if np.abs(moved).max() > SETTLED * max(np.abs(u).max(), np.abs(away).max()):
        return False
    size = np.sqrt(np.square(root).sum(1))
    size = np.where(size > 0, size, np.inf)
    rounding = 1e-14 * np.linalg.norm(u / size)
    return bool(np.linalg.norm(moved / size) <= SETTLED * np.linalg.norm(away / size) + rounding)
