"""Kernels for a forest of rows under one fixed W: linear sweeps for points and for variances, and their adjoints.

In the notation of ``sweeps``, g, V and d depend on W alone, and u is linear in z. For variances s write
``u_i = k_i m_i + o_i`` as in ``tree``, and let h_i and O_i be the variances of m_i and o_i. With
``keep = V / d``, ``give = p w_x / d``, ``t = 1 - p k_x give`` (1 at a root) and H = sum c_i^2 h_i,

    h_x = keep^2 s_x + give^2 H,    k_i = 1 - t c_i g_i,    hat v_i = k_i^2 h_i + O_i,
    O_i = (t g_i)^2 (H - c_i^2 h_i) + (p g_i)^2 ((k_x keep)^2 s_x + O_x).
"""

from __future__ import annotations

import numpy as np

from probhard._util.jit import Array, compiled
from probhard.rows._kernels.lanes import LANES, TINY, Numbers, load, store
from probhard.rows._kernels.sweeps import Tables, ratio

# For each row: keep, give, p and (k_x keep)^2. For each inside variable: g, k^2, (t g)^2 and (p g)^2.
Gains = tuple[Array, Array, Array, Array, Array, Array, Array, Array]
Stages = tuple[tuple[Tables, Gains], ...]  # forests, in the order of the sweeps


@compiled
def gains(tables: Tables, w: Array) -> Gains:
    """The coefficients of the linear sweeps for fixed weights w (n,)."""
    start, number, up, up_coefficient, variable, coefficient = tables
    q, size = len(number), len(variable)
    keep, give, coupling, own = np.zeros(q), np.zeros(q), np.zeros(q), np.zeros(q)
    share, kept, others, above = np.empty(size), np.empty(size), np.empty(size), np.empty(size)
    v, total, k = w.copy(), np.zeros(q), np.zeros(len(w))
    for r in range(q):
        for t in range(start[r], start[r + 1]):
            total[r] += coefficient[t] ** 2 * v[variable[t]]
        x, p = up[r], up_coefficient[r]
        if x >= 0:
            pivot = total[r] + p * p * w[x]
            keep[r], give[r], coupling[r] = total[r] / pivot if pivot > 0.0 else 1.0, ratio(p * w[x], pivot), p
            v[x] = ratio(w[x] * total[r], pivot)
    for r in range(q - 1, -1, -1):
        x, p = max(up[r], 0), coupling[r]
        left = 1.0 - p * k[x] * give[r]
        own[r] = (k[x] * keep[r]) ** 2
        for t in range(start[r], start[r + 1]):
            i, c = variable[t], coefficient[t]
            share[t] = ratio(c * v[i], total[r])
            k[i] = 1.0 - left * c * share[t]
            kept[t], others[t], above[t] = k[i] ** 2, (left * share[t]) ** 2, (p * share[t]) ** 2
    return keep, give, coupling, own, share, kept, others, above


@compiled
def _project(tables: Tables, gains: Gains, b: Array, m: Array, gap: Array) -> None:
    """Replace points m (n, lanes) by their projections; ``gap`` (q, lanes) is scratch."""
    start, number, up, _, variable, coefficient = tables
    keep, give, coupling, share = gains[0], gains[1], gains[2], gains[4]
    lanes = m.shape[1]
    for r in range(len(number)):
        for k in range(lanes):
            gap[r, k] = b[number[r], k]
        for t in range(start[r], start[r + 1]):
            i, c = variable[t], coefficient[t]
            for k in range(lanes):
                gap[r, k] -= c * m[i, k]
        x, keep_r, give_r = up[r], keep[r], give[r]
        if x >= 0:
            for k in range(lanes):
                m[x, k] = keep_r * m[x, k] + give_r * gap[r, k]
    for r in range(len(number) - 1, -1, -1):
        x, p = max(up[r], 0), coupling[r]
        for k in range(lanes):
            gap[r, k] -= p * m[x, k]
        for t in range(start[r], start[r + 1]):
            i, g = variable[t], share[t]
            for k in range(lanes):
                m[i, k] += g * gap[r, k]


