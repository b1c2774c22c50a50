"""The duals of the row and of the variation of profiles: shifts of z at which mass and variation are attained.

``a . u`` falls piecewise linearly in the dual r of the row, which shifts z to ``z - r w a``. Likewise TV(u) falls in
the weight of a penalty. A bracketed Newton method ends on the right piece of each. There, runs of equal values
("groups", with sums Q of q, A of a, and s of the signs of their jumps) have

    u_g = (sum q z - r A - weight s) / Q,     or lie on a bound.

Bounds are uniform along the profile, so clipping the unbounded solution is exact.
"""

from __future__ import annotations

import numpy as np

from probhard._util.jit import Array, compiled
from probhard._util.numerics import TINY
from probhard.solvers.profiles.unbounded import (
    BOUND,
    EDGE,
    EPSILON,
    INCREASING,
    NOISE,
    RAW,
    SHARE,
    SHIFTED,
    SIDE,
    SIGN,
    START,
    TOTAL,
    VALUE,
    A,
    Problem,
    Q,
    W,
    Z,
    flat,
    joint,
    monotone,
    taut,
)

TRIALS = 200
FAR = 1e40  # units of the dual beyond which the solution is constant


@compiled
def _divide(problem: Problem, data: Array, work: Array, r: float, weight: float) -> int:
    """Write the groups at the duals r and ``weight`` and their clipped values; returns the number of groups."""
    kind, n, _, lower, upper, _, _ = problem
    increasing = kind == INCREASING
    for i in range(n):
        work[SHIFTED, i] = data[Z, i] - r * data[W, i] * data[A, i]
    if increasing:
        monotone(data, work, n)
    elif weight > 0.0:
        taut(data, work, n, weight)
    else:
        for i in range(n - 1):
            work[EDGE, i] = -1.0 if work[SHIFTED, i + 1] < work[SHIFTED, i] else 1.0
    work[EDGE, n - 1] = 0.0
    count, first, before = 0, 0, 0.0
    total, mean, share, size, height = 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        q, z = data[Q, i], work[SHIFTED, i]
        mean = joint(mean, total, z, q)
        total += q
        height += q * (abs(data[Z, i]) + abs(z))
        share += data[A, i]
        size += abs(data[A, i])
        edge = work[EDGE, i]
        if i < n - 1 and edge == 0.0:
            continue
        sign = 0.0 if increasing else before - edge
        u = mean - weight * sign / total
        work[START, count], work[TOTAL, count], work[SIGN, count] = first, total, sign
        work[SHARE, count] = share if abs(share) > 16.0 * EPSILON * size else 0.0
        work[NOISE, count], work[RAW, count] = EPSILON * height / total, u
        work[VALUE, count] = min(max(u, lower), upper)
        work[SIDE, count] = -1.0 if u <= lower else (1.0 if u >= upper else 0.0)
        count, first, before = count + 1, i + 1, edge
        total, mean, share, size, height = 0.0, 0.0, 0.0, 0.0, 0.0
    work[START, count] = n
    return count


@compiled
def sums(work: Array, count: int) -> tuple[float, float, float, float, float, float, float]:
    """``a . u``, ``TV(u)``, their rounding errors, and over free groups the sums of A^2/Q, A s/Q and s^2/Q."""
    row, variation, row_noise, noise, shares, mixed, signs = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for g in range(count):
        share, sign, total = work[SHARE, g], work[SIGN, g], work[TOTAL, g]
        row += share * work[VALUE, g]
        variation += abs(work[VALUE, g] - work[VALUE, g - 1]) if g > 0 else 0.0
        if work[SIDE, g] == 0.0:
            row_noise += abs(share) * work[NOISE, g]
            noise += abs(sign) * work[NOISE, g]
            shares += share**2 / total
            mixed += share * sign / total
            signs += sign**2 / total
    return row, variation, row_noise, noise, shares, mixed, signs


@compiled
def _trial(
    k: int, x: float, f: float, fall: float, low: float, f_low: float, high: float, f_high: float, unit: float
) -> float:
    """The next x for a falling piecewise linear f: Newton's, the chord's, or the middle of the bracket."""
    step = f / fall if fall > 0.0 else np.inf * f
    if low == -np.inf or high == np.inf:
        reach = (unit + abs(x)) * 8.0
        return x + min(max(step * (2.0 if k % 3 == 2 else 1.0), -reach), reach)
    chord = low + (high - low) * (f_low / (f_low - f_high))
    if k % 4 != 3 and fall > 0.0 and (low < x + step < high or low < chord < high):
        return x + step if low < x + step < high else chord
    if low >= 0.0 and high > 16.0 * low:
        return np.sqrt(low) * np.sqrt(high) if low > 0.0 else high / 64.0
    return 0.5 * (low + high)


@compiled
def _bounded(problem: Problem, data: Array, work: Array, r: float, guess: float) -> tuple[int, float, bool]:
    """Number of groups at the dual r with ``TV(u) = amount``, the penalty attaining it, and whether one is needed."""
    kind, n, amount, _, _, _, _ = problem
    count, x, low, high, f_low, f_high = 0, 0.0 if kind == BOUND else amount, 0.0, np.inf, 0.0, -amount
    for k in range(TRIALS):
        count = _divide(problem, data, work, r, x)
        if kind != BOUND:
            break
        _, variation, _, noise, _, _, fall = sums(work, count)
        f = variation - amount
        if (k == 0 and f <= 0.0) or (k > 0 and abs(f) <= EPSILON * amount + noise) or x >= high:
            break
        if f > 0.0:
            low, f_low = x, f
        else:
            high, f_high = x, f
        if k == 0:
            high = flat(data, work, n)
        if high - low <= 2.0 * EPSILON * high or amount <= 0.0:
            x = high
        elif k == 0 and low < guess < high:
            x = guess
        else:
            x = _trial(k, x, f, fall, low, f_low, high, f_high, 0.0)
    return count, x, kind == BOUND and x > 0.0


@compiled
def balance(problem: Problem, data: Array, work: Array) -> tuple[int, bool]:
    """Number of groups at the dual r where ``a . u = mass``, and whether the bound on TV is active."""
    _, n, _, _, _, mass, size = problem
    height, steep = max(abs(mass), TINY), TINY
    for i in range(n):
        height, steep = max(height, abs(data[Z, i])), max(steep, data[W, i] * abs(data[A, i]))
    x, low, f_low, high, f_high, unit = 0.0, -np.inf, 0.0, np.inf, 0.0, height / steep
    count, weight, active = 0, 0.0, False
    for k in range(TRIALS):
        count, weight, active = _bounded(problem, data, work, x, weight)
        if size == 0.0:
            break
        row, _, noise, _, shares, mixed, signs = sums(work, count)
        f, fall = row - mass, shares - mixed**2 / signs if active and signs > 0.0 else shares
        if abs(f) <= EPSILON * abs(mass) + noise or abs(x) > FAR * unit:
            break
        if f > 0.0:
            low, f_low = x, f
        else:
            high, f_high = x, f
        if high - low <= 2.0 * EPSILON * min(abs(low) + abs(high), 1e300):
            break
        x = _trial(k, x, f, fall if fall > 1e-13 * shares else 0.0, low, f_low, high, f_high, unit)
    return count, active
