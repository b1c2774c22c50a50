"""Compiled loops of ``laws.mean_field``, one element of the batch after the other.

``settle`` finds the fixed point for normal rows. A row takes part from the first step on in which its bounds have a
probability of ``COUNTS``; the others only follow the mean. ``adjoint`` sums the series ``g + J^T g + J^T J^T g + ...``
with J the derivative of one step.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from probhard._util.jit import Array, compiled, quick

COUNTS = 1e-4
COOLING = 0.1  # what the least squared scale of a far element is multiplied by in each step


def _tail(t: float) -> tuple[float, float, float]:
    """Mass, first and second partial moments of the unit normal law below t <= 0."""
    mass = 0.5 * math.erfc(-t * 0.7071067811865476)
    density = 0.3989422804014327 * math.exp(-0.5 * t * t)
    return mass, max(density + t * mass, 0.0), max((1 + t * t) * mass + t * density, 0.0)


tail = compiled(_tail)


def _excess(loc: float, scale: float, lower: float, upper: float) -> tuple[float, float, float]:
    """Mean, slope and relative variance of ``X - clip(X)``; see ``mean_field.excess``."""
    mean, slope, variance, product = 0.0, 0.0, 0.0, 2.0
    for side in range(2):
        gap = lower - loc if side == 0 else loc - upper
        if gap == -math.inf:
            product = 0.0
            continue
        t = gap / scale
        _, first, second = tail(-abs(t))
        part = second + abs(t) * first
        own = first
        if t > 0:
            own = t + first
            slope += 1 - part
            variance += 1 - second - 2 * t * first - first * first
        else:
            slope += part
            variance += second - first * first
        product *= own
        mean += own if side == 1 else -own
    return scale * mean, slope, variance + product


excess = compiled(_excess)


def _inverse(a: Array, count: int, column: Array) -> None:
    """Replace the lower triangle of a positive definite matrix by that of its negative inverse, by sweeps."""
    for pivot in range(count):
        one = 1.0 / a[pivot, pivot]
        for i in range(pivot):
            column[i] = a[pivot, i]
        for i in range(pivot, count):
            column[i] = a[i, pivot]
        for i in range(count):
            factor = column[i] * one
            row = a[i]
            for j in range(i + 1):
                row[j] -= factor * column[j]
        for i in range(pivot):
            a[pivot, i] = column[i] * one
        for i in range(pivot + 1, count):
            a[i, pivot] = column[i] * one
        a[pivot, pivot] = -one


inverse = quick(_inverse)


def _settle(
    loc: Array,
    gram: Array,
    cov: Array,
    same: bool,
    lower: Array,
    upper: Array,
    floors: Array,
    limits: tuple[int, int, float, float],
    state: Array,
    counts: NDArray[np.bool_],
) -> None:
    """Write the fixed points (3, B, r) and the rows that count.

    ``limits`` are the most steps, the whole ones, the tolerance and the smallest slope.
    """
    most, whole, close, rare = limits
    elements, size = loc.shape
    active = np.empty(size, np.int64)
    gate, center, noise = np.empty(size), np.empty(size), np.empty(size)
    right, solved, column, product = np.empty(size), np.empty(size), np.empty(size), np.empty(size)
    g, v = np.empty((size, size)), np.empty((size, size))
    for b in range(elements):
        x, square, own, taken = state[0, b], state[1, b], state[2, b], counts[b]
        for j in range(size):
            x[j], square[j], own[j], taken[j] = loc[b, j], cov[b, j, j], gram[b, j, j], False
        for step in range(most):
            count = 0
            wide = floors[b, 1] * COOLING**step
            least = max(floors[b, 0], wide)
            for j in range(size):
                variance = max(square[j], least)
                mean, slope, spread = excess(x[j], math.sqrt(variance), lower[b, j], upper[b, j])
                if slope < COUNTS and not taken[j]:
                    continue
                taken[j] = True
                slope = min(max(slope, rare), 1 - rare)
                stiff = max(own[j], rare * gram[b, j, j])
                gate[count] = stiff * (1 / slope - 1)
                center[count] = x[j] - mean / slope
                noise[count] = max(variance * (spread / (slope * slope) - 1), 0.0)
                active[count] = j
                right[count] = loc[b, j] - center[count]
                count += 1
            for i in range(count):
                for j in range(i + 1):
                    g[i, j] = gram[b, active[i], active[j]]
                g[i, i] += gate[i]
                if not same:
                    for j in range(count):
                        v[i, j] = cov[b, active[i], active[j]]
            inverse(g, count, column)
            for i in range(count):
                for j in range(i + 1):
                    g[i, j] = -g[i, j]
                    g[j, i] = g[i, j]
            part = 1.0 if step < whole else 0.5
            moved = 0.0
            for i in range(count):
                k, row = active[i], g[i]
                first, second = 0.0, 0.0
                for j in range(count):
                    first += row[j] * right[j]
                    second += row[j] * row[j] * (noise[j] - gate[j] if same else noise[j])
                if same:
                    second += row[i]
                else:
                    for j in range(count):
                        product[j] = 0.0
                    for other in range(count):
                        factor, line = row[other], v[other]
                        for j in range(count):
                            product[j] += factor * line[j]
                    for j in range(count):
                        second += product[j] * row[j]
                solved[i] = first
                dx = center[i] + first / row[i] - x[k]
                dt = second / (row[i] * row[i]) - noise[i] - square[k]
                dk = 1 / row[i] - gate[i] - own[k]
                width = cov[b, k, k] + 1e-300
                moved = max(moved, abs(dx) / (math.sqrt(width) + 1e-6 * abs(loc[b, k])), abs(dt) / width)
                moved = max(moved, abs(dk) / (gram[b, k, k] + 1e-300))
                x[k] += part * dx
                square[k] += part * dt
                own[k] += part * dk
            for j in range(size):
                if taken[j]:
                    continue
                total = loc[b, j]
                for i in range(count):
                    total -= gram[b, j, active[i]] * solved[i]
                moved = max(moved, abs(total - x[j]) / math.sqrt(cov[b, j, j] + 1e-300) if count else 0.0)
                x[j] = total
            if moved <= close and wide <= floors[b, 0]:
                break


settle = quick(_settle)


def _adjoint(
    gradient: Array, response: Array, wide: Array, solved: Array, slopes: Array, most: int, close: float
) -> Array:
    """The sum of the series, (3, B, r).

    Args:
        gradient: g, of means, squared scales and stiffnesses, (3, B, r).
        response: G, (B, r, r).
        wide: ``G (V + N) G``, (B, r, r).
        solved: ``G (m - a)``, (B, r).
        slopes: Derivatives of E, a and n by means, squared scales and stiffnesses, (3, 3, B, r).
        most: Most terms.
        close: Size of the last term, relative to the sum.
    """
    _, elements, size = gradient.shape
    total = gradient.copy()
    part, to_own, to_spread, to_solved = np.empty((3, size)), np.empty(size), np.empty(size), np.empty(size)
    for b in range(elements):
        for kind in range(3):
            for j in range(size):
                part[kind, j] = gradient[kind, b, j]
        for _ in range(most):
            for j in range(size):
                own = response[b, j, j]
                to_solved[j] = part[0, j] / own
                to_spread[j] = part[1, j] / (own * own)
                along = part[0, j] * solved[b, j] + part[2, j] + 2 * part[1, j] * wide[b, j, j] / own
                to_own[j] = -along / (own * own)
            largest, whole = 0.0, 0.0
            for k in range(size):
                g, m = response[b, k], wide[b, k]
                pulled, owns, spreads, crossed = 0.0, 0.0, 0.0, 0.0
                for j in range(size):
                    square = g[j] * g[j]
                    pulled += g[j] * to_solved[j]
                    owns += square * to_own[j]
                    spreads += square * to_spread[j]
                    crossed += g[j] * m[j] * to_spread[j]
                to_gate = -part[2, k] - owns - pulled * solved[b, k] - 2 * crossed
                to_center = part[0, k] - pulled
                to_noise = spreads - part[1, k]
                for kind in range(3):
                    slope = slopes[:, kind, b, k]
                    value = slope[0] * to_gate + slope[1] * to_center + slope[2] * to_noise
                    part[kind, k] = value
                    total[kind, b, k] += value
                    largest = max(largest, abs(value))
                    whole = max(whole, abs(total[kind, b, k]))
            if largest <= close * whole:
                break
    return total


adjoint = quick(_adjoint)
