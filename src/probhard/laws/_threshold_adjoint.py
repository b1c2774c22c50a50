"""The adjoint of one step of ``laws.soft_threshold``, and the sum of its series.

``pull`` maps the gradient of the next state and of the fields to that of the state and of the data. At a fixed point
the gradient g of the state solves ``g = J^T g + o`` with o that of the fields; ``adjoint`` iterates it.
"""

from __future__ import annotations

import math

import numpy as np

from probhard._util.jit import Array, compiled
from probhard.laws._threshold_kernels import clipped, fields, response, shared
from probhard.laws._threshold_pulls import pull_response, pull_shared, pull_side, through

SHORT = 0.3  # share of a step where the series does not converge


def _prepare(
    x: Array, bounds: Array, row: Array, sides: int, state: Array, last: Array, known: tuple[Array, Array, Array, Array]
) -> None:
    """Write what one step of one element computes: shared numbers, fields, moments and responses."""
    whole, field, part, fresh = known
    stiff = np.zeros(2)
    for i in range(len(row)):
        stiff[0] += row[i] * row[i] * x[i, 2]
        stiff[1] += x[i, 2]
    shared(state, last, 1 if np.any(row != 0) else 0, sides, stiff, whole)
    for i in range(len(row)):
        fields(i, x[i], row[i], state, last, whole, sides, 0.0, field[i])
        for side in range(sides):
            start = 8 + 4 * side
            s = field[i, start + 1]
            scale = math.sqrt(field[i, start + 3]) / s
            clipped(field[i, start + 2] / s, scale, bounds[i, 2 * side], bounds[i, 2 * side + 1], part[i, side])
        response(row[i], x[i, 2], sides, field[i], part[i], fresh[i])


prepare = compiled(_prepare)


def _pull(
    x: Array,
    bounds: Array,
    row: Array,
    sides: int,
    state: Array,
    last: Array,
    known: tuple[Array, Array, Array, Array],
    outer: Array,
    g: Array,
    g_last: Array,
    to_state: Array,
    to_last: Array,
    to_x: Array,
    to_bounds: Array,
    to_goals: Array,
) -> None:
    """Gradients through one step of one element, at its fixed point; ``known`` is what ``_prepare`` wrote.

    ``outer`` (n, 4) is the gradient of loc and scale of both sides, ``g`` (8, n) and ``g_last`` (2,) that of the next
    state. The others are written.
    """
    n = len(row)
    rows = 1 if np.any(row != 0) else 0
    whole = known[0]
    own, grad, ends, total, back = np.empty(8), np.zeros(15), np.empty(4), np.zeros(8), np.empty(7)
    det = whole[0] * whole[2] - whole[1] * whole[1]
    d0, d1 = g_last[0], g_last[1] / whole[15] if sides == 2 else 0.0
    for i in range(n):  # the means follow the multipliers
        d0 -= state[0, i] * g[6, i] + state[1, i] * g[7, i]
        d1 -= state[1, i] * g[6, i] + state[2, i] * g[7, i]
    if rows == 0:
        d0 = 0.0
    if sides == 1:
        d1 = 0.0
    r0, r1 = (whole[2] * d0 - whole[1] * d1) / det, (whole[0] * d1 - whole[1] * d0) / det
    to_goals[0], to_goals[1] = -r0, -r1
    to_last[0], to_last[1] = g_last[0], g_last[1]
    if sides == 2:
        total[7] = -(last[1] - whole[12]) * r1
        total[6] = whole[13] * r1
        to_last[1] -= whole[13] * r1
    for i in range(n):
        a, w = row[i], x[i, 2]
        field, part, fresh = known[1][i], known[2][i], known[3][i]
        f, h = g[6, i] + r0, g[7, i] + r1
        for j in range(6):
            own[j] = g[j, i]
        own[6], own[7] = fresh[8] * f + fresh[10] * h, fresh[9] * f + fresh[11] * h
        in_f, in_h = f - own[6], h - own[7]
        pull_response(a, w, sides, field, part, fresh, own, grad)
        to_m, to_v, to_w = 0.0, 0.0, grad[6]
        gyy, gyd, gdd, cyy, cyd, cdd = grad[0], grad[1], grad[2], grad[3], grad[4], grad[5]
        ky, km = 0.0, 0.0
        for side in range(sides):
            e = 0.0 if sides == 1 else 1.0 - 2.0 * side
            start, first = 8 + 4 * side, 7 + 4 * side
            q, s, variance = field[start], field[start + 1], field[start + 3]
            loc, scale = field[start + 2] / s, math.sqrt(variance) / s
            ends[0], ends[1], ends[2], ends[3] = outer[i, 2 * side], outer[i, 2 * side + 1], 0.0, 0.0
            pull_side(loc, scale, bounds[i, 2 * side], bounds[i, 2 * side + 1], part[side], grad[first:], ends)
            to_bounds[i, 2 * side], to_bounds[i, 2 * side + 1] = ends[2], ends[3]
            to_s = grad[first + 3] - (ends[0] * loc + ends[1] * scale) / s
            to_variance, to_loc = ends[1] / (2 * math.sqrt(variance) * s), ends[0] / s
            c = a * a * field[3] + 2 * a * e * field[4] + e * e * field[5]
            to_m += to_loc
            to_v += to_variance
            to_w += 2 * w * c * to_variance - (a * field[6] + e * field[7]) * to_loc + q * to_s
            cyy += w * w * to_variance * a * a
            cyd += w * w * to_variance * a * e
            cdd += w * w * to_variance * e * e
            gyy += w * to_s * a * a
            gyd += w * to_s * a * e
            gdd += w * to_s * e * e
            ky -= w * to_loc * a
            km -= w * to_loc * e
        to_x[i, 0], to_x[i, 1], to_x[i, 2] = to_m, to_v, to_w
        to_last[0] += ky
        total[6] += km
        mean, length = state[6, i], state[7, i]
        to_state[6, i] = in_f - field[0] * ky - field[1] * km
        to_state[7, i] = in_h - field[1] * ky - field[2] * km
        gyy -= ky * mean
        gyd -= 0.5 * (ky * length + km * mean)
        gdd -= km * length
        # C = G B G
        b0, b1, b2 = whole[3] - state[3, i], whole[4] - state[4, i], whole[5] - state[5, i]
        p00, p01 = field[0] * b0 + field[1] * b1, field[0] * b1 + field[1] * b2
        p10, p11 = field[1] * b0 + field[2] * b1, field[1] * b1 + field[2] * b2
        gyy += 2 * (cyy * p00 + cyd * p10)
        gyd += cyy * p01 + cyd * p11 + cyd * p00 + cdd * p10
        gdd += 2 * (cyd * p01 + cdd * p11)
        ends[0], ends[1], ends[2] = cyy, cyd, cdd
        noise = through(field[0], field[1], field[2], ends)
        ends[0], ends[1], ends[2] = gyy, gyd, gdd
        stiffness = through(field[0], field[1], field[2], ends)
        for j in range(3):
            to_state[j, i], to_state[3 + j, i] = stiffness[j], -noise[j]
            total[j] -= stiffness[j]
            total[3 + j] += noise[j]
    pull_shared(last, whole, sides, total, back)
    to_last[1] += back[6]
    for i in range(n):
        for j in range(6):
            to_state[j, i] += back[j]