@compiled
def _project_adjoint(tables: Tables, gains: Gains, of: Array, of_gap: Array, of_b: Array) -> None:
    """Replace gradients of the projections by those of the points, and write those of b."""
    start, number, up, _, variable, coefficient = tables
    keep, give, coupling, share = gains[0], gains[1], gains[2], gains[4]
    lanes = of.shape[1]
    for r in range(len(number)):
        for k in range(lanes):
            of_gap[r, k] = 0.0
        for t in range(start[r], start[r + 1]):
            i, g = variable[t], share[t]
            for k in range(lanes):
                of_gap[r, k] += g * of[i, k]
        x, p = max(up[r], 0), coupling[r]
        for k in range(lanes):
            of[x, k] -= p * of_gap[r, k]
    for r in range(len(number) - 1, -1, -1):
        x, keep_r, give_r = up[r], keep[r], give[r]
        if x >= 0:
            for k in range(lanes):
                of_gap[r, k] += give_r * of[x, k]
                of[x, k] *= keep_r
        for t in range(start[r], start[r + 1]):
            i, c = variable[t], coefficient[t]
            for k in range(lanes):
                of[i, k] -= c * of_gap[r, k]
        for k in range(lanes):
            of_b[number[r], k] = of_gap[r, k]


@compiled
def _variance(tables: Tables, gains: Gains, s: Array, h: Array, total: Array, outer: Array) -> None:
    """Replace h (n, lanes), which starts as s, by the projected variances; ``outer`` holds the O_i."""
    start, number, up, _, variable, coefficient = tables
    keep, give, _, own, _, kept, others, above = gains
    lanes = s.shape[1]
    for r in range(len(number)):
        for k in range(lanes):
            total[r, k] = 0.0
        for t in range(start[r], start[r + 1]):
            i, square = variable[t], coefficient[t] ** 2
            for k in range(lanes):
                total[r, k] += square * h[i, k]
        x, first, second = up[r], keep[r] ** 2, give[r] ** 2
        if x >= 0:
            for k in range(lanes):
                h[x, k] = first * s[x, k] + second * total[r, k]
    for r in range(len(number) - 1, -1, -1):
        x, known = max(up[r], 0), own[r]
        for t in range(start[r], start[r + 1]):
            i, square, alpha, beta, held = variable[t], coefficient[t] ** 2, others[t], above[t], kept[t]
            for k in range(lanes):
                left = alpha * max(total[r, k] - square * h[i, k], 0.0)
                outer[i, k] = left + (beta * (known * s[x, k] + outer[x, k]) if beta > 0.0 else 0.0)
                h[i, k] = held * h[i, k] + outer[i, k]


@compiled
def _variance_adjoint(tables: Tables, gains: Gains, of: Array, outer: Array, own_part: Array, total: Array) -> None:
    """Replace gradients of the projected variances by those of s; ``outer`` and ``own_part`` are scratch."""
    start, number, up, _, variable, coefficient = tables
    keep, give, _, own, _, kept, others, above = gains
    lanes = of.shape[1]
    outer[:], own_part[:] = of, 0.0
    for r in range(len(number)):
        x, known = max(up[r], 0), own[r]
        for k in range(lanes):
            total[r, k] = 0.0
        for t in range(start[r], start[r + 1]):
            i, square, alpha, beta, held = variable[t], coefficient[t] ** 2, others[t], above[t], kept[t]
            for k in range(lanes):
                pushed = alpha * outer[i, k]
                total[r, k] += pushed
                of[i, k] = held * of[i, k] - square * pushed
                if beta > 0.0:
                    own_part[x, k] += known * beta * outer[i, k]
                    outer[x, k] += beta * outer[i, k]
    for r in range(len(number) - 1, -1, -1):
        x, first, second = up[r], keep[r] ** 2, give[r] ** 2
        if x >= 0:
            for k in range(lanes):
                total[r, k] += second * of[x, k]
                of[x, k] = first * of[x, k] + own_part[x, k]
        for t in range(start[r], start[r + 1]):
            i, square = variable[t], coefficient[t] ** 2
            for k in range(lanes):
                of[i, k] += square * total[r, k]


