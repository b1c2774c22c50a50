"""Bounded quadratic problems one by one, for elements that no fast method solves: flat sets, weights of many decades.

In units of the root of the weights, ``v = c + D x``, and with the rows eliminated by their singular vectors,
``x = x0 + Z t``, a ``QuadraticProblem`` is to find the shortest t in a polyhedron. Its dual is a problem of
non-negative least squares (Lawson and Hanson, 1974, chapter 23),

    min |t|   subject to  G t >= h:      min_{y >= 0} |E y - e|,   E = [G^T; h^T],   e = (0, ..., 0, 1),

with ``t = -r_1 / r_2`` for the residual ``r = (r_1, r_2)``. It has a solution whether or not the polyhedron has inner
points. Rows and bounds are equilibrated first. Auxiliary variables cost little and are moved to their last values
until the others rest. A solution is accepted if it is feasible and the sum of its multipliers times rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import nnls

from probhard.solvers.quadratic import Faces, QuadraticProblem

LARGEST = 400  # variables of an element; larger ones are left to the other methods
MOST = 2000  # elements
CHEAP = 1e6  # weight of auxiliary variables relative to their natural one
ROUNDS = 8
RANK = 1e-12  # singular values below this share of the largest are 0
RELAXED = 1e-13  # room for rounding at bounds, relative to the numbers that they are compared with
ACCURATE = 1e-9  # of the optimality conditions, relative to the length of t
RESTING = 1e-9  # change of the point at which auxiliary variables have settled


@torch.no_grad()
def solve(problem: QuadraticProblem) -> Faces:
    """Find the faces of the solutions; ``done`` is False where none is found.

    Args:
        problem: The problems.
    """
    count, size = problem.centre.shape
    steps = torch.zeros(count, dtype=torch.int64, device=problem.centre.device)
    side = torch.zeros(count, size, dtype=torch.int8, device=problem.centre.device)
    faces = Faces(side, problem.centre.clone(), steps, steps > 0, torch.zeros_like(problem.right))
    if size > LARGEST or count > MOST or problem.core is None or problem.linear is not None:
        return faces
    rows = problem.core.dense().expand(count, *problem.core.dense().shape[-2:]).cpu().numpy()
    fields = (problem.right, problem.centre, problem.weight, problem.natural, problem.lower, problem.upper)
    right, centre, weight, natural, lower, upper = (x.cpu().numpy() for x in fields)
    costed = np.ones(size, bool) if problem.costed is None else problem.costed.cpu().numpy()
    spent = np.where(costed, weight, CHEAP * natural)
    for k in range(count):
        with np.errstate(all="ignore"):
            found = _element(
                _Element(rows[k], right[k], centre[k], spent[k] * (weight[k] > 0), lower[k], upper[k], costed)
            )
        if found is not None:
            faces.value[k] = torch.from_numpy(found[0]).to(problem.centre)
            faces.side[k] = torch.from_numpy(found[1]).to(side)
            faces.done[k] = True
        faces.steps[k] = 1
    return faces


@dataclass(frozen=True)
class _Element:
    """One problem, as in ``QuadraticProblem``."""

    rows: np.ndarray
    right: np.ndarray
    centre: np.ndarray
    weight: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    costed: np.ndarray


def _element(one: _Element) -> tuple[np.ndarray, np.ndarray] | None:
    """The solution (N,) and its sides; None if it is not found."""
    if not all(np.isfinite(x).all() for x in (one.rows, one.right, one.centre, one.weight)):
        return None
    still = one.weight == 0
    root, centre = np.sqrt(one.weight), np.where(still, np.clip(one.centre, one.lower, one.upper), one.centre)
    scaled = one.rows * root
    length = np.linalg.norm(scaled, axis=1)
    live = length > 0
    scaled = scaled[live] / length[live, None]
    left, values, vectors = np.linalg.svd(scaled)
    rank = int((values > RANK * values[0]).sum()) if len(values) else 0
    free = vectors[rank:].T  # Z, (N, r)
    for turn in range(ROUNDS):
        gap = (one.right - one.rows @ centre)[live] / length[live]
        start = vectors[:rank].T @ ((left[:, :rank].T @ gap) / values[:rank])
        moved = _shortest(start, free, root, centre, one)
        if moved is None:
            return None
        value = centre + root * moved
        change = np.abs(value - centre)[~one.costed].max(initial=0.0)
        if change <= RESTING * (np.abs(value).max() + np.abs(one.right).max(initial=0.0)):
            break
        if turn < ROUNDS - 1:
            centre = np.where(one.costed, centre, value)
    near = RELAXED * 100 * (np.abs(value) + np.abs(centre) + np.abs(root * start))
    below, above = value <= one.lower + near, value >= one.upper - near
    side = above.astype(np.int8) - (below & ~above).astype(np.int8)
    outside = (one.centre > one.upper).astype(np.int8) - (one.centre < one.lower).astype(np.int8)
    side = np.where(still, outside, side).astype(np.int8)
    return np.clip(value, one.lower, one.upper), side


def _shortest(
    start: np.ndarray, free: np.ndarray, root: np.ndarray, centre: np.ndarray, one: _Element
) -> np.ndarray | None:
    """``x0 + Z t`` with the shortest t within the bounds; None if there is none."""
    at, rows, sides = centre + root * start, [], []
    room = RELAXED * (np.abs(centre) + np.abs(root * start))
    for sign, bound in ((1.0, one.lower), (-1.0, one.upper)):
        known = np.isfinite(bound) & (root > 0)
        rows.append(sign * (root[:, None] * free)[known])
        sides.append((sign * (bound - at) - room)[known])
    G, h = np.concatenate(rows), np.concatenate(sides)
    length = np.linalg.norm(G, axis=1)
    solid = length > RANK * np.concatenate([root[np.isfinite(b) & (root > 0)] for b in (one.lower, one.upper)])
    G, h = G[solid] / length[solid, None], h[solid] / length[solid]
    if not len(h) or not (h > 0).any():
        return start
    unit = np.abs(h[h > 0]).max()
    try:
        y, _ = nnls(np.vstack([G.T, h / unit]), np.append(np.zeros(G.shape[1]), 1.0), maxiter=50 * len(h))
    except RuntimeError:
        return None
    residual = np.append(G.T @ y, (h / unit) @ y - 1.0)
    if not residual[-1] < -1e-15:
        return None
    t = -residual[:-1] / residual[-1] * unit
    slack = G @ t - h
    if slack.min() < -ACCURATE * (np.abs(t).max() + unit):
        return None
    return start + free @ t
