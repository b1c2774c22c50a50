"""The masses that profiles can attain: the largest and smallest ``a . u`` under all constraints but the row.

    max  a . u     subject to  the shape,   lower <= u <= upper.

For a bound on TV, dynamic programming with a price per edge finds the best sets of points at the upper bound. The
maximum is piecewise linear and concave in the number of edges that the bound allows.
"""

from __future__ import annotations

import numpy as np

from probhard._util.jit import Array, compiled
from probhard.solvers.profiles.unbounded import EPSILON, INCREASING, PENALTY, A, Problem


@compiled
def _segments(data: Array, n: int, turn: float, price: float) -> tuple[float, float]:
    """Number of edges, and sum, of the points with the largest ``turn * sum(a) - price * edges``."""
    off_edges, off_sum, on_edges, on_sum = 0.0, 0.0, 0.0, turn * data[A, 0]
    for i in range(1, n):
        opens = off_sum - price * (off_edges + 1.0) > on_sum - price * on_edges
        closes = on_sum - price * (on_edges + 1.0) > off_sum - price * off_edges
        edges, total = (off_edges + 1.0, off_sum) if opens else (on_edges, on_sum)
        if closes:
            off_edges, off_sum = on_edges + 1.0, on_sum
        on_edges, on_sum = edges, total + turn * data[A, i]
    if on_sum - price * on_edges > off_sum - price * off_edges:
        return on_edges, on_sum
    return off_edges, off_sum


@compiled
def _capacity(problem: Problem, data: Array, turn: float) -> float:
    """The largest ``turn * a . u`` of profiles that satisfy all constraints but the row."""
    kind, n, amount, lower, upper, _, size = problem
    amount = min(amount, 1e300)
    noise, most, tail, every = 16.0 * EPSILON * size, 0.0, 0.0, 0.0
    for i in range(n - 1, -1, -1):
        a = turn * data[A, i]
        tail += a
        most = max(most, tail if i > 0 or upper < np.inf else 0.0)
        every += a * (upper if a > 0.0 else lower) if a != 0.0 else 0.0
    total = tail if abs(tail) > noise else 0.0
    if kind == PENALTY:
        return every
    if (total > 0.0 and upper == np.inf) or (total < 0.0 and lower == -np.inf):
        return np.inf
    if kind == INCREASING:
        if lower > -np.inf and upper < np.inf:
            return lower * total + (upper - lower) * most
        if lower == -np.inf:  # gained by lowering the points before a tail
            most -= total
        base = lower if lower > -np.inf else (upper if upper < np.inf else 0.0)
        return np.inf if most > noise else base * total
    if lower == -np.inf:  # nothing is gained beyond one amount from the other bound
        upper = upper if upper < np.inf else 0.0
        lower = upper - amount
    upper = upper if upper < np.inf else lower + amount
    if not upper > lower:
        return lower * total
    edges, few, few_sum = amount / (upper - lower), 0.0, max(0.0, total)
    many, many_sum = _segments(data, n, turn, 0.0)
    for _ in range(2 * n):  # vertices of the concave hull of the best sums over their numbers of edges
        if edges >= many or many <= few:
            return lower * total + (upper - lower) * many_sum
        price = (many_sum - few_sum) / (many - few)
        new, new_sum = _segments(data, n, turn, price)
        if new_sum - price * new <= few_sum - price * few + noise:
            return lower * total + (upper - lower) * (few_sum + price * (edges - few))
        if new <= edges:
            few, few_sum = new, new_sum
        else:
            many, many_sum = new, new_sum
    return np.inf


@compiled
def attainable(problem: Problem, data: Array) -> float:
    """The attainable mass nearest to the requested one."""
    kind, n, _, lower, upper, mass, size = problem
    total = 0.0
    for i in range(n):
        total += data[A, i]
    constant = mass / total if abs(total) > 16.0 * EPSILON * size else np.inf
    if kind != PENALTY and lower <= constant <= upper and abs(constant) < np.inf:
        return mass
    return min(max(mass, -_capacity(problem, data, -1.0)), _capacity(problem, data, 1.0))
