"""Monotone and taut profiles without bounds, and the numbers that all kernels of profiles share.

    min 1/2 sum q_i (u_i - z_i)^2   subject to  u increasing,     or     min 1/2 sum q_i (u_i - z_i)^2 + weight TV(u).

Monotone regression pools adjacent violators. The penalty is solved by Johnson's dynamic programming over the knots of
the derivative of the cost-to-come. It stores values at the knots, not slopes, so weights may range over 1e12. Both
write the edges of the solution: the signs of its jumps, 0 within a group of equal values.
"""

from __future__ import annotations

import numpy as np

from probhard._util.jit import Array, compiled

INCREASING, DECREASING, PENALTY, BOUND = 0, 1, 2, 3
EPSILON = 2.0**-52
RANGE = 1e4  # largest ratio of weights that are summed before the sums are written to the knots

Z, W, Q, A = range(4)  # rows of ``data`` (4, n): the points, weights (largest 1), their inverses, the row (largest 1)

# Rows of ``work`` (15, 2 n + 2). Of points: z - r w a; the sign of the jump after it, 0 within a group; between which
# values it follows its right neighbour. Of knots: position, derivative over its anchor, anchor. Of groups: first point,
# Q, A, s, rounding error, value before and after clipping, and -1 on the lower bound, 1 on the upper, 0 if free.
SHIFTED, EDGE, LEAST, MOST, POSITION, RISE, ANCHOR, START, TOTAL, SHARE, SIGN, NOISE, RAW, VALUE, SIDE = range(15)

# Kind, n, amount, lower, upper, mass, and the sum of the row's magnitudes, 0 without a row. A plain tuple: numba's
# cache on disk would refer to a class by name, and would break once the class changes.
Problem = tuple[int, int, float, float, float, float, float]


@compiled
def joint(mean: float, total: float, other: float, weight: float) -> float:
    """The mean of two weighted means, as a correction of the heavier one: the lighter one may be far away."""
    if weight > total:
        return other + (mean - other) * (total / (total + weight))
    return mean + (other - mean) * (weight / (total + weight))


@compiled
def monotone(data: Array, work: Array, n: int) -> None:
    """Edges of the increasing regression; equal neighbours are not pooled."""
    count = 0
    for i in range(n):
        work[EDGE, i] = 0.0
        work[START, count], work[RAW, count], work[TOTAL, count] = i, work[SHIFTED, i], data[Q, i]
        count += 1
        while count > 1 and work[RAW, count - 2] > work[RAW, count - 1]:
            count -= 1
            work[RAW, count - 1] = joint(
                work[RAW, count - 1], work[TOTAL, count - 1], work[RAW, count], work[TOTAL, count]
            )
            work[TOTAL, count - 1] += work[TOTAL, count]
    for g in range(1, count):
        work[EDGE, int(work[START, g]) - 1] = 1.0


@compiled
def flat(data: Array, work: Array, n: int) -> float:
    """The smallest penalty that leaves one group."""
    mean, total, running, largest = 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        mean = joint(mean, total, work[SHIFTED, i], data[Q, i])
        total += data[Q, i]
    for i in range(n - 1):
        running += data[Q, i] * (work[SHIFTED, i] - mean)
        largest = max(largest, abs(running))
    return largest


@compiled
def _crossing(work: Array, k: int, level: float, sum_q: float, sum_qz: float) -> float:
    """Where the derivative reaches ``level``, between the knots k - 1 and k."""
    x, width = work[POSITION, k - 1], work[POSITION, k] - work[POSITION, k - 1]
    rise = level - work[ANCHOR, k - 1] - (work[RISE, k - 1] + sum_q * x - sum_qz)
    whole = work[ANCHOR, k] - work[ANCHOR, k - 1] + (work[RISE, k] - work[RISE, k - 1] + sum_q * width)
    return x + width * min(1.0, max(0.0, rise / whole))


@compiled
def taut(data: Array, work: Array, n: int, weight: float) -> None:
    """Edges of the solution with the penalty ``weight TV(u)``.

    The derivative at a knot is its anchor, ``-weight`` or ``weight``, plus its rise, plus ``sum_q x - sum_qz``, which
    was added to all knots since.
    """
    heaviest = 0
    for i in range(n):
        work[EDGE, i] = 0.0
        heaviest = i if data[Q, i] > data[Q, heaviest] else heaviest
    if weight >= flat(data, work, n):
        return
    sum_q, sum_qz, smallest, left, right, low, high = 0.0, 0.0, np.inf, n + 1, n, 0.0, 0.0
    origin = work[SHIFTED, heaviest]
    for i in range(n):
        x, q, level = work[SHIFTED, i] - origin, data[Q, i], weight if i < n - 1 else 0.0
        smallest = min(smallest, q)
        if sum_q + q > RANGE * smallest:
            for k in range(left, right + 1):
                work[RISE, k] += sum_q * work[POSITION, k] - sum_qz
            sum_q, sum_qz, smallest = 0.0, 0.0, q
        sum_q += q
        sum_qz += q * x
        first, last = left, right
        while (
            first <= right and work[RISE, first] + sum_q * work[POSITION, first] - sum_qz < -level - work[ANCHOR, first]
        ):
            first += 1
        while last >= first and work[RISE, last] + sum_q * work[POSITION, last] - sum_qz > level - work[ANCHOR, last]:
            last -= 1
        before = weight if i > 0 else 0.0  # beyond the knots the derivative was flat, and has the slope q now
        if first == left:
            low = x + (before - level) / q
        else:
            low = x - (before + level) / q if first > right else _crossing(work, first, -level, sum_q, sum_qz)
        if last == right:
            high = x + (level - before) / q
        else:
            high = x + (level + before) / q if last < left else _crossing(work, last + 1, level, sum_q, sum_qz)
        left, right, high = first - 1, last + 1, max(low, high)
        work[POSITION, left], work[RISE, left], work[ANCHOR, left] = low, sum_qz - sum_q * low, -weight
        work[POSITION, right], work[RISE, right], work[ANCHOR, right] = high, sum_qz - sum_q * high, weight
        work[LEAST, i], work[MOST, i] = low, high
    u = work[LEAST, n - 1]
    for i in range(n - 2, -1, -1):
        if u > work[MOST, i]:
            work[EDGE, i], u = 1.0, work[MOST, i]
        elif u < work[LEAST, i]:
            work[EDGE, i], u = -1.0, work[LEAST, i]
