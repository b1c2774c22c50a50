"""Optimality conditions of a cone program as one equation without inequalities, solved by a semismooth Newton method.

For ``minimise 1/2 x^T P x + c^T x`` with ``A x + s = b``, s in a cone K, multipliers y and ``w = y - s``, they are

    P x + A^T proj(w) + c = 0,     A x + proj(w) - w = b,     proj on the dual cone of K.

Their residual proves optimality, regardless of the status of a solver. Their Jacobian gives derivatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.linalg

from probhard._util.numerics import TINY
from probhard.solvers.dual_cones import Cone, project

NEWTON = 30  # steps of refinement
PATIENCE = 4  # steps without progress
NOISE = 1e-6  # of large terms, below which small ones are not asked for more
STATIONARY = 1e-9  # relative residual of the conditions at which a point counts as solved
SOLVED, ROUNDED = 1e-15, 1e-12  # relative residuals: nothing left to gain, and only rounding left
DIVERGED = 1e100  # length of a step at which the method is stopped
SINGULAR = 1e-14  # reciprocal condition number below which a pseudo-inverse is used


@dataclass(frozen=True)
class KKTPoint:
    """A point of the optimality conditions, and how well it satisfies them."""

    conditions: Conditions
    x: np.ndarray  # (n,)
    y: np.ndarray  # multipliers, (m,)
    slope: np.ndarray  # of the projection on the dual cone, (m, m)
    left: float  # relative residual
    steps: int

    @property
    def solved(self) -> bool:
        """Whether the conditions prove the point optimal."""
        return self.left <= STATIONARY

    @cached_property
    def factor(self) -> Equilibrated:
        """The factored Jacobian of the conditions."""
        return Equilibrated(self.conditions.jacobian(self.slope))


@dataclass(frozen=True)
class Conditions:
    """``P x + A^T proj(w) + c = 0`` and ``A x + proj(w) - w = b``, the multipliers scaled by ``balance``."""

    P: np.ndarray
    A: np.ndarray
    b: np.ndarray
    c: np.ndarray
    cones: list[Cone]
    balance: float
    own: slice  # the columns of u

    def at(self, x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Residuals (n + m,), multipliers (m,) and the slope of the projection (m, m)."""
        y, slope = project(w, self.cones)
        return np.concatenate([self.P @ x + self.A.T @ y + self.c, self.A @ x + y - w - self.b]), y, slope

    def jacobian(self, slope: np.ndarray) -> np.ndarray:
        """The derivative of the residuals in (x, w), (n + m, n + m)."""
        n = len(self.c)
        matrix = np.empty((n + len(self.b),) * 2)
        matrix[:n, :n], matrix[:n, n:], matrix[n:, :n], matrix[n:, n:] = self.P, self.A.T @ slope, self.A, slope
        matrix[range(n, len(matrix)), range(n, len(matrix))] -= 1
        return matrix

    def refined(self, x: np.ndarray, w: np.ndarray) -> KKTPoint:
        """The best point of Newton's method from a solver's answer x (n,) and ``w = y - s`` (m,)."""
        if not (np.isfinite(x).all() and np.isfinite(w).all()):
            return KKTPoint(self, x, w, np.zeros((len(w), len(w))), np.inf, 0)
        f, y, slope = self.at(x, w)
        n, best = len(x), KKTPoint(self, x, y, slope, self.relative(f, x, y, w), 0)
        for step in range(1, NEWTON + 1):
            if best.left <= SOLVED or step > best.steps + PATIENCE:
                break
            move = Equilibrated(self.jacobian(slope)).solve(-f)
            x, w = x + move[:n], w + move[n:]
            if not np.abs(move).max() < DIVERGED:
                break
            f, y, slope = self.at(x, w)
            if not (np.isfinite(f).all() and np.isfinite(slope).all()):
                break
            left = self.relative(f, x, y, w)
            if best.left <= ROUNDED and left > 0.1 * best.left:
                break
            if left < best.left:
                best = KKTPoint(self, x, y, slope, left, step)
        return best

    def relative(self, f: np.ndarray, x: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
        """The largest residual relative to the terms that cancel in it.

        Rows and columns of ``v = R u - R z`` are measured by their own terms. Measured by the largest terms of all, an
        error in variables with large weights would look like rounding.
        """
        size, moved = np.abs(self.A), self.P.diagonal() > 0  # the columns of v
        first, second = np.abs(self.P) @ np.abs(x) + size.T @ np.abs(y) + np.abs(self.c), size @ np.abs(x)
        second += np.abs(y - w) + np.abs(self.b)
        rows = size[:, moved].any(1)
        reach = second[rows] + NOISE * size[rows][:, self.own] @ np.full(
            self.own.stop - self.own.start, np.abs(x[self.own]).max()
        )
        unit = (
            np.full(len(x), max(float(first.max()), self.balance)),
            np.full(len(y), float(second.max(initial=TINY))),
        )
        natural = self.balance * size[rows].T @ reach
        for columns in (moved, self.own):
            unit[0][columns] = np.maximum(natural, NOISE * first)[columns]
        unit[1][rows] = reach
        return float(np.abs(f / np.maximum(np.concatenate(unit), TINY)).max())


class Equilibrated:
    """A square matrix with scaled rows and columns, LU-factored; by its pseudo-inverse if it is singular.

    Args:
        matrix: The matrix, (k, k).
    """

    def __init__(self, matrix: np.ndarray) -> None:
        self.row_scale = _inverse(np.abs(matrix).max(1))
        matrix = matrix * self.row_scale[:, None]
        self.column_scale = _inverse(np.abs(matrix).max(0))
        matrix = matrix * self.column_scale
        self.inverse = None
        with np.errstate(all="ignore"):
            *self.triangles, flag = scipy.linalg.lapack.dgetrf(matrix)
            share = scipy.linalg.lapack.dgecon(self.triangles[0], np.abs(matrix).sum(0).max())[0]
        if flag or not share > SINGULAR:
            try:
                self.inverse = np.linalg.pinv(matrix, rcond=1e-10)
            except np.linalg.LinAlgError:  # numbers beyond float64: no step is taken
                self.inverse = np.zeros_like(matrix)

    def solve(self, right: np.ndarray, transposed: bool = False) -> np.ndarray:
        """Solve with the matrix or its transpose for one right-hand side (k,)."""
        left, after = self.row_scale, self.column_scale
        if transposed:
            left, after = after, left
        if self.inverse is not None:
            return after * ((self.inverse.T if transposed else self.inverse) @ (left * right))
        return after * scipy.linalg.lapack.dgetrs(*self.triangles, left * right, trans=int(transposed))[0]


def _inverse(x: np.ndarray) -> np.ndarray:
    """``1 / x``; 1 where x is 0."""
    return np.where(x > 0, 1 / np.where(x > 0, x, 1.0), 1.0)
