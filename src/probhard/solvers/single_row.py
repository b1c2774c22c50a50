"""Quadratic problems whose rows share no variables, by Newton's method on each row's multiplier y.

The optimality conditions of a row ``a . v = b`` with bounds leave one scalar equation in y,

    phi(y) = a . clip(c - w a y, lower, upper) - b = 0,

the continuous quadratic knapsack problem. phi falls and is piecewise linear, so Newton's method follows its pieces and
ends exactly. Rows where it does not end (all variables clipped, a vertex, an empty set) are solved again by a bracketed
Newton method. The result is the ``Faces`` of the solution; a row that its bounds make infeasible ends at the nearest
vertex.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probhard._util.numerics import TINY
from probhard._util.tensors import divide
from probhard.rows.disjoint import DisjointRows
from probhard.solvers.quadratic import Faces, QuadraticProblem

QUICK, STEPS = 15, 100
ROUNDING = 1e-15  # residual of a root, relative to the terms of its row
UNKNOWN = 9  # a side that no variable has


@torch.no_grad()
def solve(problem: QuadraticProblem) -> Faces:
    """Find the sides of the optimal points.

    Args:
        problem: The problems, one per element of the leading dimension L; its rows are ``DisjointRows``.

    Returns:
        The faces of the solutions; where the set is empty, those of the nearest vertex.
    """
    faces = _plain(problem)
    left = faces.unfinished
    return faces.placed(left, _bracketed(problem.select(left))) if len(left) else faces


@dataclass(frozen=True)
class RowProblem:
    """The data of a problem arranged by rows, m variables each: (L, q, m), or (L, N) for rows of unequal length."""

    rows: DisjointRows
    right: Tensor  # b, (L, q)
    a: Tensor
    c: Tensor
    reach: Tensor  # w a
    squared: Tensor  # w a^2
    lower: Tensor
    upper: Tensor

    @classmethod
    def of(cls, problem: QuadraticProblem) -> RowProblem:
        """Arrange by rows."""
        rows = problem.core
        assert isinstance(rows, DisjointRows)
        a, c, reach = rows.split_coefficient(), rows.split(problem.centre), rows.split(problem.weight)
        reach = reach * a
        lower, upper = rows.split(problem.lower), rows.split(problem.upper)
        return cls(rows, problem.right, a, c, reach, reach * a, lower, upper)

    def residual(self, value: Tensor) -> Tensor:
        """``a . v - b``, (L, q)."""
        return self.rows.sums(self.a * value) - self.right

    def faces(self, target: Tensor, value: Tensor, y: Tensor, steps: Tensor, settled: Tensor) -> Faces:
        """Sides of targets that were clipped to values; steps and settled are those of the rows, (L, q)."""
        side = (target >= self.upper).to(torch.int8) - (target <= self.lower).to(torch.int8)
        side = torch.where(self.lower == self.upper, torch.ones_like(side), side)
        return Faces(self.rows.join(side), self.rows.join(value), steps.amax(-1), settled.all(-1), y)


def _plain(problem: QuadraticProblem) -> Faces:
    """Newton's method from the projection without bounds."""
    data = RowProblem.of(problem)
    rows = data.rows
    y = divide(rows.sums(data.a * data.c) - data.right, rows.sums(data.squared))
    size = ROUNDING * (rows.sums((data.a * data.c).abs()) + data.right.abs())
    steps = torch.ones_like(y, dtype=torch.int64)
    settled = torch.zeros_like(y, dtype=torch.bool)
    for _ in range(QUICK):
        target = torch.addcmul(data.c, data.reach, rows.spread(y), value=-1)
        value = target.clamp(data.lower, data.upper)
        residual = data.residual(value)
        settled = residual.abs() <= size
        if bool(settled.all()):
            break
        slope = rows.sums(data.squared * (target == value))
        steps = steps + (~settled).to(torch.int64)
        y = y + torch.where(settled, 0.0, divide(residual, slope))
    return data.faces(target, value, y, steps, settled)


