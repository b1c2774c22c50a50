"""Oblique sweeps of a forest of rows, compiled by numba if it is installed, as one differentiable function.

These are the sweeps of ``tree`` for S = W, row by row. Let m and v be the mean and variance that the
subtree below a variable implies, or its own z and w if there is none. Leaves first, a row with inside coefficients c
and shared variable x of coefficient p gives

    V = sum c_i^2 v_i,   gap = b - sum c_i m_i,   d = V + p^2 w_x,   v_x = w_x V / d,   m_x = (V z_x + p w_x gap) / d

and, roots first, with ``g_i = c_i v_i / V`` and hats for the results,

    u_i = m_i + g_i (gap - p u_x),    hat v_i = v_i (1 - c_i g_i) + (p g_i)^2 hat v_x.

The adjoint is the same recursion, differentiated line by line and run backwards. A few batch elements lie side by side
(``lanes``). All arithmetic is in float64, whatever the dtype of the points.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from probhard._util.jit import Array, compiled
from probhard._util.tensors import matrix, plain
from probhard.rows._kernels.lanes import LANES, TINY, Index, Numbers, load, store
from probhard.rows._kernels.moments import twice

if TYPE_CHECKING:
    from probhard.rows.tree import Tree

# For each row, leaves first: start of its inside variables, its number in b, its shared variable (-1 at a root) and
# that variable's coefficient. Then the inside variables and their coefficients.
Tables = tuple[Index, Index, Index, Array, Index, Array]

V, GAP, OF_V, OF_GAP = range(4)  # planes of ``rows`` (4, q, lanes)
M, S, U, HAT = range(4)  # planes of ``nodes`` (4, n, lanes): m, v, u, hat v; gradients likewise


@compiled
def ratio(x: float, y: float) -> float:
    """``x / y``, or 0 where y is 0."""
    return x / y if y > 0.0 else 0.0


@compiled
def _upward(tables: Tables, b: Array, nodes: Array, rows: Array) -> None:
    """Write V and gap of the rows; replace z and w of the shared variables by m and v."""
    start, number, up, up_coefficient, variable, coefficient = tables
    lanes = rows.shape[2]
    for r in range(len(number)):
        for k in range(lanes):
            rows[V, r, k] = 0.0
            rows[GAP, r, k] = b[number[r], k]
        for t in range(start[r], start[r + 1]):
            i, c = variable[t], coefficient[t]
            for k in range(lanes):
                rows[V, r, k] += c * c * nodes[S, i, k]
                rows[GAP, r, k] -= c * nodes[M, i, k]
        x, p = up[r], up_coefficient[r]
        if x >= 0:
            for k in range(lanes):
                z, w, total = nodes[M, x, k], nodes[S, x, k], rows[V, r, k]
                pivot = total + p * p * w
                nodes[S, x, k] = ratio(w * total, pivot)
                nodes[M, x, k] = (total * z + p * w * rows[GAP, r, k]) / pivot if pivot > 0.0 else z


@compiled
def _downward(tables: Tables, nodes: Array, rows: Array) -> None:
    """Write the results u and hat v of all variables."""
    start, number, up, up_coefficient, variable, coefficient = tables
    lanes = rows.shape[2]
    for r in range(len(number) - 1, -1, -1):
        x, p = max(up[r], 0), up_coefficient[r] if up[r] >= 0 else 0.0
        for t in range(start[r], start[r + 1]):
            i, c = variable[t], coefficient[t]
            for k in range(lanes):
                own = nodes[S, i, k]
                share = ratio(c * own, rows[V, r, k])
                nodes[U, i, k] = nodes[M, i, k] + share * (rows[GAP, r, k] - p * nodes[U, x, k])
                known = max(own * (1.0 - c * share), 0.0)
                nodes[HAT, i, k] = known + p * p * share * share * nodes[HAT, x, k]


@compiled
def moments(tables: Tables, z: Numbers, w: Numbers, b: Numbers, mean: Numbers, scale: Numbers) -> None:
    """Write points and roots of the variances (batch, n); b is (batch, q), or (1, q) for all."""
    n, q, lanes = z.shape[1], b.shape[1], min(LANES, z.shape[0])
    nodes, rows, right = np.empty((4, n, lanes)), np.empty((4, q, lanes)), np.empty((q, lanes))
    for first in range(0, z.shape[0], lanes):
        load(z, first, nodes[M])
        load(w, first, nodes[S])
        load(b, first, right)
        nodes[U], nodes[HAT] = nodes[M], nodes[S]  # of variables in no row
        _upward(tables, right, nodes, rows)
        _downward(tables, nodes, rows)
        nodes[HAT] = np.sqrt(nodes[HAT])
        store(nodes[U], first, mean)
        store(nodes[HAT], first, scale)


@compiled
def _downward_adjoint(tables: Tables, nodes: Array, rows: Array, of: Array) -> None:
    """Gradients of m, v, V and gap through the downward sweep; ``of`` holds those of u and hat v."""
    start, number, up, up_coefficient, variable, coefficient = tables
    lanes = rows.shape[2]
    for r in range(len(number)):
        x, p = max(up[r], 0), up_coefficient[r] if up[r] >= 0 else 0.0
        for k in range(lanes):
            rows[OF_V, r, k] = 0.0
            rows[OF_GAP, r, k] = 0.0
        for t in range(start[r], start[r + 1]):
            i, c = variable[t], coefficient[t]
            for k in range(lanes):
                own, total, above = nodes[S, i, k], rows[V, r, k], p * p * nodes[HAT, x, k]
                of_u, of_hat = of[U, i, k], of[HAT, i, k]
                share = ratio(c * own, total)
                left = rows[GAP, r, k] - p * nodes[U, x, k]
                of_share = left * of_u + of_hat * (2.0 * share * above - c * own)
                slope = ratio(of_share, total)
                of[M, i, k] = of_u
                of[S, i, k] = of_hat * (1.0 - c * share) + c * slope
                rows[OF_V, r, k] -= slope * share
                rows[OF_GAP, r, k] += share * of_u
                of[HAT, x, k] += p * p * share * share * of_hat
        for k in range(lanes):
            of[U, x, k] -= p * rows[OF_GAP, r, k]


@compiled
def _upward_adjoint(tables: Tables, nodes: Array, rows: Array, first: Array, of: Array, of_b: Array) -> None:
    """Replace the gradients of m and v by those of z and w; ``first`` (2, n, lanes) holds z and w."""
    start, number, up, up_coefficient, variable, coefficient = tables
    lanes = rows.shape[2]
    for r in range(len(number) - 1, -1, -1):
        x, p = up[r], up_coefficient[r]
        if x >= 0:
            for k in range(lanes):
                z, w, total, gap = first[0, x, k], first[1, x, k], rows[V, r, k], rows[GAP, r, k]
                pivot = total + p * p * w
                of_m, of_v = of[M, x, k], of[S, x, k]
                keep, give = ratio(total, pivot), ratio(p * w, pivot)
                slope = ratio(of_m, pivot)
                rows[OF_V, r, k] += of_v * give * give + slope * (z - nodes[M, x, k])
                rows[OF_GAP, r, k] += of_m * give
                of[M, x, k] = of_m * keep if pivot > 0.0 else of_m
                of[S, x, k] = of_v * keep * keep + slope * p * (gap - p * nodes[M, x, k])
        for k in range(lanes):
            of_b[number[r], k] = rows[OF_GAP, r, k]
        for t in range(start[r], start[r + 1]):
            i, c = variable[t], coefficient[t]
            for k in range(lanes):
                of[M, i, k] -= c * rows[OF_GAP, r, k]
                of[S, i, k] += c * c * rows[OF_V, r, k]


@compiled
def moments_adjoint(
    tables: Tables,
    z: Numbers,  # (batch, n)
    w: Numbers,  # (batch, n)
    b: Numbers,  # (batch or 1, q)
    of_mean: Numbers,  # (batch, n)
    of_scale: Numbers,  # (batch, n)
    of_z: Numbers,
    of_w: Numbers,
    of_b: Numbers,  # (batch, q)
) -> None:
    """Write the gradients of z, w and b from those of the points and of the roots of the variances."""
    n, q, lanes = z.shape[1], b.shape[1], min(LANES, z.shape[0])
    nodes, of, source = np.empty((4, n, lanes)), np.empty((4, n, lanes)), np.empty((2, n, lanes))
    rows, right = np.empty((4, q, lanes)), np.empty((q, lanes))
    for first in range(0, z.shape[0], lanes):
        load(z, first, source[0])
        load(w, first, source[1])
        load(b, first, right)
        nodes[M], nodes[S], nodes[U], nodes[HAT] = source[0], source[1], source[0], source[1]
        _upward(tables, right, nodes, rows)  # recomputing is as fast as storing it
        _downward(tables, nodes, rows)
        load(of_mean, first, of[U])
        load(of_scale, first, of[HAT])
        of[HAT] *= 0.5 * np.sqrt(nodes[HAT]) / (nodes[HAT] + TINY)  # the gradient of hat v, 0 where it is 0
        of[M], of[S] = of[U], of[HAT]  # of variables in no row
        _downward_adjoint(tables, nodes, rows, of)
        _upward_adjoint(tables, nodes, rows, source, of, right)
        store(of[M], first, of_z)
        store(of[S], first, of_w)
        store(right, first, of_b)


class Moments(torch.autograd.Function):
    """``(z, w, b) -> (u, sqrt(v))`` for the oblique metric; z and w are (*batch, n)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, w: Tensor, b: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
        right = matched(b, z)
        mean, scale = z.new_empty(z.shape), z.new_empty(z.shape)
        moments(tree.kernel_tables, matrix(z), matrix(w), matrix(right), matrix(mean), matrix(scale))
        ctx.tree = tree
        ctx.save_for_backward(z, w, b)
        return mean, scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        z, w, b = ctx.saved_tensors
        if torch.is_grad_enabled() or not all(map(plain, gradients)):
            return (*twice(ctx.tree.plain_moments, (z, w, b), gradients), None)
        right = matched(b, z)
        of_z, of_w, of_b = z.new_empty(z.shape), z.new_empty(z.shape), b.new_empty(*z.shape[:-1], b.shape[-1])
        inputs = (matrix(z), matrix(w), matrix(right), matrix(gradients[0]), matrix(gradients[1]))
        moments_adjoint(ctx.tree.kernel_tables, *inputs, matrix(of_z), matrix(of_w), matrix(of_b))
        return of_z, of_w, of_b.sum_to_size(b.shape), None


def matched(b: Tensor, z: Tensor) -> Tensor:
    """Right-hand sides b for the points z (*batch, n): one for all (q,), or one for each (*batch, q)."""
    return b if b.dim() == 1 else b.expand(*z.shape[:-1], -1)
