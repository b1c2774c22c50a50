"""Nearest monotone profiles and profiles of bounded or penalised variation, by kernels that numba compiles.

Per profile of n points, with ``W = diag(w)``, ``q = 1/w`` and ``TV(u) = sum |u_{i+1} - u_i|``,

    min 1/2 sum q_i (u_i - z_i)^2 + weight TV(u)   or subject to  u increasing,   or  TV(u) <= amount,
    subject to  lower <= u <= upper,  least <= a . u <= most.

The methods are pool adjacent violators (isotonic regression) and Johnson's dynamic programming (total variation). They
run inside a search for the duals of the row and of the bound on TV. A row that the solution without it satisfies is
left out. Otherwise it binds at the end that is exceeded, called mass. The answer is refined with its groups as points,
whose numbers are smaller. It always stays within its bounds.

``unbounded`` has the two shapes without bounds, ``duals`` the search, ``capacity`` the masses that can be attained.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from probhard._util.jit import Array, compiled
from probhard.solvers.profiles.capacity import attainable
from probhard.solvers.profiles.duals import balance, sums
from probhard.solvers.profiles.unbounded import (
    BOUND,
    DECREASING,
    EDGE,
    EPSILON,
    INCREASING,
    PENALTY,
    RAW,
    SHARE,
    SIDE,
    START,
    TOTAL,
    VALUE,
    A,
    Problem,
    Q,
    W,
    Z,
)

SAME = 1e-12  # relative determinant below which row and TV count as dependent

Room = tuple[Array, Array, Array, Array]  # data (4, n) of the profile and of its groups, and their work (15, 2 n + 2)
Numbers = tuple[float, float, float, float, float]  # amount, lower, upper, least, most
Result = tuple[Array, NDArray[np.int64], NDArray[np.int8], NDArray[np.int8], NDArray[np.bool_], Array]


@compiled
def _error(problem: Problem, work: Array, count: int, active: bool) -> float:
    """The larger of the residual of the row and the excess of the variation, relative to their terms."""
    row, variation, _, _, _, _, _ = sums(work, count)
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
    """Solve again with the groups as points: their numbers have the size of the answer, those of z may be larger."""
    error = _error(problem, work, count, active)
    if error <= 4.0 * EPSILON:
        return
    for g in range(count):
        atoms[Z, g], atoms[Q, g], atoms[W, g] = work[RAW, g], work[TOTAL, g], 1.0 / work[TOTAL, g]
        atoms[A, g] = work[SHARE, g]
    kind, _, amount, lower, upper, mass, size = problem
    again = (kind, count, 0.0 if kind == PENALTY else amount, lower, upper, mass, size)
    joined, _ = balance(again, atoms, spare)
    for h in range(joined):
        for g in range(int(spare[START, h]), int(spare[START, h + 1])):
            atoms[0, g], atoms[1, g], atoms[2, g] = spare[RAW, h], spare[VALUE, h], spare[SIDE, h]
    for _ in range(2):  # exchange, and exchange back unless the error falls
        for k in range(3):
            for g in range(count):
                atoms[k, g], work[RAW + k, g] = work[RAW + k, g], atoms[k, g]
        if _error(problem, work, count, active) <= error:
            return


@compiled
def _contract(amount: float, work: Array, count: int) -> None:
    """Shrink the profile by units of rounding until ``TV(u) <= amount`` holds in floating point."""
    pull, centre = EPSILON, work[VALUE, count // 2]
    for _ in range(60):
        excess = sums(work, count)[1] - amount
        if not excess > 128.0 * EPSILON * amount:
            return
        pull = min(1.0, 2.0 * max(pull, excess / (excess + amount)))
        for g in range(count):
            work[VALUE, g] += pull * (centre - work[VALUE, g])
    for g in range(count):
        work[VALUE, g] = centre


@compiled
def _load(turn: float, z: Array, w: Array, a: Array, data: Array) -> tuple[float, float, float]:
    """Fill ``data``, scaled to a largest weight and coefficient of 1; returns these two and the sum of ``|a|``."""
    n, row = len(z), len(a) > 0
    heaviest, steepest, size = 0.0, 0.0, 0.0
    for i in range(n):
        heaviest = max(heaviest, w[i])
        steepest = max(steepest, abs(a[i])) if row else 0.0
    for i in range(n):
        data[Z, i], data[W, i], data[Q, i] = turn * z[i], 1.0, 1.0
        if w[i] != heaviest:  # divisions would dominate the cost of a profile of equal weights
            data[W, i], data[Q, i] = w[i] / heaviest, heaviest / w[i]
        data[A, i] = a[i] / steepest if row else 0.0
        size += abs(data[A, i])
    return heaviest, steepest, size


@compiled
def _binding(work: Array, count: int, tight: bool, active: bool) -> tuple[bool, bool]:
    """Whether row and TV bind; the second does not if both say the same."""
    _, _, _, _, shares, mixed, signs = sums(work, count)
    row, variation = tight and shares > 0.0, active and signs > 0.0
    if row and variation and shares * signs - mixed**2 <= SAME * shares * signs:
        variation = False
    return row, variation


@compiled
def _store(
    problem: Problem, turn: float, a: Array, work: Array, count: int, excess: float, magnitude: float, result: Result
) -> tuple[float, float]:
    """Write values, groups, sides and edges; returns ``a . u`` added to excess and ``|a| . |u|`` to magnitude."""
    simple, _, _, low, high, _, _ = problem
    value, first, side, edge, _, _ = result
    floor = low
    for g in range(count):
        u = min(max(work[VALUE, g], floor), high)
        floor = u if simple == INCREASING else low
        for i in range(int(work[START, g]), int(work[START, g + 1])):
            value[i], first[i] = turn * u, int(work[START, g])
            side[i], edge[i] = int(turn * work[SIDE, g]), int(turn * work[EDGE, i])
            if len(a) > 0:
                excess += a[i] * value[i]
                magnitude += abs(a[i] * value[i])
    return excess, magnitude


@compiled
def settle(
    kind: int,
    z: Array,  # (n,)
    w: Array,  # (n,), positive
    a: Array,  # (n,), or (0,) without a row
    numbers: Numbers,
    room: Room,
    result: Result,  # written to: four of (n,) and two of (2,)
) -> None:
    """Solve for one profile, as ``solve`` does for all.

    Args:
        kind: INCREASING, DECREASING, PENALTY or BOUND.
        z: Points.
        w: Weights.
        a: Coefficients of the row.
        numbers: Amount, lower, upper, least and most.
        room: Working memory of ``room_for``.
        result: Arrays to write to.
    """
    n, row = len(z), len(a) > 0
    data, atoms, work, spare = room
    amount, lower, upper, least, most = numbers
    _, _, _, _, binds, residual = result
    turn, simple = -1.0 if kind == DECREASING else 1.0, INCREASING if kind == DECREASING else kind
    low, high = (lower, upper) if turn > 0.0 else (-upper, -lower)
    heaviest, steepest, size = _load(turn, z, w, a, data)
    limit, target = max(amount, 0.0) * (heaviest if kind == PENALTY else 1.0), 0.0
    mass, tight, count, active = least, row, 0, False
    if row and most > mass:  # without the row, does it hold anyway?
        count, active = balance((simple, n, limit, low, high, 0.0, 0.0), data, work)
        alone = turn * steepest * sums(work, count)[0]
        tight = not mass <= alone <= most
        mass = most if alone > most else mass
    size = size if tight else 0.0
    if tight:
        target = attainable((simple, n, limit, low, high, turn * mass / steepest, size), data)
    problem = (simple, n, limit, low, high, target, size)
    if tight or not row:
        count, active = balance(problem, data, work)
    binds[0], binds[1], residual[0], residual[1] = False, False, 0.0, 0.0
    if row or kind == BOUND:
        for _ in range(3):
            _refine(problem, work, count, active, atoms, spare)
        if kind == BOUND:
            _contract(limit, work, count)
        binds[0], binds[1] = _binding(work, count, tight, active)
    height = 0.0
    for i in range(n):
        height = max(height, abs(min(max(data[Z, i], low), high)))
    magnitude = abs(mass) + 1e-8 * size * steepest * height
    excess, magnitude = _store(problem, turn, a, work, count, -mass, magnitude, result)
    if tight and excess != 0.0:
        residual[0], residual[1] = abs(excess) / magnitude, abs(mass - turn * target * steepest) / magnitude
    if row and most < least:  # no profile is between
        residual[0] = residual[1] = max(residual[0], (least - most) / magnitude)


@compiled
def room_for(n: int) -> Room:
    """Working memory for profiles of up to n points."""
    return np.empty((4, n)), np.empty((4, n)), np.empty((15, 2 * n + 2)), np.empty((15, 2 * n + 2))


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
) -> Result:
    """Solve for all profiles of one kind: INCREASING, DECREASING, PENALTY or BOUND.

    Bounds may be infinite. ``amount`` is the penalty or bound of TV, ``least`` and ``most`` the limits of ``a . u``.

    Returns:
        Values, first points of their groups, sides and edges (profiles, n), which of row and TV bind, and residual and
        gap (profiles, 2). The residual is that of a binding row, relative to its terms. The gap is the part of it that
        no profile can close.
    """
    profiles, n = z.shape
    value, first = np.empty((profiles, n)), np.empty((profiles, n), np.int64)
    side, edge = np.empty((profiles, n), np.int8), np.empty((profiles, n), np.int8)
    binds, residual = np.zeros((profiles, 2), np.bool_), np.zeros((profiles, 2))
    room = room_for(n)
    for p in range(profiles):
        numbers = (amount[p], lower[p], upper[p], least[p], most[p])
        settle(kind, z[p], w[p], a[p], numbers, room, (value[p], first[p], side[p], edge[p], binds[p], residual[p]))
    return value, first, side, edge, binds, residual
