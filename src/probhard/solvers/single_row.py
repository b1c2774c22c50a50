"""Rows over disjoint variables, with bounds: one multiplier per row, found by itself.

``phi(y) = a . clip(c - w a y, lower, upper) - b`` falls with y and is piecewise linear, so Newton's steps follow its
pieces and end exactly. Rows where they do not (all variables clipped, a vertex, an empty set) are searched again inside
a bracket that holds all breakpoints; a row whose bounds leave no point ends at the nearest vertex.
"""

from __future__ import annotations

import torch
from torch import Tensor

from probhard._util.tensors import divide
from probhard.rows.disjoint import DisjointRows
from probhard.solvers.quadratic import Faces, QuadraticProblem

QUICK, STEPS = 15, 100
ROUNDING = 1e-15  # gap of a root, relative to the terms of its row


@torch.no_grad()
def solve(problem: QuadraticProblem) -> Faces:
    """The sides of the optimal points; where the set is empty those of the nearest vertex."""
    found = _plain(problem)
    left = torch.nonzero(~found.done).squeeze(-1)
    return found.updated(left, _bracketed(problem.select(left))) if len(left) else found


def _plain(problem: QuadraticProblem) -> Faces:
    """Newton's steps alone, from the projection without bounds."""
    rows = problem.core
    assert isinstance(rows, DisjointRows)
    a, w, c = rows.split_coefficient(), rows.split(problem.weight), rows.split(problem.centre)
    lower, upper = rows.split(problem.lower), rows.split(problem.upper)
    reach = w * a
    squared = reach * a
    y = divide(rows.sums(a * c) - problem.right, rows.sums(squared))
    size = ROUNDING * (rows.sums((a * c).abs()) + problem.right.abs())
    steps = torch.ones_like(y, dtype=torch.int64)
    settled = torch.zeros_like(y, dtype=torch.bool)
    for _ in range(QUICK):
        target = torch.addcmul(c, reach, rows.spread(y), value=-1)
        value = target.clamp(lower, upper)
        gap = rows.sums(a * value) - problem.right
        settled = gap.abs() <= size
        if bool(settled.all()):
            break
        slope = rows.sums(squared * (target == value))
        steps = steps + (~settled).to(torch.int64)
        y = y + torch.where(settled, 0.0, divide(gap, slope))
    side = (target >= upper).to(torch.int8) - (target <= lower).to(torch.int8)
    side = torch.where(lower == upper, torch.ones_like(side), side)
    return Faces(rows.join(side), rows.join(value), steps.amax(-1), settled.all(-1), y)


def _bracketed(problem: QuadraticProblem) -> Faces:
    """Newton's steps kept inside a bracket."""
    rows = problem.core
    assert isinstance(rows, DisjointRows)
    split = rows.split
    a, w, c = rows.split_coefficient(), split(problem.weight), split(problem.centre)
    lower, upper = split(problem.lower), split(problem.upper)
    reach = w * a
    usable = reach != 0
    inverse = torch.where(usable, 1 / torch.where(usable, reach, 1.0), 0.0)
    ends = torch.stack([(c - lower) * inverse, (c - upper) * inverse])
    ends = torch.where(torch.isfinite(ends) & usable, ends, torch.nan)
    low = _extreme(rows, ends, torch.inf, "amin")  # all breakpoints are between low and high, (L, q)
    high = _extreme(rows, ends, -torch.inf, "amax")
    known = low <= high
    low, high = torch.where(known, low, 0.0), torch.where(known, high, 0.0)
    span = (high - low).clamp(min=1e-300)
    low, high = low - span, high + span
    y = torch.zeros_like(problem.right).clamp(low, high)
    open_low, open_high = torch.ones_like(y, dtype=torch.bool), torch.ones_like(y, dtype=torch.bool)
    previous = torch.full_like(c, 9, dtype=torch.int8)
    steps = torch.zeros_like(y, dtype=torch.int64)
    settled = torch.zeros_like(open_low)
    squared = reach * a
    inside = torch.zeros_like(open_low)  # whether the last step was Newton's
    for _ in range(STEPS):
        target = c - reach * rows.spread(y)
        side = (target > upper).to(torch.int8) - (target < lower).to(torch.int8)
        gap = rows.sums(a * target.clamp(lower, upper)) - problem.right
        slope = rows.sums(torch.where(side == 0, squared, 0.0))
        same = (side == previous).all(-1) if rows.group is None else _same(rows, side == previous)
        settled = settled | (same & inside) | (gap == 0)
        if bool(settled.all()):
            break
        steps = steps + (~settled).to(torch.int64)
        low, open_low = torch.where(gap > 0, y, low), open_low & ~(gap > 0)
        high, open_high = torch.where(gap < 0, y, high), open_high & ~(gap < 0)
        newton = y + divide(gap, slope)
        inside = (slope > 0) & (open_low | (newton > low)) & (open_high | (newton < high))
        middle = 0.5 * (low + high)
        stuck = ~inside & ((middle <= low) | (middle >= high))  # no room left: a vertex
        fresh = torch.where(inside, newton, torch.where(gap > 0, torch.where(open_high, high, middle), middle))
        fresh = torch.where(~inside & (gap < 0) & open_low, low, fresh)
        dead = ~inside & ((gap > 0) & open_high & (y == high) | (gap < 0) & open_low & (y == low))
        settled = settled | stuck | dead
        previous = side
        y = torch.where(settled, y, fresh)
    target = c - reach * rows.spread(y)
    side = (target >= upper).to(torch.int8) - (target <= lower).to(torch.int8)
    fixed = lower == upper
    side = torch.where(fixed, torch.ones_like(side), side)
    done = settled.all(-1)
    value = target.clamp(lower, upper)
    return Faces(rows.join(side), rows.join(value), steps.amax(-1), done, y)


def _extreme(rows: DisjointRows, ends: Tensor, start: float, how: str) -> Tensor:
    """Smallest or largest number of each row, NaN left out; ``start`` where there is none."""
    ends = torch.where(torch.isnan(ends), start, ends)
    ends = ends.amin(0) if how == "amin" else ends.amax(0)
    if rows.group is None:
        return ends.amin(-1) if how == "amin" else ends.amax(-1)
    found = ends.new_full((*ends.shape[:-1], rows.row_count), start)
    return found.scatter_reduce(-1, rows.group.expand(ends.shape), ends, how)


def _same(rows: DisjointRows, equal: Tensor) -> Tensor:
    return rows.sums((~equal).to(torch.float64)) == 0
