"""Nearest monotone profiles whose values are 0 or at least so much, by kernels that numba compiles where it is there.

    min 1/2 sum q_i (u_i - z_i)^2,   u monotone,   u_i = 0 or lower <= u_i <= upper,   least <= a . u <= most.

The values that are not 0 are the first k of a decreasing profile, the last k of an increasing one: for each k that is a
problem of ``pooling``. All k are looked at, those first whose cost cannot be below the smallest bound

    sum of q z^2 over the zeros + the larger of: q (clipped z - z)^2 over the others; (gap of the row)^2 / sum of w a^2,

and the search ends where the next bound is above the best cost found, so that the nearest of all profiles is returned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from probhard.jit import Array, compiled
from probhard.solvers.pooling import Found, room_for, settle
from probhard.solvers.profiles import DECREASING

ZERO = -2  # the side of a value that is 0


@compiled
def _bounds(
    turned: bool,
    z: Array,
    q: Array,
    lower: float,
    upper: float,
    may_vanish: bool,
    a: Array,
    least: float,
    most: float,
    bound: Array,  # (n + 1,), as the next: where the answer goes
    gap: Array,
) -> None:
    """For each k what a profile costs at least, and how far the row stays from where it should be."""
    n, row = len(z), len(a) > 0
    vanished, clipped, raised, size, spread, share = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for k in range(n, -1, -1):  # summed from the last one on: differences of sums would cancel
        bound[k] = vanished
        i = n - k if turned else k - 1
        vanished += q[i] * z[i] ** 2 if k > 0 else 0.0
    for k in range(n + 1):
        vanished, gap[k] = bound[k], 0.0
        if k > 0:
            i = n - k if turned else k - 1
            clipped += q[i] * (min(max(z[i], lower), upper) - z[i]) ** 2
            if row:
                raised += a[i] * z[i]
                size += a[i] * abs(z[i])
                spread += a[i] ** 2 / q[i]
                share += a[i]
        bound[k] = vanished + clipped
        if row:
            low, high = lower * share, upper * share if share > 0.0 else 0.0
            gap[k] = max(low - most, least - high, 0.0)
            distance = max(raised - most, least - raised) - 1e-12 * (size + abs(least) + abs(most))
            if spread > 0.0 and distance > 0.0:
                bound[k] = vanished + max(clipped, distance**2 / spread)
        if (k < n and not may_vanish) or (k > 0 and lower > upper):
            gap[k] = np.inf
        bound[k] *= 1.0 - 1e-12  # sums are rounded


@compiled
def solve(
    kind: int,
    z: Array,  # (profiles, n)
    w: Array,  # (profiles, n), positive
    lower: Array,  # (profiles,), of values that are not 0, not negative
    upper: Array,
    may_vanish: NDArray[np.bool_],  # (profiles,), whether 0 is allowed
    a: Array,  # (profiles, n), none negative, or (profiles, 0) without a row
    least: Array,
    most: Array,
    tolerance: float,  # gap of the row, relative to its size, that counts as none
) -> Found:
    """As ``pooling.solve``; zeros have a side of their own. Where no k fits, the answer is that of the smallest gap."""
    profiles, n = z.shape
    value, first = np.zeros((profiles, n)), np.empty((profiles, n), np.int64)
    side, edge = np.empty((profiles, n), np.int8), np.zeros((profiles, n), np.int8)
    binds, residual = np.zeros((profiles, 2), np.bool_), np.zeros((profiles, 2))
    room, q, bound, gap = room_for(n), np.empty(n), np.empty(n + 1), np.empty(n + 1)
    point, group, sides, edges = np.empty(n), np.empty(n, np.int64), np.empty(n, np.int8), np.empty(n, np.int8)
    bind, error = np.zeros(2, np.bool_), np.zeros(2)
    turned, row = kind != DECREASING, a.shape[1] > 0
    for p in range(profiles):
        heaviest = w[p].max()
        for i in range(n):
            first[p, i], side[p, i], q[i] = i, ZERO, heaviest / w[p, i]
        _bounds(turned, z[p], q, lower[p], upper[p], may_vanish[p], a[p], least[p], most[p], bound, gap)
        size = abs(least[p]) + abs(most[p]) + (lower[p] * a[p].sum() if row else 0.0) + 1e-300
        slack = max(tolerance * size, gap.min())  # where nothing fits, what misses least
        best = np.inf
        for k in np.argsort(bound):
            if bound[k] >= best:
                break
            if not gap[k] <= slack:
                continue
            start = n - k if turned else 0
            end, cost = start + k, 0.0
            bind[:], error[:] = False, gap[k] / size
            if k > 0:
                line = a[p, start:end] if row else a[p]
                numbers = (0.0, lower[p], upper[p], least[p], most[p])
                trial = (point[:k], group[:k], sides[:k], edges[:k], bind, error)
                settle(kind, z[p, start:end], w[p, start:end], line, numbers, room, trial)
            for i in range(n):
                u = point[i - start] if start <= i < end else 0.0
                cost += q[i] * (u - z[p, i]) ** 2
            if not cost < best:
                continue
            best = cost
            for i in range(n):
                inside = start <= i < end
                value[p, i] = point[i - start] if inside else 0.0
                first[p, i] = start + group[i - start] if inside else i
                side[p, i], edge[p, i] = (sides[i - start], edges[i - start]) if inside else (ZERO, 0)
            binds[p], residual[p] = bind, error
        if best == np.inf:  # not a number, or infinite
            value[p], residual[p] = np.nan, np.inf
    return value, first, side, edge, binds, residual
