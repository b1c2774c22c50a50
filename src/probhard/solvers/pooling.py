"""Nearest monotone profiles and profiles of little variation, by kernels that numba compiles where it is installed.

Per profile of n points, with ``W = diag(w)``, ``q = 1/w`` and ``TV(u) = sum |u_{i+1} - u_i|``,

    min 1/2 sum q_i (u_i - z_i)^2 + weight TV(u)   or subject to  u increasing,   or  TV(u) <= amount,
    subject to  lower <= u <= upper,  a . u = mass.

With bounds that are uniform along the profile, clipping the unbounded solution is exact. The row adds a dual r that
shifts z to ``z - r w a``, and a bound on TV is a penalty whose weight is found: ``a . u`` and ``TV(u)`` fall piecewise
linearly in r and in the weight, so that Newton's method in a bracket ends on the right piece. On it, runs of equal
values ("groups", with sums Q of q, A of a, and s of the signs of their jumps) have
``u_g = (sum q z - r A - weight s) / Q`` or lie on a bound.

Monotone regression pools adjacent violators. The penalty is solved by Johnson's dynamic programme over the knots of
the derivative of the cost-to-come, which keeps values at the knots and not slopes: weights may then range over 1e12.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

try:
    from numba import njit
except ImportError:  # the same source runs as plain Python, some hundred times slower
    njit = None

INCREASING, DECREASING, PENALTY, BOUND = 0, 1, 2, 3
EPSILON = 2.0**-52
RANGE = 1e4  # of the weights that are summed before the sums are written to the knots
TRIALS = 200
FAR = 1e40  # units of the dual beyond which nothing changes any more

Function = TypeVar("Function", bound=Callable[..., Any])
Array = NDArray[np.float64]


def compiled(function: Function) -> Function:
    """Compile where numba is installed, and keep the result on disk where a folder for it can be written."""
    if njit is None:
        return function
    try:
        return cast(Function, njit(cache=True, error_model="numpy")(function))
    except RuntimeError:
        return cast(Function, njit(error_model="numpy")(function))


class Profile(NamedTuple):
    """One problem: increasing, penalised or bounded in variation; ``size`` is 0 without a row."""

    kind: int
    z: Array  # (n,)
    w: Array  # (n,), largest 1
    q: Array  # (n,)
    a: Array  # (n,), largest magnitude 1
    amount: float
    lower: float
    upper: float
    mass: float
    size: float  # sum of |a|


class Work(NamedTuple):
    """Room for one profile: n points, 2 n + 2 knots, up to n groups."""

    shifted: Array  # (n,) z - r w a
    edge: Array  # (n,) sign of the jump after a point, 0 within a group
    clamp: Array  # (2, n) between which a point follows its right neighbour
    knot: Array  # (3, 2 n + 2) positions, derivatives over their anchors, and these
    start: NDArray[np.int64]  # (n + 1,) first points of the groups
    total: Array  # (n,) Q
    share: Array  # (n,) A
    sign: Array  # (n,) s
    noise: Array  # (n,) rounding error of u
    raw: Array  # (n,) u before it is clipped
    value: Array  # (n,) u
    side: Array  # (n,) -1 on the lower bound, 1 on the upper, 0 free


@compiled
def _room(n: int) -> Work:
    """Fresh arrays for profiles of up to n points."""
    knot, start, shifted, edge = np.empty((3, 2 * n + 2)), np.empty(n + 1, np.int64), np.empty(n), np.empty(n)
    total, share, sign, noise, raw = np.empty(n), np.empty(n), np.empty(n), np.empty(n), np.empty(n)
    return Work(shifted, edge, np.empty((2, n)), knot, start, total, share, sign, noise, raw, np.empty(n), np.empty(n))


@compiled
def _monotone(z: Array, q: Array, work: Work) -> None:
    """Edges of the increasing regression; equal neighbours are not pooled."""
    count, mean, total, start = 0, work.value, work.total, work.start
    for i in range(len(z)):
        work.edge[i] = 0.0
        start[count], mean[count], total[count] = i, z[i], q[i]
        count += 1
        while count > 1 and mean[count - 2] > mean[count - 1]:
            count -= 1
            total[count - 1] += total[count]
            mean[count - 1] += (mean[count] - mean[count - 1]) * (total[count] / total[count - 1])
    for g in range(1, count):
        work.edge[start[g] - 1] = 1.0


@compiled
def _flat(z: Array, q: Array) -> float:
    """The smallest penalty that leaves one group."""
    moment, total, running, largest = 0.0, 0.0, 0.0, 0.0
    for i in range(len(z)):
        moment += q[i] * (z[i] - z[0])
        total += q[i]
    for i in range(len(z) - 1):
        running += q[i] * (z[i] - z[0] - moment / total)
        largest = max(largest, abs(running))
    return largest


@compiled
def _crossing(knot: Array, k: int, level: float, sum_q: float, sum_qz: float) -> float:
    """Where the derivative reaches ``level``, between the inner knots k - 1 and k."""
    x, width = knot[0, k - 1], knot[0, k] - knot[0, k - 1]
    rise = level - knot[2, k - 1] - (knot[1, k - 1] + sum_q * x - sum_qz)
    whole = knot[2, k] - knot[2, k - 1] + (knot[1, k] - knot[1, k - 1] + sum_q * width)
    return x + width * min(1.0, max(0.0, rise / whole))


@compiled
def _taut(z: Array, q: Array, weight: float, work: Work) -> None:
    """Edges of the solution with the penalty ``weight TV(u)``.

    A knot holds its position, the derivative over ``-weight`` or ``weight``, and which of these, but for
    ``sum_q x - sum_qz``, what was added to all knots since.
    """
    n, knot, clamp, edge = len(z), work.knot, work.clamp, work.edge
    edge[:] = 0.0
    if weight >= _flat(z, q):
        return
    sum_q, sum_qz, smallest, left, right, low, high = 0.0, 0.0, np.inf, n + 1, n, 0.0, 0.0
    for i in range(n):
        x, smallest, level = z[i] - z[0], min(smallest, q[i]), weight if i < n - 1 else 0.0
        if sum_q + q[i] > RANGE * smallest:
            for k in range(left, right + 1):
                knot[1, k] += sum_q * knot[0, k] - sum_qz
            sum_q, sum_qz, smallest = 0.0, 0.0, q[i]
        sum_q += q[i]
        sum_qz += q[i] * x
        first, last = left, right
        while first <= right and knot[1, first] + sum_q * knot[0, first] - sum_qz < -level - knot[2, first]:
            first += 1
        while last >= first and knot[1, last] + sum_q * knot[0, last] - sum_qz > level - knot[2, last]:
            last -= 1
        before = weight if i > 0 else 0.0  # beyond the knots the derivative was flat, and has the slope q now
        if first == left:
            low = x + (before - level) / q[i]
        elif first > right:
            low = x - (before + level) / q[i]
        else:
            low = _crossing(knot, first, -level, sum_q, sum_qz)
        if last == right:
            high = x + (level - before) / q[i]
        elif last < left:
            high = x + (level + before) / q[i]
        else:
            high = max(low, _crossing(knot, last + 1, level, sum_q, sum_qz))
        left, right = first - 1, last + 1
        knot[0, left], knot[1, left], knot[2, left] = low, sum_qz - sum_q * low, -weight
        knot[0, right], knot[1, right], knot[2, right] = high, sum_qz - sum_q * high, weight
        clamp[0, i], clamp[1, i] = low, high
    u = clamp[0, n - 1]
    for i in range(n - 2, -1, -1):
        if u > clamp[1, i]:
            edge[i], u = 1.0, clamp[1, i]
        elif u < clamp[0, i]:
            edge[i], u = -1.0, clamp[0, i]


@compiled
def _divide(profile: Profile, work: Work, r: float, weight: float) -> int:
    """Groups and their clipped values at the duals r and ``weight``; returns the number of groups."""
    n, z, edge = len(profile.z), work.shifted, work.edge
    for i in range(n):
        z[i] = profile.z[i] - r * profile.w[i] * profile.a[i]
    if profile.kind == INCREASING:
        _monotone(z, profile.q, work)
    elif weight > 0.0:
        _taut(z, profile.q, weight, work)
    else:
        for i in range(n - 1):
            edge[i] = -1.0 if z[i + 1] < z[i] else 1.0
    edge[n - 1] = 0.0
    count, first = 0, 0
    for i in range(n):
        if i < n - 1 and edge[i] == 0.0:
            continue
        total, moment, share, size, height = 0.0, 0.0, 0.0, 0.0, 0.0
        for j in range(first, i + 1):
            height = max(height, abs(profile.z[j]) + abs(z[j]))
            total += profile.q[j]
            moment += profile.q[j] * (z[j] - z[first])
            share += profile.a[j]
            size += abs(profile.a[j])
        sign = 0.0 if profile.kind == INCREASING else (edge[first - 1] if first > 0 else 0.0) - edge[i]
        u = z[first] + (moment - weight * sign) / total
        work.start[count], work.total[count], work.sign[count] = first, total, sign
        work.share[count] = share if abs(share) > 16.0 * EPSILON * size else 0.0
        work.side[count] = -1.0 if u <= profile.lower else (1.0 if u >= profile.upper else 0.0)
        work.noise[count] = EPSILON * height
        work.raw[count], work.value[count] = u, min(max(u, profile.lower), profile.upper)
        count, first = count + 1, i + 1
    work.start[count] = n
    return count


@compiled
def _sums(work: Work, count: int) -> tuple[float, float, float, float, float, float, float]:
    """``a . u``, ``TV(u)``, their rounding errors, and over free groups the sums of A^2/Q, A s/Q and s^2/Q."""
    row, variation, row_noise, noise, shares, mixed, signs = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for g in range(count):
        row += work.share[g] * work.value[g]
        variation += abs(work.value[g] - work.value[g - 1]) if g > 0 else 0.0
        if work.side[g] == 0.0:
            row_noise += abs(work.share[g]) * work.noise[g]
            noise += abs(work.sign[g]) * work.noise[g]
            shares += work.share[g] ** 2 / work.total[g]
            mixed += work.share[g] * work.sign[g] / work.total[g]
            signs += work.sign[g] ** 2 / work.total[g]
    return row, variation, row_noise, noise, shares, mixed, signs


@compiled
def _trial(
    k: int, x: float, f: float, fall: float, low: float, f_low: float, high: float, f_high: float, unit: float
) -> float:
    """The next x for a falling piecewise linear f: Newton's, the chord's, or every fourth time the middle."""
    step = f / fall if fall > 0.0 else np.inf * f
    if low == -np.inf or high == np.inf:
        reach = (unit + abs(x)) * 8.0
        return x + min(max(step * (2.0 if k % 3 == 2 else 1.0), -reach), reach)
    if k % 4 != 3 and low < x + step < high:
        return x + step
    chord = low + (high - low) * (f_low / (f_low - f_high))
    if k % 4 != 3 and low < chord < high:
        return chord
    if low >= 0.0 and high > 16.0 * low:
        return np.sqrt(low) * np.sqrt(high) if low > 0.0 else high / 64.0
    return 0.5 * (low + high)


@compiled
def _bounded(profile: Profile, work: Work, r: float, guess: float) -> tuple[int, float, bool]:
    """Groups at the dual r with the penalty that attains ``TV(u) = amount``, the penalty, and whether it is needed."""
    if profile.kind != BOUND:
        return _divide(profile, work, r, profile.amount), profile.amount, False
    count = _divide(profile, work, r, 0.0)
    _, variation, _, noise, _, _, fall = _sums(work, count)
    f, high = variation - profile.amount, _flat(work.shifted, profile.q)
    if f <= 0.0:
        return count, 0.0, False
    low, f_low, f_high = 0.0, f, -profile.amount
    x = guess if low < guess < high else _trial(0, 0.0, f, fall, low, f_low, high, f_high, 0.0)
    x = high if profile.amount <= 0.0 else x
    for k in range(TRIALS):
        count = _divide(profile, work, r, x)
        _, variation, _, noise, _, _, fall = _sums(work, count)
        f = variation - profile.amount
        if abs(f) <= EPSILON * profile.amount + noise or x >= high:
            break
        if f > 0.0:
            low, f_low = x, f
        else:
            high, f_high = x, f
        if high - low <= 2.0 * EPSILON * high:
            break
        x = _trial(k, x, f, fall, low, f_low, high, f_high, 0.0)
    return count, x, True


@compiled
def _balance(profile: Profile, work: Work) -> tuple[int, bool]:
    """Groups at the dual r where ``a . u = mass``, and whether a bound on TV is active."""
    count, weight, active = _bounded(profile, work, 0.0, 0.0)
    if profile.size == 0.0:
        return count, active
    height, steep = max(abs(profile.mass) / profile.size, 1e-300), 0.0
    for i in range(len(profile.z)):
        height, steep = max(height, abs(profile.z[i])), max(steep, profile.w[i] * abs(profile.a[i]))
    x, low, f_low, high, f_high, unit = 0.0, -np.inf, 0.0, np.inf, 0.0, height / steep
    for k in range(TRIALS):
        if k > 0:
            count, weight, active = _bounded(profile, work, x, weight)
        row, _, noise, _, shares, mixed, signs = _sums(work, count)
        f, fall = row - profile.mass, shares - mixed**2 / signs if active and signs > 0.0 else shares
        if abs(f) <= EPSILON * abs(profile.mass) + noise or abs(x) > FAR * unit:
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
def _error(profile: Profile, work: Work, count: int, active: bool) -> float:
    """How far row and variation are off, relative to their terms."""
    row, variation, _, _, _, _, _ = _sums(work, count)
    size, error = abs(profile.mass), 0.0
    for g in range(count):
        size += abs(work.share[g] * work.value[g])
    if profile.size > 0.0 and row != profile.mass:
        error = abs(row - profile.mass) / size
    return max(error, abs(variation - profile.amount) / (variation + profile.amount)) if active else error


@compiled
def _refine(profile: Profile, work: Work, count: int, active: bool, atoms: Profile, spare: Work) -> None:
    """Solve again with the groups as points: their numbers are those of the answer, where those of z may be large."""
    error = _error(profile, work, count, active)
    if error <= 4.0 * EPSILON:
        return
    for g in range(count):
        atoms.z[g], atoms.q[g], atoms.w[g] = work.raw[g], work.total[g], 1.0 / work.total[g]
        atoms.a[g] = work.share[g]
    z, w, q, a = atoms.z[:count], atoms.w[:count], atoms.q[:count], atoms.a[:count]
    amount, lower, upper = 0.0 if profile.kind == PENALTY else profile.amount, profile.lower, profile.upper
    joined, _ = _balance(Profile(profile.kind, z, w, q, a, amount, lower, upper, profile.mass, profile.size), spare)
    for h in range(joined):
        for g in range(spare.start[h], spare.start[h + 1]):
            z[g], w[g], q[g] = spare.raw[h], spare.value[h], spare.side[h]
    for _ in range(2):  # exchange, and exchange back if nothing is gained
        for g in range(count):
            z[g], work.raw[g] = work.raw[g], z[g]
            w[g], work.value[g] = work.value[g], w[g]
            q[g], work.side[g] = work.side[g], q[g]
        if _error(profile, work, count, active) <= error:
            return


@compiled
def _contract(profile: Profile, work: Work, count: int) -> None:
    """Shrink by units of rounding until ``TV(u) <= amount`` holds as floating point numbers add up."""
    pull, centre = EPSILON, work.value[count // 2]
    for _ in range(60):
        excess = _sums(work, count)[1] - profile.amount
        if not excess > 128.0 * EPSILON * profile.amount:
            return
        pull = min(1.0, 2.0 * max(pull, excess / (excess + profile.amount)))
        for g in range(count):
            work.value[g] += pull * (centre - work.value[g])
    work.value[:count] = centre


@compiled
def _segments(a: Array, turn: float, price: float) -> tuple[float, float]:
    """Number of edges and sum of the set of points with the largest ``turn * sum(a) - price * edges``."""
    off_edges, off_sum, on_edges, on_sum = 0.0, 0.0, 0.0, turn * a[0]
    for i in range(1, len(a)):
        opens = off_sum - price * (off_edges + 1.0) > on_sum - price * on_edges
        closes = on_sum - price * (on_edges + 1.0) > off_sum - price * off_edges
        edges, total = (off_edges + 1.0, off_sum) if opens else (on_edges, on_sum)
        if closes:
            off_edges, off_sum = on_edges + 1.0, on_sum
        on_edges, on_sum = edges, total + turn * a[i]
    if on_sum - price * on_edges > off_sum - price * off_edges:
        return on_edges, on_sum
    return off_edges, off_sum


@compiled
def _capacity(profile: Profile, turn: float) -> float:
    """The largest ``turn * a . u`` among profiles that satisfy everything but the row."""
    a, lower, upper, amount = profile.a, profile.lower, profile.upper, min(profile.amount, 1e300)
    noise, total, most, tail = 16.0 * EPSILON * profile.size, 0.0, 0.0, 0.0
    for i in range(len(a) - 1, -1, -1):
        tail += turn * a[i]
        most = max(most, tail if i > 0 or upper < np.inf else 0.0)
    total = tail if abs(tail) > noise else 0.0
    if profile.kind == PENALTY:
        result = 0.0
        for i in range(len(a)):
            if a[i] != 0.0:
                result += turn * a[i] * (upper if turn * a[i] > 0.0 else lower)
        return result
    if (total > 0.0 and upper == np.inf) or (total < 0.0 and lower == -np.inf):
        return np.inf
    if profile.kind == INCREASING:
        if lower > -np.inf and upper < np.inf:
            return lower * total + (upper - lower) * most
        if lower == -np.inf:  # the same from the top: lowering the points before a tail gains what the tail has over
            most -= total
        base = lower if lower > -np.inf else (upper if upper < np.inf else 0.0)
        return np.inf if most > noise else base * total
    if lower == -np.inf:  # nothing is gained beyond one amount from the other bound
        upper = upper if upper < np.inf else 0.0
        lower = upper - amount
    upper = upper if upper < np.inf else lower + amount
    if not upper > lower:
        return lower * total
    edges, few_sum, few = amount / (upper - lower), max(0.0, total), 0.0
    many, many_sum = _segments(a, turn, 0.0)
    for _ in range(2 * len(a)):  # vertices of the concave hull of the best sums over their numbers of edges
        if edges >= many or many <= few:
            return lower * total + (upper - lower) * many_sum
        price = (many_sum - few_sum) / (many - few)
        new, new_sum = _segments(a, turn, price)
        if new_sum - price * new <= few_sum - price * few + noise:
            return lower * total + (upper - lower) * (few_sum + price * (edges - few))
        if new <= edges:
            few, few_sum = new, new_sum
        else:
            many, many_sum = new, new_sum
    return np.inf


@compiled
def _attainable(profile: Profile) -> float:
    """The mass nearest to the one asked for that some profile attains."""
    total = 0.0
    for i in range(len(profile.a)):
        total += profile.a[i]
    constant = profile.mass / total if abs(total) > 16.0 * EPSILON * profile.size else np.inf
    if profile.kind != PENALTY and profile.lower <= constant <= profile.upper and abs(constant) < np.inf:
        return profile.mass
    return min(max(profile.mass, -_capacity(profile, -1.0)), _capacity(profile, 1.0))


@compiled
def solve(
    kind: int,
    z: Array,  # (profiles, n)
    w: Array,  # (profiles, n), positive
    amount: Array,  # (profiles,)
    lower: Array,
    upper: Array,
    a: Array,  # (profiles, n)
    mass: Array,
    has_row: bool,
) -> tuple[Array, NDArray[np.int64], NDArray[np.int8], NDArray[np.int8], NDArray[np.bool_], Array]:
    """Values, first points of their groups, sides, edges, which of row and TV bind, and relative residuals."""
    profiles, n = z.shape
    value, first = np.empty((profiles, n)), np.empty((profiles, n), np.int64)
    side, edge = np.empty((profiles, n), np.int8), np.empty((profiles, n), np.int8)
    binds, residual = np.zeros((profiles, 2), np.bool_), np.zeros(profiles)
    work, spare = _room(n), _room(n)
    points, weights, inverse, row = np.empty(n), np.empty(n), np.empty(n), np.zeros(n)
    atoms = Profile(0, np.empty(n), np.empty(n), np.empty(n), np.empty(n), 0.0, 0.0, 0.0, 0.0, 0.0)
    turn = -1.0 if kind == DECREASING else 1.0
    for p in range(profiles):
        low, high = (lower[p], upper[p]) if turn > 0.0 else (-upper[p], -lower[p])
        heaviest, steepest, size, height = 0.0, 0.0, 0.0, 0.0
        for i in range(n):
            heaviest = max(heaviest, w[p, i])
            steepest = max(steepest, abs(a[p, i])) if has_row else 0.0
        for i in range(n):
            points[i], weights[i] = turn * z[p, i], w[p, i] / heaviest
            inverse[i] = 1.0 / weights[i]
            height = max(height, abs(min(max(points[i], low), high)))
            if has_row:
                row[i] = a[p, i] / steepest
                size += abs(row[i])
        limit = max(amount[p], 0.0) * (heaviest if kind == PENALTY else 1.0)
        target = turn * mass[p] / steepest if has_row else 0.0
        profile = Profile(kind - (kind == DECREASING), points, weights, inverse, row, limit, low, high, target, size)
        if has_row:
            target = _attainable(profile)
            profile = Profile(profile.kind, points, weights, inverse, row, limit, low, high, target, size)
        count, active = _balance(profile, work)
        for _ in range(3):
            _refine(profile, work, count, active, atoms, spare)
        if kind == BOUND:
            _contract(profile, work, count)
        _, _, _, _, shares, mixed, signs = _sums(work, count)
        binds[p, 0], binds[p, 1] = shares > 0.0, active and signs > 0.0
        if binds[p, 0] and binds[p, 1] and shares * signs - mixed**2 <= 1e-12 * shares * signs:
            binds[p, 1] = False
        excess, magnitude = -mass[p], abs(mass[p]) + 1e-8 * size * steepest * height
        for g in range(count):
            if g > 0 and profile.kind == INCREASING:
                work.value[g] = max(work.value[g], work.value[g - 1])
            for i in range(work.start[g], work.start[g + 1]):
                value[p, i], first[p, i] = turn * work.value[g], work.start[g]
                side[p, i], edge[p, i] = np.int8(turn * work.side[g]), np.int8(turn * work.edge[i])
                if has_row:
                    excess += a[p, i] * value[p, i]
                    magnitude += abs(a[p, i] * value[p, i])
        if has_row and excess != 0.0:
            residual[p] = abs(excess) / magnitude
    return value, first, side, edge, binds, residual