def _bracketed(problem: QuadraticProblem) -> Faces:
    """Newton's method kept inside a bracket, by bisection where a step would leave it."""
    data = RowProblem.of(problem)
    rows, bracket = data.rows, Bracket.of(data)
    y = torch.zeros_like(data.right).clamp(bracket.low, bracket.high)
    previous = torch.full_like(data.c, UNKNOWN, dtype=torch.int8)
    steps = torch.zeros_like(y, dtype=torch.int64)
    settled = torch.zeros_like(y, dtype=torch.bool)
    newton = torch.zeros_like(settled)  # whether the last step was Newton's
    for _ in range(STEPS):
        target = data.c - data.reach * rows.spread(y)
        side = (target > data.upper).to(torch.int8) - (target < data.lower).to(torch.int8)
        residual = data.residual(target.clamp(data.lower, data.upper))
        slope = rows.sums(torch.where(side == 0, data.squared, 0.0))
        settled = settled | (_same(rows, side == previous) & newton) | (residual == 0)
        if bool(settled.all()):
            break
        steps = steps + (~settled).to(torch.int64)
        bracket = bracket.narrowed(y, residual)
        fresh, newton, ended = bracket.step(y, residual, slope)
        settled = settled | ended
        previous = side
        y = torch.where(settled, y, fresh)
    target = data.c - data.reach * rows.spread(y)
    return data.faces(target, target.clamp(data.lower, data.upper), y, steps, settled)


@dataclass(frozen=True)
class Bracket:
    """An interval of multipliers (L, q) around each root; an open end has not been evaluated yet."""

    low: Tensor
    high: Tensor
    open_low: Tensor  # bool
    open_high: Tensor  # bool

    @classmethod
    def of(cls, data: RowProblem) -> Bracket:
        """The interval of all breakpoints ``(c - bound) / (w a)``, widened by its own length on both sides."""
        usable = data.reach != 0
        inverse = torch.where(usable, 1 / torch.where(usable, data.reach, 1.0), 0.0)
        points = torch.stack([(data.c - data.lower) * inverse, (data.c - data.upper) * inverse])
        points = torch.where(torch.isfinite(points) & usable, points, torch.nan)
        low = _extreme(data.rows, points, torch.inf, "amin")
        high = _extreme(data.rows, points, -torch.inf, "amax")
        known = low <= high
        low, high = torch.where(known, low, 0.0), torch.where(known, high, 0.0)
        span = (high - low).clamp(min=TINY)
        unseen = torch.ones_like(low, dtype=torch.bool)
        return cls(low - span, high + span, unseen, unseen)

    def narrowed(self, y: Tensor, residual: Tensor) -> Bracket:
        """The bracket with one end at y: the root is above where the residual is positive, else below."""
        above, below = residual > 0, residual < 0
        low, high = torch.where(above, y, self.low), torch.where(below, y, self.high)
        return Bracket(low, high, self.open_low & ~above, self.open_high & ~below)

    def step(self, y: Tensor, residual: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next multiplier, whether it is Newton's, and where the bracket leaves no room for another."""
        above, below = residual > 0, residual < 0
        newton = y + divide(residual, slope)
        inside = (slope > 0) & (self.open_low | (newton > self.low)) & (self.open_high | (newton < self.high))
        middle = 0.5 * (self.low + self.high)
        fresh = torch.where(inside, newton, torch.where(above & self.open_high, self.high, middle))
        fresh = torch.where(~inside & below & self.open_low, self.low, fresh)
        vertex = ~inside & ((middle <= self.low) | (middle >= self.high))
        at_end = (above & self.open_high & (y == self.high)) | (below & self.open_low & (y == self.low))
        return fresh, inside, vertex | (~inside & at_end)


def _extreme(rows: DisjointRows, points: Tensor, start: float, how: str) -> Tensor:
    """Smallest or largest number of each row (L, q), ignoring NaN; ``start`` if there is none."""
    points = torch.where(torch.isnan(points), start, points)
    points = points.amin(0) if how == "amin" else points.amax(0)
    if rows.group is None:
        return points.amin(-1) if how == "amin" else points.amax(-1)
    extreme = points.new_full((*points.shape[:-1], rows.row_count), start)
    return extreme.scatter_reduce(-1, rows.group.expand(points.shape), points, how)


def _same(rows: DisjointRows, equal: Tensor) -> Tensor:
    """Where ``equal`` holds for all variables of a row, (L, q)."""
    return equal.all(-1) if rows.group is None else rows.sums((~equal).to(torch.float64)) == 0