pull = compiled(_pull)


def _adjoint(
    x: Array,
    bounds: Array,
    row: Array,
    sides: int,
    state: Array,
    last: Array,
    outer: Array,
    most: int,
    close: float,
    to_x: Array,
    to_bounds: Array,
    to_goals: Array,
) -> None:
    """Write the gradients of the data of all elements; see ``settle`` for their shapes, ``outer`` is (B, n, 4)."""
    elements, n = x.shape[0], x.shape[1]
    g, g_last, fresh, fresh_last = np.empty((8, n)), np.empty(2), np.empty((8, n)), np.empty(2)
    known = (np.empty(18), np.empty((n, 16)), np.zeros((n, 2, 9)), np.empty((n, 12)))
    for b in range(elements):
        args = (x[b], bounds[b], row, sides, state[b], last[b], known)
        prepare(*args)
        g[:], g_last[:] = 0.0, 0.0
        for step in range(3 * most):
            if step == most:  # the series does not converge: shorter steps
                g[:], g_last[:] = 0.0, 0.0
            part = 1.0 if step < most else SHORT
            pull(*args, outer[b], g, g_last, fresh, fresh_last, to_x[b], to_bounds[b], to_goals[b])
            moved, size = 0.0, 0.0
            for j in range(8):
                for i in range(n):
                    unit = x[b, i, 2] if j < 3 else (x[b, i, 1] if j < 6 else math.sqrt(x[b, i, 1]))
                    moved = max(moved, abs(fresh[j, i] - g[j, i]) * unit)
                    size = max(size, abs(fresh[j, i]) * unit)
                    g[j, i] += part * (fresh[j, i] - g[j, i])
            for j in range(2):
                g_last[j] += part * (fresh_last[j] - g_last[j])
            if moved <= close * size:
                break


adjoint = compiled(_adjoint)
