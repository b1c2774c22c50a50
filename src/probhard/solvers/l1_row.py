"""One row, bounds and an L1 ball under a diagonal weight, by the roots of two multipliers.

    min |u - z|_Q^2 / 2     s.t.   a . u = b,   l <= u <= h,   sum |u_i - c_i| <= r.

For multipliers y of the row and m >= 0 of the ball every variable has a closed form,

    u_i = clip(c_i + soft(z_i - c_i - w_i a_i y, w_i m), l_i, h_i),       soft(t, s) = sign(t) max(|t| - s, 0).

The row decreases in y, so y(m) is a root by Newton's method between two points. With it the distance from c decreases
in m, and m is a root by secants. Sides of the variables and of the lifted ball (``constraints.l1_ball``) follow from u.
"""

from __future__ import annotations

import numpy as np
import torch

from probhard._util.jit import Array, compiled
from probhard.solvers.quadratic import Faces, QuadraticProblem

MOST = 200  # steps of each root
EXACT = 1e-15  # relative residual of a root
LEVEL = 1e-11  # distance from a corner that counts as none, relative to the size of the point
LOOSE = 1e-9  # relative residual of the two constraints up to which a point is a solution


def _placed(z: Array, w: Array, lower: Array, upper: Array, c: Array, a: Array, y: float, m: float, u: Array) -> Array:
    """Write u; returns a . u, minus its derivative by y, and the distance from c."""
    total, slope, distance = 0.0, 0.0, 0.0
    for i in range(len(z)):
        t, s = z[i] - c[i] - w[i] * a[i] * y, w[i] * m
        value = c[i]
        if t > s:
            value += t - s
        elif t < -s:
            value += t + s
        inside = min(max(value, lower[i]), upper[i])
        if inside == value and (t > s or t < -s):
            slope += w[i] * a[i] * a[i]
        u[i] = inside
        total += a[i] * inside
        distance += abs(inside - c[i])
    return np.array([total, slope, distance])


placed = compiled(_placed)


def _root(
    z: Array, w: Array, lower: Array, upper: Array, c: Array, a: Array, b: float, m: float, guess: float, u: Array
) -> float:
    """The multiplier of the row for a given one of the ball; u is written."""
    size = abs(b) + 1e-300
    span = 0.0
    for i in range(len(z)):
        size = max(size, abs(a[i] * c[i]), min(abs(a[i] * z[i]), 1e3 * (abs(b) + abs(a[i] * c[i]))))
        if a[i] != 0:
            span = max(span, (abs(z[i]) + abs(c[i]) + abs(b)) / (w[i] * abs(a[i])) + m)
    low, high, y = -np.inf, np.inf, guess
    width = span + 1e-300
    for _ in range(MOST):
        total, slope, _distance = placed(z, w, lower, upper, c, a, y, m, u)
        gap = total - b
        if abs(gap) <= EXACT * size:
            break
        if gap > 0:
            low = y
        else:
            high = y
        step = y + gap / slope if slope > 0 else np.inf
        if low == -np.inf or high == np.inf:
            if not (step > low and step < high):
                step = y + width if gap > 0 else y - width
                width *= 4
        elif not (step > low and step < high):
            step = 0.5 * (low + high)
        if step == y or (low == high):
            break
        y = step
    return y


root = compiled(_root)


