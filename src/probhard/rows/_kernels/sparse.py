"""Kernels for sparse rows on a CPU, compiled by numba if it is installed: factor, solve, moments and their adjoint.

``M = A W A^T = L D L^T`` column by column in the order of ``elimination.Columns``; ``Z = M^-1`` on the pattern of L as
in ``sparse``. With ``r = A z - b``, ``m = M^-1 r`` and ``q_i(X) = a_i^T X a_i``, the oblique projection and its adjoint
are

    u = z - W A^T m,    v_i = w_i - w_i^2 q_i(Z),    y = M^-1 A W u',    N = Z A diag(w^2 v') A^T Z,
    z' = u' - A^T y,    b' = y,    w'_i = v'_i (1 - 2 w_i q_i(Z)) + q_i(N) + (A^T m)_i ((A^T y)_i - u'_i),

where primes mark gradients. On the pattern, N is the derivative of -Z along ``A diag(w^2 v') A^T``: the elimination and
Takahashi's recursion, differentiated line by line. A few batch elements lie side by side in memory ("lanes"), so that
each step is one vector instruction and its numbers stay in the cache.
"""

from __future__ import annotations

import numpy as np

from probhard._util.jit import Array, compiled
from probhard.rows._kernels.lanes import TINY, Index, load, product, store

# Columns of L (start of each, row of each entry, start of each one's pairs, entry of each pair), then the terms of
# A W A^T (variable, entry, product, product counted twice off the diagonal), then A (row, variable, value). A plain
# tuple, because numba's cache on disk cannot be read once a class that it names has changed.
Tables = tuple[Index, Index, Index, Index, Index, Index, Array, Array, Index, Index, Array]


@compiled
def _assemble(tables: Tables, weight: Array, out: Array) -> None:
    """Write the entries of ``A diag(weight) A^T``."""
    variable, entry, product = tables[4], tables[5], tables[6]
    out[:] = 0.0
    for t in range(len(entry)):
        e, i, a = entry[t], variable[t], product[t]
        for k in range(out.shape[1]):
            out[e, k] += weight[i, k] * a


@compiled
def _forms(tables: Tables, entries: Array, out: Array) -> None:
    """Write ``q_i(X)`` from the entries of X."""
    variable, entry, product = tables[4], tables[5], tables[7]
    out[:] = 0.0
    for t in range(len(entry)):
        e, i, a = entry[t], variable[t], product[t]
        for k in range(out.shape[1]):
            out[i, k] += entries[e, k] * a


@compiled
def _eliminate(tables: Tables, x: Array, column: Array) -> None:
    """Replace the entries of M by d and l of each column; ``column`` is scratch."""
    start, pair, target = tables[0], tables[2], tables[3]
    lanes = x.shape[1]
    for p in range(len(start) - 1):
        base, size, t = start[p] + 1, start[p + 1] - start[p] - 1, pair[p]
        for a in range(size):
            for k in range(lanes):
                column[a, k] = x[base + a, k]
                x[base + a, k] = column[a, k] / x[base - 1, k]
            for b in range(a + 1):
                at = target[t]
                t += 1
                for k in range(lanes):
                    x[at, k] -= x[base + a, k] * column[b, k]


@compiled
def _invert(tables: Tables, x: Array, inverse: Array) -> None:
    """Write the entries of Z from the columns of L D L^T."""
    start, pair, target = tables[0], tables[2], tables[3]
    lanes = x.shape[1]
    for p in range(len(start) - 2, -1, -1):
        base, size, t = start[p] + 1, start[p + 1] - start[p] - 1, pair[p]
        for a in range(size):
            e = base + a
            for k in range(lanes):
                inverse[e, k] = 0.0
            for b in range(a + 1):
                at, f = target[t], base + b
                t += 1
                for k in range(lanes):
                    inverse[e, k] -= inverse[at, k] * x[f, k]
                if b < a:
                    for k in range(lanes):
                        inverse[f, k] -= inverse[at, k] * x[e, k]
        for k in range(lanes):
            inverse[base - 1, k] = 1.0 / x[base - 1, k]
        for e in range(base, base + size):
            for k in range(lanes):
                inverse[base - 1, k] -= x[e, k] * inverse[e, k]


