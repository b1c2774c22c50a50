"""The primal-dual active set method of ``active_set`` for a forest of rows on a CPU, compiled by numba.

One step is two sweeps over the tree, as in ``rows._kernels.sweeps``. A free variable has its centre m and weight v; a
held one has its bound and a tiny weight. Leaves first, a row of coefficients a whose shared variable x has the
coefficient p gives

    V = sum a_i^2 v_i,   gap = b - sum a_i m_i,   d = V + p^2 v_x,   (m_x, v_x) <- (V m_x + p v_x gap, v_x V) / d.

Roots first, its multiplier is ``y = (p (m_x - v_x t) - gap) / d`` with x's own m and v and the pull t of the row above.
Dividing by V instead would lose all digits where everything below x is held. Every variable then has the target
``c_i - w_i (A^T y)_i``, which gives its next side. The kernels work in place; ``iterate`` returns ``Faces``.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from probhard._util import jit
from probhard._util.jit import Array, compiled
from probhard._util.tensors import plain
from probhard.rows._kernels.sweeps import Tables
from probhard.rows.tree import Tree
from probhard.solvers.quadratic import HELD, NEAR, Faces, QuadraticProblem

Sides = NDArray[np.int8]
Data = tuple[Array, Array, Array, Array, Array, Array]  # b (q,), then centre, weight, natural weight and bounds (n,)

M, V, PULL = range(3)  # planes of ``nodes`` (3, n)
PIVOT, GAP = range(2)  # planes of ``rows`` (2, q)


def suits(problem: QuadraticProblem) -> bool:
    """Whether the kernels apply: a forest of rows without auxiliary variables or linear costs, on a CPU."""
    forest = isinstance(problem.core, Tree) and problem.costed is None and problem.linear is None
    return forest and jit.AVAILABLE and plain(problem.centre) and problem.centre.numel() > 0


def iterate(problem: QuadraticProblem, side: Tensor, steps: int) -> Faces:
    """Change sides up to ``steps`` times.

    Args:
        problem: The problems, for which ``suits`` is True.
        side: Sides to start from, (L, N) int8.
        steps: Largest number of changes.

    Returns:
        The faces that were reached; ``done`` where the sides no longer change.
    """
    assert isinstance(problem.core, Tree)
    core = problem.core
    data = (
        *(_array(problem.right), _array(problem.centre), _array(problem.weight)),
        *(_array(problem.natural), _array(problem.lower), _array(problem.upper)),
    )
    side, value = side.clone(), torch.empty_like(problem.centre, memory_format=torch.contiguous_format)
    multiplier = torch.empty_like(problem.right, memory_format=torch.contiguous_format)
    count = torch.zeros(len(side), dtype=torch.int64)
    done = torch.zeros(len(side), dtype=torch.bool)
    outputs = (side, value, multiplier, count, done)
    _all(core.kernel_tables, data, steps, *(x.numpy() for x in outputs))
    return Faces(side, value, count, done, multiplier)


def _array(x: Tensor) -> Array:
    """Convert x (L, k) to an array; (1, k) if one element is repeated."""
    return (x[:1] if x.stride(0) == 0 else x).contiguous().numpy()


@compiled
def _all(
    tables: Tables, data: Data, steps: int, side: Sides, value: Array, multiplier: Array, count: Array, done: Array
) -> None:
    """Iterate on all elements, one after the other."""
    b, centre, weight, natural, lower, upper = data
    nodes, rows = np.empty((3, centre.shape[1])), np.empty((2, b.shape[1]))
    for e in range(side.shape[0]):
        own = (
            b[min(e, len(b) - 1)],
            centre[min(e, len(centre) - 1)],
            weight[min(e, len(weight) - 1)],
            natural[min(e, len(natural) - 1)],
            lower[min(e, len(lower) - 1)],
            upper[min(e, len(upper) - 1)],
        )
        while count[e] < steps and not done[e]:
            _sweep(tables, own, side[e], nodes, rows, multiplier[e])
            done[e] = _choose(own, side[e], nodes[PULL], value[e])
            count[e] += 1


@compiled
def _sweep(tables: Tables, data: Data, side: Sides, nodes: Array, rows: Array, multiplier: Array) -> None:
    """Multipliers y of the rows, and ``A^T y`` in ``nodes``, given the sides."""
    start, number, up, up_coefficient, variable, coefficient = tables
    b = data[0]
    m, v, pull = nodes[M], nodes[V], nodes[PULL]
    for i in range(len(side)):
        m[i], v[i] = _own(data, side, i)
        pull[i] = 0.0
    for r in range(len(number)):
        total, gap = 0.0, b[number[r]]
        for t in range(start[r], start[r + 1]):
            i, a = variable[t], coefficient[t]
            total += a * a * v[i]
            gap -= a * m[i]
        rows[PIVOT, r], rows[GAP, r] = total, gap
        if up[r] >= 0:
            x, p = up[r], up_coefficient[r]
            pivot = total + p * p * v[x]
            rows[PIVOT, r] = pivot
            if pivot > 0.0:
                m[x], v[x] = (total * m[x] + p * v[x] * gap) / pivot, v[x] * total / pivot
    for r in range(len(number) - 1, -1, -1):
        x, p, above = up[r], up_coefficient[r], 0.0
        if x >= 0:
            centre, weight = _own(data, side, x)
            above = p * (centre - weight * pull[x])
        y = (above - rows[GAP, r]) / rows[PIVOT, r] if rows[PIVOT, r] > 0.0 else 0.0
        multiplier[number[r]] = y
        for t in range(start[r], start[r + 1]):
            pull[variable[t]] += coefficient[t] * y
        if x >= 0:
            pull[x] += p * y


@compiled
def _own(data: Data, side: Sides, i: int) -> tuple[float, float]:
    """Centre and weight of a free variable; the bound and a tiny weight of a held one."""
    _, centre, weight, natural, lower, upper = data
    if side[i] == 0:
        return centre[i], weight[i]
    return lower[i] if side[i] < 0 else upper[i], HELD * natural[i]


@compiled
def _choose(data: Data, side: Sides, pull: Array, value: Array) -> bool:
    """Write the sides of the targets and return whether none changed."""
    _, centre, weight, _, lower, upper = data
    settled = True
    for i in range(len(side)):
        shift = weight[i] * pull[i]
        target, near = centre[i] - shift, NEAR * (abs(centre[i]) + abs(shift))
        fresh = 0
        if lower[i] == upper[i] or target > upper[i] - (near if side[i] > 0 else -near):
            fresh = 1
        elif target < lower[i] + (near if side[i] < 0 else -near):
            fresh = -1
        value[i] = min(max(target, lower[i]), upper[i])
        if fresh != side[i]:
            settled = settled and weight[i] == 0.0
            side[i] = fresh
    return settled