def _project(
    z: Array, w: Array, lower: Array, upper: Array, c: Array, radius: Array, a: Array, b: Array, u: Array, found: Array
) -> None:
    """Write the points u (L, n) and both multipliers and the relative residual of the row, ``found`` (L, 3)."""
    rows = bool(np.any(a != 0))
    for e in range(len(z)):
        args = (z[e], w[e], lower[e], upper[e], c[e])
        y, m, low, high, at_low, at_high = 0.0, 0.0, 0.0, np.inf, 0.0, 0.0
        size = radius[e] + 1e-300
        for i in range(z.shape[1]):
            size = max(size, abs(c[e, i]))
        start = 0.0
        for i in range(z.shape[1]):
            start = max(start, abs(z[e, i] - c[e, i]) / w[e, i])
        for count in range(MOST):
            if rows:
                y = root(*args, a, b[e], m, y, u[e])
            distance = placed(*args, a, y, m, u[e])[2]
            gap = distance - radius[e]
            if abs(gap) <= EXACT * size or (gap <= 0 and m == 0):
                break
            if gap > 0:
                low, at_low = m, gap
            else:
                high, at_high = m, gap
            if high == np.inf:
                step = start * 4.0 ** (count - 2) if start > 0 else 1.0
                step = max(step, 2 * m)
            else:
                step = low + (high - low) * at_low / (at_low - at_high)
                if count % 3 == 2 or not (step > low and step < high):
                    step = 0.5 * (low + high)
            if step == m or (high < np.inf and high - low <= 1e-17 * high):
                break
            m = step
        total = placed(*args, a, y, m, u[e])
        found[e, 0], found[e, 1] = y, m
        over = max(total[2] - radius[e], 0.0) / size
        found[e, 2] = max(over, abs(total[0] - b[e]) / (abs(b[e]) + size) if rows else 0.0)


project = compiled(_project)


def solve(problem: QuadraticProblem, variables: int, row: Array) -> Faces:
    """Find the sides of the nearest points.

    Args:
        problem: Problems over n variables, positive and negative parts of ``u - c``, and the slack of the ball; their
            rows are that of ``row``, if it is not 0, then the parts, then the ball.
        variables: n.
        row: a, (n,).

    Returns:
        The faces; ``done`` is False where there is no solution.
    """
    n, first = variables, problem.right.shape[-1] - variables - 1
    right = problem.right.numpy(force=True)
    cut = (
        x[:, :n].contiguous().numpy(force=True) for x in (problem.centre, problem.weight, problem.lower, problem.upper)
    )
    z, w, lower, upper = cut
    c, radius = np.ascontiguousarray(right[:, first : first + n]), np.ascontiguousarray(right[:, -1])
    b = np.ascontiguousarray(right[:, 0]) if first else np.zeros(len(z))
    u, found = np.empty_like(z), np.empty((len(z), 3))
    project(z, w, lower, upper, c, radius, np.ascontiguousarray(row), b, u, found)
    y, m = found[:, :1], found[:, 1:2]
    apart, reach = z - c - w * row * y, w * m
    near = LEVEL * (np.abs(c) + np.abs(u) + radius[:, None])
    side = (u >= upper).astype(np.int8) - (u <= lower)
    stays = np.abs(apart) <= reach + near * (m > 0)
    inside = (side == 0) & stays & (m > 0)
    offset = np.where(inside, 0.0, u - c)
    above = offset >= 0  # one part of every variable is free, unless the ball holds it at c
    slack = radius - np.abs(offset).sum(-1)
    parts = [(~inside & above).astype(np.int8) - 1, (~inside & ~above).astype(np.int8) - 1]
    moves = (side == 0) & ~inside
    slope = np.where(moves, np.where(above, 1.0, -1.0) / np.where(row == 0, np.inf, row), 0.0)
    highest = np.where(moves, slope, -np.inf).max(-1, initial=-np.inf)
    lowest = np.where(moves, slope, np.inf).min(-1, initial=np.inf)
    loose = (m[:, 0] <= 0) | (lowest >= highest) & np.any(row)  # the row alone says what the ball says
    stuck = np.flatnonzero(loose & ~moves.any(-1) & inside.any(-1))
    parts[0][stuck, inside[stuck].argmax(-1)] = 0  # the row needs a variable that may move
    sides = np.concatenate([side, *parts, loose[:, None].astype(np.int8) - 1], -1).astype(np.int8)
    value = np.concatenate([u, np.maximum(offset, 0), np.maximum(-offset, 0), np.maximum(slack, 0)[:, None]], -1)
    done = torch.from_numpy(found[:, 2] <= LOOSE).to(problem.right.device)
    like = problem.centre
    steps = torch.ones(len(z), dtype=torch.int64, device=like.device)
    whole = torch.from_numpy(sides).to(like.device)
    return Faces(whole, torch.from_numpy(value).to(like), steps, done, torch.zeros_like(problem.right))