@compiled
def _differentiate(tables: Tables, x: Array, inverse: Array, g: Array, column: Array) -> None:
    """Replace the entries of G by those of ``Z G Z``, the derivative of -Z along G; ``column`` is scratch."""
    start, pair, target = tables[0], tables[2], tables[3]
    lanes = x.shape[1]
    for p in range(len(start) - 1):
        base, size, t = start[p] + 1, start[p + 1] - start[p] - 1, pair[p]
        d = base - 1
        for a in range(size):
            e = base + a
            for k in range(lanes):
                column[a, k] = g[e, k] - x[e, k] * g[d, k]  # the derivative of l, times d
            for b in range(a + 1):
                at, f = target[t], base + b
                t += 1
                for k in range(lanes):
                    g[at, k] -= column[a, k] * x[f, k] + x[e, k] * g[f, k]
        for a in range(size):
            for k in range(lanes):
                g[base + a, k] = column[a, k] / x[d, k]
    for p in range(len(start) - 2, -1, -1):
        base, size, t = start[p] + 1, start[p + 1] - start[p] - 1, pair[p]
        d = base - 1
        for k in range(lanes):
            g[d, k] /= x[d, k] * x[d, k]
        for a in range(size):
            e = base + a
            for k in range(lanes):
                g[d, k] += g[e, k] * inverse[e, k]
                column[a, k] = 0.0
            for b in range(a + 1):
                at, f = target[t], base + b
                t += 1
                for k in range(lanes):
                    column[a, k] += inverse[at, k] * g[f, k] - g[at, k] * x[f, k]
                if b < a:
                    for k in range(lanes):
                        column[b, k] += inverse[at, k] * g[e, k] - g[at, k] * x[e, k]
        for a in range(size):
            e = base + a
            for k in range(lanes):
                g[e, k] = column[a, k]
                g[d, k] -= x[e, k] * column[a, k]


@compiled
def _substitute(tables: Tables, x: Array, r: Array) -> None:
    """Replace r (q, lanes) by ``M^-1 r``."""
    start, row = tables[0], tables[1]
    lanes = x.shape[1]
    for p in range(len(start) - 1):
        own = row[start[p]]
        for e in range(start[p] + 1, start[p + 1]):
            j = row[e]
            for k in range(lanes):
                r[j, k] -= x[e, k] * r[own, k]
    for p in range(len(start) - 2, -1, -1):
        own = row[start[p]]
        for k in range(lanes):
            r[own, k] /= x[start[p], k]
        for e in range(start[p] + 1, start[p + 1]):
            j = row[e]
            for k in range(lanes):
                r[own, k] -= x[e, k] * r[j, k]


@compiled
def factorise(tables: Tables, weight: Array, lanes: int) -> tuple[Array, Array]:
    """Columns of L D L^T (chunks, entries, lanes) and pivots (batch, q) for weights (batch, n)."""
    start, row = tables[0], tables[1]
    count, n = weight.shape
    chunks = (count + lanes - 1) // lanes
    factor, pivots = np.empty((chunks, len(row), lanes)), np.empty((count, len(start) - 1))
    w, scratch = np.empty((n, lanes)), np.empty((len(start), lanes))
    for c in range(chunks):
        load(weight, c * lanes, w)
        _assemble(tables, w, factor[c])
        _eliminate(tables, factor[c], scratch)
        for p in range(len(start) - 1):
            scratch[p] = factor[c, start[p]]
        store(scratch, c * lanes, pivots)
    return factor, pivots


