"""Nearest monotone profiles and profiles of little variation, by kernels that numba compiles where it is installed.

Per profile of n points, with ``W = diag(w)``, ``q = 1/w`` and ``TV(u) = sum |u_{i+1} - u_i|``,

    min 1/2 sum q_i (u_i - z_i)^2 + weight TV(u)   or subject to  u increasing,   or  TV(u) <= amount,
    subject to  lower <= u <= upper,  least <= a . u <= most.

A row that holds without being asked for is left out; else it binds at the end that it is beyond, called mass. With
bounds that are uniform along the profile, clipping the unbounded solution is exact. The row adds a dual r that shifts z
to ``z - r w a``, and a bound on TV is a penalty whose weight is found: ``a . u`` and ``TV(u)`` fall piecewise linearly
in r and in the weight, so that Newton's method in a bracket ends on the right piece. On it, runs of equal values
("groups", with sums Q of q, A of a, and s of the signs of their jumps) have
``u_g = (sum q z - r A - weight s) / Q`` or lie on a bound.

``profiles`` has the two shapes without bounds, ``capacity`` the masses that can be attained.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from probhard.jit import Array, compiled
from probhard.solvers.capacity import attainable
from probhard.solvers.profiles import (
    BOUND,
    DECREASING,
    EDGE,
    EPSILON,
    INCREASING,
    NOISE,
    PENALTY,
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
FAR = 1e40  # units of the dual beyond which nothing changes any more


@compiled
def _divide(problem: Problem, data: Array, work: Array, r: float, weight: float) -> int:
    """Groups and their clipped values at the duals r and ``weight``; returns the number of groups."""
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
def _sums(work: Array, count: int) -> tuple[float, float, float, float, float, float, float]:
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
    """The next x for a falling piecewise linear f: Newton's, the chord's, or on flat pieces and at times the middle."""
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
    """Groups at the dual r with the penalty that attains ``TV(u) = amount``, the penalty, and whether it is needed."""
    kind, n, amount, _, _, _, _ = problem
    count, x, low, high, f_low, f_high = 0, 0.0 if kind == BOUND else amount, 0.0, np.inf, 0.0, -amount
    for k in range(TRIALS):
        count = _divide(problem, data, work, r, x)
        if kind != BOUND:
            break
        _, variation, _, noise, _, _, fall = _sums(work, count)
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
def _balance(problem: Problem, data: Array, work: Array) -> tuple[int, bool]:
    """Groups at the dual r where ``a . u = mass``, and whether a bound on TV is active."""
    _, n, _, _, _, mass, size = problem
    height, steep = max(abs(mass), 1e-300), 1e-300
    for i in range(n):
        height, steep = max(height, abs(data[Z, i])), max(steep, data[W, i] * abs(data[A, i]))
    x, low, f_low, high, f_high, unit = 0.0, -np.inf, 0.0, np.inf, 0.0, height / steep
    count, weight, active = 0, 0.0, False
    for k in range(TRIALS):
        count, weight, active = _bounded(problem, data, work, x, weight)
        if size == 0.0:
            break
        row, _, noise, _, shares, mixed, signs = _sums(work, count)
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


@compiled
def _error(problem: Problem, work: Array, count: int, active: bool) -> float:
    """How far the row is off, and the variation above its bound, relative to their terms."""
    row, variation, _, _, _, _, _ = _sums(work, count)
    _, _, amount, _, _, mass, sized = problem
    size, height, error = abs(mass), amount, 0.0
    for g in range(count):
        size += abs(work[SHARE, g] * work[VALUE, g])
        height = max(height, abs(work[VALUE, g]))
    if sized > 0.0 and row != mass:
        error = abs(row - mass) / size
    return max(error, (variation - amount) / (variation + height)) if active and variation > 0.0 else error


@compiled
def _refine(problem: Problem, work: Array, count: int, active: bool, atoms: Array, spare: Array) -> None:
    """Solve again with the groups as points: their numbers are those of the answer, where those of z may be large."""
    error = _error(problem, work, count, active)
    if error <= 4.0 * EPSILON:
        return
    for g in range(count):
        atoms[Z, g], atoms[Q, g], atoms[W, g] = work[RAW, g], work[TOTAL, g], 1.0 / work[TOTAL, g]
        atoms[A, g] = work[SHARE, g]
    kind, _, amount, lower, upper, mass, size = problem
    again = (kind, count, 0.0 if kind == PENALTY else amount, lower, upper, mass, size)
    joined, _ = _balance(again, atoms, spare)
    for h in range(joined):
        for g in range(int(spare[START, h]), int(spare[START, h + 1])):
            atoms[0, g], atoms[1, g], atoms[2, g] = spare[RAW, h], spare[VALUE, h], spare[SIDE, h]
    for _ in range(2):  # exchange, and exchange back if nothing is gained
        for k in range(3):
            for g in range(count):
                atoms[k, g], work[RAW + k, g] = work[RAW + k, g], atoms[k, g]
        if _error(problem, work, count, active) <= error:
            return


@compiled
def _contract(amount: float, work: Array, count: int) -> None:
    """Shrink by units of rounding until ``TV(u) <= amount`` holds as floating point numbers add up."""
    pull, centre = EPSILON, work[VALUE, count // 2]
    for _ in range(60):
        excess = _sums(work, count)[1] - amount
        if not excess > 128.0 * EPSILON * amount:
            return
        pull = min(1.0, 2.0 * max(pull, excess / (excess + amount)))
        for g in range(count):
            work[VALUE, g] += pull * (centre - work[VALUE, g])
    for g in range(count):
        work[VALUE, g] = centre


@compiled
def solve(
    kind: int,
    z: Array,  # (profiles, n)
    w: Array,  # (profiles, n), positive
    amount: Array,  # (profiles,)
    lower: Array,
    upper: Array,
    a: Array,  # (profiles, n), or (profiles, 0) without a row
    least: Array,
    most: Array,
) -> tuple[Array, NDArray[np.int64], NDArray[np.int8], NDArray[np.int8], NDArray[np.bool_], Array]:
    """Values, first points of their groups, sides, edges, which of row and TV bind, residual and gap.

    The residual is that of a row that binds, relative to its terms; the gap is the part that no profile can close.
    """
    profiles, n = z.shape
    value, first = np.empty((profiles, n)), np.empty((profiles, n), np.int64)
    side, edge = np.empty((profiles, n), np.int8), np.empty((profiles, n), np.int8)
    binds, residual = np.zeros((profiles, 2), np.bool_), np.zeros((profiles, 2))
    data, atoms, work, spare = np.zeros((4, n)), np.empty((4, n)), np.empty((15, 2 * n + 2)), np.empty((15, 2 * n + 2))
    turn, simple, row = -1.0 if kind == DECREASING else 1.0, INCREASING if kind == DECREASING else kind, a.shape[1] > 0
    for p in range(profiles):
        mass, tight, count, active = least[p], row, 0, False
        low, high = (lower[p], upper[p]) if turn > 0.0 else (-upper[p], -lower[p])
        heaviest, steepest, size, height = 0.0, 0.0, 0.0, 0.0
        for i in range(n):
            heaviest = max(heaviest, w[p, i])
            steepest = max(steepest, abs(a[p, i])) if row else 0.0
        for i in range(n):
            data[Z, i], data[W, i], data[Q, i] = turn * z[p, i], 1.0, 1.0
            if w[p, i] != heaviest:  # divisions are what a profile of equal weights would wait for
                data[W, i], data[Q, i] = w[p, i] / heaviest, heaviest / w[p, i]
            height = max(height, abs(min(max(data[Z, i], low), high)))
        limit, target = max(amount[p], 0.0) * (heaviest if kind == PENALTY else 1.0), 0.0
        if row:
            for i in range(n):
                data[A, i] = a[p, i] / steepest
                size += abs(data[A, i])
        if row and most[p] > mass:
            count, active = _balance((simple, n, limit, low, high, 0.0, 0.0), data, work)
            alone = turn * steepest * _sums(work, count)[0]
            tight = not mass <= alone <= most[p]
            mass = most[p] if alone > most[p] else mass
        size = size if tight else 0.0
        if tight:
            target = attainable((simple, n, limit, low, high, turn * mass / steepest, size), data)
        problem = (simple, n, limit, low, high, target, size)
        if tight or not row:
            count, active = _balance(problem, data, work)
        if row or kind == BOUND:
            for _ in range(3):
                _refine(problem, work, count, active, atoms, spare)
            if kind == BOUND:
                _contract(limit, work, count)
            _, _, _, _, shares, mixed, signs = _sums(work, count)
            binds[p, 0], binds[p, 1] = tight and shares > 0.0, active and signs > 0.0
            if binds[p, 0] and binds[p, 1] and shares * signs - mixed**2 <= 1e-12 * shares * signs:
                binds[p, 1] = False
        floor, excess, magnitude = low, -mass, abs(mass) + 1e-8 * size * steepest * height
        for g in range(count):
            u = min(max(work[VALUE, g], floor), high)
            floor = u if simple == INCREASING else low
            for i in range(int(work[START, g]), int(work[START, g + 1])):
                value[p, i], first[p, i] = turn * u, int(work[START, g])
                side[p, i], edge[p, i] = int(turn * work[SIDE, g]), int(turn * work[EDGE, i])
                if row:
                    excess += a[p, i] * value[p, i]
                    magnitude += abs(a[p, i] * value[p, i])
        if tight and excess != 0.0:
            residual[p, 0], residual[p, 1] = (
                abs(excess) / magnitude,
                abs(mass - turn * target * steepest) / magnitude,
            )
        if row and most[p] < least[p]:  # no profile is between
            residual[p, 0] = residual[p, 1] = max(residual[p, 0], (least[p] - most[p]) / magnitude)
    return value, first, side, edge, binds, residual
