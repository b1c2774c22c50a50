"""Random constraints that a given point obeys, each beside its violation in NumPy.

A part is built around a feasible point ``f`` of shape (*batch, n): bounds on either side of it, rows with the
right-hand side ``A f``, balls that reach it. So the set is never empty. ``violation`` computes how far other points are
from the set, relative to the sizes that cancel in it, from the same numbers but none of the library's code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cvxpy as cp
import numpy as np

import probhard as ph
from probhard.constraints import Constraint

Violation = Callable[[np.ndarray], np.ndarray]  # points (..., n) to relative violations (...)
Terms = Callable[[cp.Variable], list[cp.Constraint]]


@dataclass(frozen=True)
class Part:
    """A constraint, its violation in NumPy and, where it is convex and shared by the batch, its terms for cvxpy."""

    name: str
    constraint: Constraint
    violation: Violation
    terms: Terms | None = None


@dataclass
class Maker:
    """Makes random parts around a feasible point.

    Args:
        random: Source of random numbers.
        point: The feasible point, (*batch, n).
        scale: Typical size of its entries.
        flat: Whether sets may be degenerate: equal bounds, slack 0, balls of radius 0.
        rounding: Relative rounding of bounds in the precision of the law; 0 for float64.
    """

    random: np.random.Generator
    point: np.ndarray
    scale: float
    flat: bool
    rounding: float = 0.0
    coherent: np.ndarray | None = None  # summation matrix if the point adds up
    loose: float = 0.0  # relative violation of bounds that is tolerated, of others' points

    @property
    def n(self) -> int:
        return self.point.shape[-1]

    @property
    def shared(self) -> bool:
        """Whether there is one point only, so that one convex program describes the set."""
        return self.point.ndim == 1

    def slack(self, *shape: int) -> np.ndarray:
        """Distances from the point to the edge of the set, some of them 0."""
        room = self.scale * self.random.uniform(0, 1, shape) * self.random.choice([1e-3, 1.0, 10.0])
        zero = self.random.uniform(size=shape) < (0.5 if self.flat else 0.1)
        return np.where(zero, 0.0, room)

    def bounds(self, u: np.ndarray, lower: np.ndarray | float, upper: np.ndarray | float) -> np.ndarray:
        """Infinite where bounds do not hold: they hold exactly, but for their own rounding to the law's precision."""
        room = self.loose * np.abs(u).max(-1, initial=0.0, keepdims=True)
        below = u < lower - self.rounding * np.nan_to_num(np.abs(lower), posinf=0.0) - room
        above = u > upper + self.rounding * np.nan_to_num(np.abs(upper), posinf=0.0) + room
        return np.where((below | above).any(-1), np.inf, 0.0)

    def box(self) -> Part:
        lower, upper = self.point - self.slack(*self.point.shape), self.point + self.slack(*self.point.shape)
        open_ends = self.random.uniform(size=(2, self.n)) < 0.3
        lower, upper = np.where(open_ends[0], -np.inf, lower), np.where(open_ends[1], np.inf, upper)

        def terms(u: cp.Variable) -> list[cp.Constraint]:
            low, high = np.isfinite(lower), np.isfinite(upper)
            return [u[low] >= lower[low], u[high] <= upper[high]]

        return Part("box", ph.Box(lower, upper), lambda u: self.bounds(u, lower, upper), terms)

    def nonnegative(self) -> Part:
        return Part("non-negative", ph.NonNegative(), lambda u: self.bounds(u, 0.0, np.inf), lambda u: [u >= 0])

    def mass(self) -> Part:
        weights = self.random.uniform(0.1, 1, self.n) * self.random.choice([1e-3, 1.0, 1e3])
        total = self.point @ weights
        constraint = ph.Conservation(weights, total)
        return Part("mass", constraint, lambda u: relative_rows(u, weights[None], total[..., None]),
                    lambda u: [weights @ u == total])  # fmt: skip

    def equalities(self) -> Part:
        count = int(self.random.integers(1, max(2, self.n // 2 + 1)))
        rows = self.random.normal(size=(min(count, self.n), self.n))
        right = self.point @ rows.T
        constraint = ph.LinearEquality(rows, right)
        return Part("equalities", constraint, lambda u: relative_rows(u, rows, right), lambda u: [rows @ u == right])

    def inequalities(self) -> Part:
        rows = self.random.normal(size=(int(self.random.integers(1, 2 * self.n + 1)), self.n))
        right = self.point @ rows.T
        right = right + self.slack(*right.shape)
        constraint = ph.LinearInequality(rows, right)
        return Part("inequalities", constraint, lambda u: relative_rows(u, rows, right, above=True),
                    lambda u: [rows @ u <= right])  # fmt: skip

    def l1_ball(self) -> Part:
        center = self.scale * self.random.normal(size=self.n)
        distance = np.abs(self.point - center).sum(-1)
        radius = float(np.max(distance, initial=0.0) + self.slack(1)[0])

        def violation(u: np.ndarray) -> np.ndarray:
            size = radius + np.abs(u).sum(-1) + np.abs(center).sum()
            return np.maximum(np.abs(u - center).sum(-1) - radius, 0) / size

        return Part("L1 ball", ph.L1Ball(radius, center), violation, lambda u: [cp.norm1(u - center) <= radius])

    def variation(self) -> Part:
        bound = float(np.abs(np.diff(self.point, axis=-1)).sum(-1).max(initial=0.0) + self.slack(1)[0])

        def violation(u: np.ndarray) -> np.ndarray:
            found = np.abs(np.diff(u, axis=-1)).sum(-1) - bound
            return np.maximum(found, 0) / (bound + np.abs(u).sum(-1) + 1e-300)

        return Part(
            "variation", ph.TotalVariation(bound), violation, lambda u: [cp.tv(u) <= bound] if self.n > 1 else []
        )

    def monotone(self) -> Part:
        def violation(u: np.ndarray) -> np.ndarray:
            return np.maximum(-np.diff(u, axis=-1), 0).max(-1, initial=0.0) / (np.abs(u).max(-1) + 1e-300)

        return Part("increasing", ph.Monotone(), violation, lambda u: [cp.diff(u) >= 0] if self.n > 1 else [])

    def simplex(self) -> Part:
        total = self.point.sum(-1)

        def violation(u: np.ndarray) -> np.ndarray:
            return np.maximum(self.bounds(u, 0.0, np.inf), relative_rows(u, np.ones((1, self.n)), total[..., None]))

        return Part("simplex", ph.Simplex(total), violation, lambda u: [cp.sum(u) == total, u >= 0])

    def hierarchy(self) -> Part:
        assert self.coherent is not None
        above = len(self.coherent) - self.coherent.shape[1]
        rows = np.hstack([np.eye(above), -self.coherent[:above]])
        return Part("hierarchy", ph.Hierarchy(self.coherent), lambda u: relative_rows(u, rows, np.zeros(above)),
                    lambda u: [rows @ u == 0])  # fmt: skip


def relative_rows(u: np.ndarray, rows: np.ndarray, right: np.ndarray, above: bool = False) -> np.ndarray:
    """Largest violation of rows by points u (..., n), relative to the terms that cancel."""
    found = u @ rows.T - right
    size = np.abs(u) @ np.abs(rows).T + np.abs(right) + 1e-300
    return ((np.maximum(found, 0) if above else np.abs(found)) / size).max(-1, initial=0.0)