@compiled
def solve(tables: Tables, factor: Array, right: Array) -> Array:
    """``M^-1 r`` for right-hand sides (samples, batch, q); one chunk of the factor may serve all."""
    samples, count, rows = right.shape
    chunks, _, lanes = factor.shape
    out, r = np.empty((samples, count, rows)), np.empty((rows, lanes))
    for c in range((count + lanes - 1) // lanes):
        for s in range(samples):
            load(right[s], c * lanes, r)
            _substitute(tables, factor[c % chunks], r)
            store(r, c * lanes, out[s])
    return out


@compiled
def moments(tables: Tables, factor: Array, z: Array, w: Array, b: Array) -> tuple[Array, Array, Array]:
    """Points, roots of the variances (batch, n) and multipliers m (batch, q); b is (batch, q), or (1, q) for all."""
    row, variable, value = tables[8], tables[9], tables[10]
    chunks, entries, lanes = factor.shape
    n, rows = z.shape[1], b.shape[1]
    mean, scale, multiplier = np.empty_like(z), np.empty_like(z), np.empty((z.shape[0], rows))
    inverse, work, r = np.empty((entries, lanes)), np.empty((3, n, lanes)), np.empty((rows, lanes))
    point, weight, pull = work[0], work[1], work[2]
    for c in range(chunks):
        load(z, c * lanes, point)
        load(w, c * lanes, weight)
        load(b, c * lanes, r)
        r *= -1.0
        product(row, variable, value, point, r)
        _substitute(tables, factor[c], r)
        store(r, c * lanes, multiplier)
        pull[:] = 0.0
        product(variable, row, value, r, pull)
        point -= weight * pull
        store(point, c * lanes, mean)
        _invert(tables, factor[c], inverse)
        _forms(tables, inverse, pull)
        point[:] = np.sqrt(np.maximum(weight - weight * weight * pull, 0.0))
        store(point, c * lanes, scale)
    return mean, scale, multiplier


@compiled
def moments_adjoint(
    tables: Tables,
    factor: Array,
    w: Array,  # (batch, n)
    multiplier: Array,  # (batch, q)
    scale: Array,  # (batch, n)
    of_mean: Array,  # (batch, n)
    of_scale: Array,  # (batch, n)
) -> tuple[Array, Array, Array]:
    """Gradients of z, w and b from those of the points and of the roots of the variances."""
    row, variable, value = tables[8], tables[9], tables[10]
    chunks, entries, lanes = factor.shape
    (count, n), rows = w.shape, multiplier.shape[1]
    of_z, of_w, of_b = np.empty((count, n)), np.empty((count, n)), np.empty((count, rows))
    work, inverse, g = np.empty((5, n, lanes)), np.empty((entries, lanes)), np.empty((entries, lanes))
    weight, up, down, pull, out = work[0], work[1], work[2], work[3], work[4]
    r, scratch = np.empty((rows, lanes)), np.empty((rows, lanes))
    for c in range(chunks):
        load(w, c * lanes, weight)
        load(multiplier, c * lanes, r)
        pull[:] = 0.0
        product(variable, row, value, r, pull)  # A^T m
        load(of_mean, c * lanes, up)
        out[:] = weight * up
        r[:] = 0.0
        product(row, variable, value, out, r)
        _substitute(tables, factor[c], r)
        store(r, c * lanes, of_b)
        down[:] = 0.0
        product(variable, row, value, r, down)  # A^T y
        up -= down
        out[:] = -pull * up
        store(up, c * lanes, of_z)
        load(of_scale, c * lanes, up)
        load(scale, c * lanes, down)
        _invert(tables, factor[c], inverse)  # recomputing is as fast as storing it
        _forms(tables, inverse, pull)
        up *= 0.5 * down / (down * down + TINY)  # the gradient of v, 0 where v is 0
        out += up * (1.0 - 2.0 * weight * pull)
        up *= weight * weight
        _assemble(tables, up, g)
        _differentiate(tables, factor[c], inverse, g, scratch)
        _forms(tables, g, pull)
        out += pull
        store(out, c * lanes, of_w)
    return of_z, of_w, of_b
