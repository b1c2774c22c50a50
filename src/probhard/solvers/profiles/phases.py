"""Nearest monotone profiles of semicontinuous values, by kernels that numba compiles.

    min 1/2 sum q_i (u_i - z_i)^2,   u monotone,   u_i = 0 or lower <= u_i <= upper,   least <= a . u <= most.

The nonzero values are the first k of a decreasing profile, the last k of an increasing one. Each k is a problem of
``pooling``. Branch and bound searches all k in the order of a lower bound of their cost,

    sum of q z^2 over the zeros + the larger of: q (clipped z - z)^2 over the others; (gap of the row)^2 / sum of w a^2.

It ends where the next bound exceeds the best cost, so the profile returned is the nearest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from probhard._util.jit import Array, compiled
from probhard._util.numerics import TINY
from probhard.solvers.profiles.pooling import Numbers, Result, room_for, settle
from probhard.solvers.profiles.unbounded import DECREASING

ZERO = -2  # the side of a value that is 0

Limits = tuple[Array, Array, Array, Array]  # lower, upper, least and most, each (profiles,)


@compiled
def _bounds(
    turned: bool,
    z: Array,
    q: Array,
    a: Array,
    numbers: Numbers,
    may_vanish: bool,
    bound: Array,  # (n + 1,), as the next: written to
    gap: Array,
) -> None:
    """Write for each k a lower bound of the cost, and the gap that its row cannot close.

    The gap is relative to the terms of the row, and infinite if the bounds allow no such profile.
    """
    n, row = len(z), len(a) > 0
    unit, lower, upper, least, most = numbers
    vanished, clipped, raised, size, spread, share = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for k in range(n, -1, -1):  # summed from the last one on: differences of sums would cancel
        bound[k] = vanished
        i = n - k if turned else k - 1
        vanished += q[i] * (z[i] / unit) ** 2 if k > 0 else 0.0
    for k in range(n + 1):
        vanished, gap[k] = bound[k], 0.0
        if k > 0:
            i = n - k if turned else k - 1
            clipped += q[i] * ((min(max(z[i], lower), upper) - z[i]) / unit) ** 2
            if row:
                raised += a[i] * z[i]
                size += a[i] * abs(z[i])
                spread += a[i] ** 2 / q[i]
                share += a[i]
        bound[k] = vanished + clipped
        if row:
            low, high = (lower * share, upper * share) if share > 0.0 else (0.0, 0.0)
            if low > most:
                gap[k] = (low - most) / (low + abs(most))
            if least > high:
                gap[k] = max(gap[k], (least - high) / (least + abs(high)))
            distance, end = (raised - most, most) if raised > most else (least - raised, least)
            distance -= 1e-12 * (size + abs(end))
            if spread > 0.0 and distance > 0.0:
                bound[k] = vanished + max(clipped, (distance / unit) ** 2 / spread)
        if (k < n and not may_vanish) or (k > 0 and lower > upper):
            gap[k] = np.inf
        bound[k] *= 1.0 - 1e-12  # sums are rounded


@compiled
def _cost(z: Array, q: Array, point: Array, start: int, end: int, unit: float) -> float:
    """``sum q (u - z)^2`` in units, of the profile that is ``point`` between start and end and 0 elsewhere."""
    cost = 0.0
    for i in range(len(z)):
        u = point[i - start] if start <= i < end else 0.0
        cost += q[i] * ((u - z[i]) / unit) ** 2
    return cost


@compiled
def _store(trial: Result, start: int, end: int, gap: float, result: Result) -> None:
    """Write a trial between start and end as the result, and zeros elsewhere."""
    point, group, sides, edges, bind, error = trial
    value, first, side, edge, binds, residual = result
    for i in range(len(value)):
        inside = start <= i < end
        value[i] = point[i - start] if inside else 0.0
        first[i] = start + group[i - start] if inside else i
        side[i], edge[i] = (sides[i - start], edges[i - start]) if inside else (ZERO, 0)
    binds[:] = bind
    residual[0], residual[1] = max(error[0], gap), max(error[1], gap)


@compiled
def _rest(total: float, lower: float, least: float, most: float) -> float:
    """The gap of a row if all values are 0, for a required sum of 0 up to rounding."""
    return max(-most, least, 0.0) / (lower * total + TINY)


@compiled
def solve(
    kind: int,
    z: Array,  # (profiles, n)
    w: Array,  # (profiles, n), positive
    a: Array,  # (profiles, n), none negative, or (profiles, 0) without a row
    limits: Limits,  # of nonzero values, none negative, and of the row
    may_vanish: NDArray[np.bool_],  # (profiles,), whether 0 is allowed
    tolerance: float,  # gap of the row, relative to its terms, that counts as none
) -> Result:
    """As ``pooling.solve``; zeros have the side ``ZERO``.

    If no k fits the row, the result is that of the smallest gap; if the bounds allow no profile, it is NaN.
    """
    profiles, n = z.shape
    lower, upper, least, most = limits
    value, first = np.full((profiles, n), np.nan), np.zeros((profiles, n), np.int64)
    side, edge = np.empty((profiles, n), np.int8), np.zeros((profiles, n), np.int8)
    binds, residual = np.zeros((profiles, 2), np.bool_), np.full((profiles, 2), np.inf)
    room, q, bound, gap = room_for(n), np.empty(n), np.empty(n + 1), np.empty(n + 1)
    point, group, sides, edges = np.empty(n), np.empty(n, np.int64), np.empty(n, np.int8), np.empty(n, np.int8)
    bind, error = np.zeros(2, np.bool_), np.zeros(2)
    turned, row = kind != DECREASING, a.shape[1] > 0
    for p in range(profiles):
        heaviest, unit = w[p].max(), max(np.abs(z[p]).max(), lower[p], TINY)
        for i in range(n):
            first[p, i], side[p, i], q[i] = i, ZERO, heaviest / w[p, i]
        numbers = (unit, lower[p], upper[p], least[p], most[p])
        _bounds(turned, z[p], q, a[p], numbers, may_vanish[p], bound, gap)
        if row and may_vanish[p] and gap.min() > tolerance:
            rest = _rest(a[p].sum(), lower[p], least[p], most[p])
            gap[0] = rest if rest <= tolerance else gap[0]
        slack, best = max(tolerance, gap.min()), np.inf
        for k in np.argsort(bound):
            if bound[k] >= best:
                break
            if not gap[k] <= slack or gap[k] == np.inf:
                continue
            start = n - k if turned else 0
            end = start + k
            trial = (point[:k], group[:k], sides[:k], edges[:k], bind, error)
            bind[:], error[:] = False, 0.0
            if k > 0:
                line = a[p, start:end] if row and a[p, start:end].max() > 0.0 else a[p, :0]
                settle(kind, z[p, start:end], w[p, start:end], line, (0.0, *numbers[1:]), room, trial)
            cost = _cost(z[p], q, point, start, end, unit)
            if cost < best:
                best = cost
                _store(trial, start, end, gap[k], (value[p], first[p], side[p], edge[p], binds[p], residual[p]))
    return value, first, side, edge, binds, residual
