"""Compiled loops of ``laws.soft_threshold``: the fixed point of every element of a batch, and its fields.

Means and multipliers take Newton's steps, responses and noise simple ones. Far from the set an added variance, cooled
in each step, keeps some bounds in doubt. An element that does not converge starts again with shorter steps.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from probhard._util.jit import Array, compiled
from probhard.laws._threshold_kernels import RARE, TINY, clipped, fields, response, shared

SMALL = 1e-10  # smallest weight and variance that count, relative to the largest
MET = 1e-3  # residual of the row and the ball, in sds of a sum, up to which a fixed point is one
STALLED = 0.8  # a step that is not shorter than this share of the last one is followed by half a step


def _start(x: Array, bounds: Array, row: Array, goals: Array, sides: int, state: Array, last: Array) -> Array:
    """Write the first state (8, n) and multipliers (2,) of one element.

    Returns the stiffness of both sums, the largest weight and variance, and the squared distance from the set.
    """
    n, rows = len(row), 1 if np.any(row != 0) else 0
    out = np.zeros(5)
    total, length = 0.0, 0.0
    for i in range(n):
        a, mean, variance, w = row[i], x[i, 0], x[i, 1], x[i, 2]
        nearest = min(max(mean, bounds[i, 2 * (sides - 1)]), bounds[i, 1])
        out[0] += a * a * w
        out[1] += w
        out[2], out[3], out[4] = max(out[2], w), max(out[3], variance), max(out[4], (mean - nearest) ** 2)
        state[0, i], state[1, i], state[2, i] = a * a * w, 0.0, w if sides == 2 else 0.0
        state[3, i], state[4, i], state[5, i] = a * a * variance, 0.0, variance if sides == 2 else 0.0
        state[6, i], state[7, i] = a * nearest, abs(nearest) if sides == 2 else 0.0
        total += a * mean
        length += state[7, i]
    out[4] = max(out[4], (total - goals[0]) ** 2 * rows / n, (length - goals[1]) ** 2 * (sides - 1) / n)
    last[0], last[1] = (total - goals[0]) / out[0] if rows else 0.0, 0.0
    return out


start = compiled(_start)


def _solve(
    x: Array,
    bounds: Array,
    row: Array,
    goals: Array,
    sides: int,
    limits: tuple[int, int, float, float],
    first: Array,
    slow: int,
    state: Array,
    last: Array,
) -> bool:
    """Find the fixed point of one element; ``slow`` is 1 for short steps. Returns whether it was found."""
    most, calm, close, cooling = limits
    before, pace, shrink = np.inf, 1.0 / (1 + 2 * slow), cooling ** (1 / (1 + slow))
    fresh, whole, field, part = np.empty(12), np.empty(18), np.empty(16), np.zeros((2, 9))
    n, rows = len(row), 1 if np.any(row != 0) else 0
    stiff, smallest, spread = first[:2], SMALL * first[2], first[3]
    warm = first[4] if first[4] > 9 * spread else 0.0
    for step in range(most * (1 + slow)):
        wide = warm * shrink**step
        if wide < 1e-6 * spread + TINY:
            wide = 0.0
        shared(state, last, rows, sides, stiff, whole)
        moved, sum_row, sum_ball, s0, s1, s2 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for i in range(n):
            w = x[i, 2]
            fields(i, x[i], row[i], state, last, whole, sides, wide, field)
            for side in range(sides):
                start = 8 + 4 * side
                s = field[start + 1]
                scale = math.sqrt(field[start + 3]) / s
                low, high = bounds[i, 2 * side], bounds[i, 2 * side + 1]
                clipped(field[start + 2] / s, scale, low, high, part[side])
            response(row[i], w, sides, field, part, fresh)
            f, d = state[6, i], state[7, i]
            g, h = fresh[6] - f, fresh[7] - d  # Newton's step of the means
            fresh[6] = f + fresh[8] * g + fresh[9] * h
            fresh[7] = d + fresh[10] * g + fresh[11] * h
            width = x[i, 1] + wide + SMALL * spread + TINY
            size = abs(row[i])
            for j in range(8):
                unit = w + smallest if j < 3 else (width if j < 6 else math.sqrt(width))
                if j == 0 or j == 3:
                    unit *= size * size
                elif j == 1 or j == 4 or j == 6:
                    unit *= size
                change = fresh[j] - state[j, i]
                if not abs(change) <= moved * unit:  # also for NaN
                    moved = abs(change) / (unit + TINY)
                state[j, i] += (pace if j < 6 else 1.0) * change
            sum_row += state[6, i]
            sum_ball += state[7, i]
            s0, s1, s2 = s0 + state[0, i], s1 + state[1, i], s2 + state[2, i]
        s0, s2 = max(s0, RARE * stiff[0]), max(s2, RARE * stiff[1]) + whole[2] - whole[8]
        if rows == 0:
            s0 = 1.0
        if sides == 1:
            s2 = 1.0
        r0, r1 = sum_row - goals[0], 0.0
        if sides == 2:
            r1 = sum_ball - goals[1] - whole[13] * (last[1] - whole[12])
        det = max(s0 * s2 - s1 * s1, RARE * s0 * s2)
        d0, d1 = (s2 * r0 - s1 * r1) / det, (s0 * r1 - s1 * r0) / det
        if sides == 1:
            d1 = 0.0
        if rows == 0:
            d0 = 0.0
        if sides == 2:
            rise, most_rise = d1 / whole[15], 2 * whole[14] + abs(last[1])
            if abs(rise) > most_rise:
                cut = most_rise / abs(rise)
                d0, d1, rise, moved = cut * d0, cut * d1, cut * rise, max(moved, 1.0)
            last[1] += rise
        last[0] += d0
        for i in range(n):
            g, h = state[0, i] * d0 + state[1, i] * d1, state[1, i] * d0 + state[2, i] * d1
            f, d = state[6, i] - g, state[7, i] - h
            unit = math.sqrt(x[i, 1] + wide + SMALL * spread + TINY)
            if not abs(g) + abs(h) <= moved * unit:
                moved = (abs(g) + abs(h)) / unit
            if sides == 2 and d < 0.0:
                d = 0.0
            if sides == 2 and abs(f) > abs(row[i]) * d:
                f = math.copysign(abs(row[i]) * d, f)
            state[6, i], state[7, i] = f, d
        if step >= calm and not slow:
            pace = 0.5 if moved > STALLED * before else 1.0
        if not moved < np.inf:
            return False
        before = moved
        if wide == 0.0 and moved <= close:
            met = MET * math.sqrt(n * spread)
            return spread > 0.0 and (not rows or abs(r0) <= met * math.sqrt(first[0] / first[1])) and abs(r1) <= met
    return False


solve = compiled(_solve)


def _settle(
    x: Array,
    bounds: Array,
    row: Array,
    goals: Array,
    sides: int,
    limits: tuple[int, int, float, float],
    state: Array,
    last: Array,
    settled: NDArray[np.bool_],
) -> None:
    """Find fixed points.

    Args:
        x: Means, variances and weights, (B, n, 3).
        bounds: Lower and upper bounds of each side, (B, n, 4).
        row: Its coefficients, (n,).
        goals: Right-hand side of the row and the radius, (B, 2).
        sides: 2 with a ball, 1 without.
        limits: Most steps, whole ones, the tolerance and what an added variance is multiplied by in each step.
        state: Written, (B, 8, n).
        last: Multiplier of the row, and mean of the ball's field, written, (B, 2).
        settled: Written: whether the step became small, (B,).
    """
    for b in range(len(x)):
        for slow in range(2):
            first = start(x[b], bounds[b], row, goals[b], sides, state[b], last[b])
            settled[b] = solve(x[b], bounds[b], row, goals[b], sides, limits, first, slow, state[b], last[b])
            if settled[b]:
                break


settle = compiled(_settle)


def _placed(x: Array, row: Array, sides: int, state: Array, last: Array, out: Array) -> None:
    """Write location and scale of both sides, (B, n, 4), at fixed points; see ``settle``."""
    rows = 1 if np.any(row != 0) else 0
    whole, field, stiff = np.empty(18), np.empty(16), np.empty(2)
    for b in range(len(x)):
        stiff[0], stiff[1] = 0.0, 0.0
        for i in range(len(row)):
            stiff[0] += row[i] * row[i] * x[b, i, 2]
            stiff[1] += x[b, i, 2]
        shared(state[b], last[b], rows, sides, stiff, whole)
        for i in range(len(row)):
            fields(i, x[b, i], row[i], state[b], last[b], whole, sides, 0.0, field)
            for side in range(sides):
                start = 8 + 4 * side
                out[b, i, 2 * side] = field[start + 2] / field[start + 1]
                out[b, i, 2 * side + 1] = math.sqrt(field[start + 3]) / field[start + 1]


placed = compiled(_placed)