@compiled
def project(tables: Tables, gains: Gains, z: Numbers, b: Numbers, out: Numbers) -> None:
    """Write the projections of points z (batch, n); b is (batch, q), or (1, q) for all."""
    n, q, lanes = z.shape[1], b.shape[1], min(LANES, z.shape[0])
    point, gap, right = np.empty((n, lanes)), np.empty((q, lanes)), np.empty((q, lanes))
    for first in range(0, z.shape[0], lanes):
        load(z, first, point)
        load(b, first, right)
        _project(tables, gains, right, point, gap)
        store(point, first, out)


@compiled
def project_adjoint(tables: Tables, gains: Gains, of_mean: Numbers, of_z: Numbers, of_b: Numbers) -> None:
    """Write the gradients of z (batch, n) and b (batch, q) of ``project``."""
    n, q, lanes = of_mean.shape[1], of_b.shape[1], min(LANES, of_mean.shape[0])
    of, gap, right = np.empty((n, lanes)), np.empty((q, lanes)), np.empty((q, lanes))
    for first in range(0, of_mean.shape[0], lanes):
        load(of_mean, first, of)
        _project_adjoint(tables, gains, of, gap, right)
        store(of, first, of_z)
        store(right, first, of_b)


@compiled
def chain(stages: Stages, z: Numbers, out: Numbers) -> None:
    """Write points z (batch, n) projected by each forest in turn, with right-hand sides 0."""
    n, lanes = z.shape[1], min(LANES, z.shape[0])
    point, gap, zero = np.empty((n, lanes)), np.empty((n, lanes)), np.zeros((n, lanes))
    for first in range(0, z.shape[0], lanes):
        load(z, first, point)
        for t in range(len(stages)):
            _project(stages[t][0], stages[t][1], zero, point, gap)
        store(point, first, out)


@compiled
def chain_adjoint(stages: Stages, of_out: Numbers, of_z: Numbers) -> None:
    """Write the gradients of z (batch, n) of ``chain``."""
    n, lanes = of_out.shape[1], min(LANES, of_out.shape[0])
    of, gap, right = np.empty((n, lanes)), np.empty((n, lanes)), np.empty((n, lanes))
    for first in range(0, of_out.shape[0], lanes):
        load(of_out, first, of)
        for t in range(len(stages) - 1, -1, -1):
            _project_adjoint(stages[t][0], stages[t][1], of, gap, right)
        store(of, first, of_z)


@compiled
def scale(stages: Stages, s: Numbers, out: Numbers) -> None:
    """Write the roots of the variances s (batch, n) projected by each forest in turn."""
    n, lanes = s.shape[1], min(LANES, s.shape[0])
    before, h, outer, total = np.empty((n, lanes)), np.empty((n, lanes)), np.zeros((n, lanes)), np.empty((n, lanes))
    for first in range(0, s.shape[0], lanes):
        load(s, first, h)
        for t in range(len(stages)):
            before[:] = h
            _variance(stages[t][0], stages[t][1], before, h, total, outer)
        h[:] = np.sqrt(h)
        store(h, first, out)


@compiled
def scale_adjoint(stages: Stages, scale: Numbers, of_scale: Numbers, of_s: Numbers) -> None:
    """Write the gradients of s (batch, n) of ``scale``."""
    n, lanes = scale.shape[1], min(LANES, scale.shape[0])
    of, root, outer, own_part = np.empty((n, lanes)), np.empty((n, lanes)), np.empty((n, lanes)), np.empty((n, lanes))
    total = np.empty((n, lanes))
    for first in range(0, scale.shape[0], lanes):
        load(of_scale, first, of)
        load(scale, first, root)
        of *= 0.5 * root / (root * root + TINY)
        for t in range(len(stages) - 1, -1, -1):
            _variance_adjoint(stages[t][0], stages[t][1], of, outer, own_part, total)
        store(of, first, of_s)
