"""Convex sets, forward and backward, against cvxpylayers with Clarabel: 400 profiles of 100 points, float64.

And an M5-shaped crossed hierarchy (42,840 series, 30,490 of them bottoms, 12 levels, 28 steps) made coherent and
non-negative, against hierarchicalforecast's MinTraceSparse in the same weights.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

import probhard as ph
from benchmarks.timing import Comparison, interleaved

PROFILES, POINTS, ROWS = 400, 100, 20


def layer(describe: Callable[[Any], tuple[list[Any], Any]]) -> Callable[[Tensor], Tensor]:
    """A cvxpylayers projection with unit weights, solved by Clarabel."""
    import cvxpy as cp
    from cvxpylayers.torch import CvxpyLayer

    u, z = cp.Variable(POINTS), cp.Parameter(POINTS)
    constraints, extra = describe(u)
    problem = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(u - z) + extra), constraints)
    made = CvxpyLayer(problem, parameters=[z], variables=[u])
    return lambda x: made(x, solver_args={"solve_method": "Clarabel"})[0]


def sets() -> Iterator[tuple[str, ph.Constraint, Callable[[Any], tuple[list[Any], Any]], str]]:
    """Name, our constraint, the same for cvxpy, and the goal."""
    import cvxpy as cp

    yield (
        "TV penalty + box",
        ph.TotalVariationPenalty(0.3) & ph.Box(0.0, 1.0),
        lambda u: ([u >= 0, u <= 1], 0.3 * cp.tv(u)),
        ">= 500",
    )
    yield (
        "box + mass",
        ph.Conservation(torch.full((POINTS,), 1 / POINTS, dtype=torch.float64), 0.4) & ph.Box(0.0, 1.0),
        lambda u: ([u >= 0, u <= 1, cp.sum(u) / POINTS == 0.4], 0),
        ">= 150",
    )
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, POINTS, generator=generator, dtype=torch.float64)
    right = rows @ torch.full((POINTS,), 0.5, dtype=torch.float64) + 0.1
    yield (
        f"polyhedron of {ROWS} rows",
        ph.LinearInequality(rows, right),
        lambda u: ([rows.numpy() @ u <= right.numpy()], 0),
        ">= 20",
    )
    yield (
        "monotone + mass + box",
        ph.Monotone() & ph.Conservation(torch.full((POINTS,), 1 / POINTS, dtype=torch.float64), 0.4) & ph.Box(0.0, 1.0),
        lambda u: ([u >= 0, u <= 1, cp.diff(u) >= 0, cp.sum(u) / POINTS == 0.4], 0),
        "",
    )


def m5(items: int = 3049) -> sp.csr_array:
    """The summation matrix of items x stores, with the twelve levels of M5."""
    department = np.sort(np.arange(items) % 7)
    category, state = np.array([0, 0, 1, 1, 2, 2, 2]), np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    i, s = (x.ravel() for x in np.meshgrid(np.arange(items), np.arange(10), indexing="ij"))
    d, place = department[i], state[s]
    c = category[d]
    keys = [0 * i, place, s, c, d, place * 3 + c, place * 7 + d, s * 3 + c, s * 7 + d, i, i * 3 + place]
    blocks = []
    for key in keys:
        _, group = np.unique(key, return_inverse=True)
        blocks.append(sp.csr_array((np.ones(len(i)), (group, np.arange(len(i)))), shape=(group.max() + 1, len(i))))
    return sp.csr_array(sp.vstack([*blocks, sp.eye_array(len(i))]))


def counts(summing: sp.csr_array, steps: int = 28) -> np.ndarray:
    """Base forecasts (series, steps) of intermittent counts, incoherent and partly negative."""
    rng = np.random.default_rng(0)
    shape = (summing.shape[1], steps)
    true = summing @ (rng.gamma(0.5, 1.0, shape) * rng.binomial(1, 0.6, shape))
    return true + 0.7 * rng.normal(size=true.shape) * np.sqrt(np.maximum(true, 0.3))


def m5_comparisons() -> Iterator[Comparison]:
    """Mean only, and non-negative, in structural weights; two threads, as hierarchicalforecast takes."""
    from hierarchicalforecast.methods import MinTraceSparse

    torch.set_num_threads(2)
    summing = m5()
    base = counts(summing)
    weight = np.asarray(summing.sum(1)).ravel()
    hierarchy = ph.Hierarchy(summing)
    points = torch.from_numpy(base.T.copy())
    law = ph.LocationScale(points, ph.Diagonal(torch.from_numpy(weight)))
    for nonnegative, goal in ((False, ">= 1"), (True, ">= 10")):
        constraint = hierarchy & ph.NonNegative() if nonnegative else hierarchy
        ph.DPPL().project(points, constraint, law)  # the structure is found once
        start = time.perf_counter()
        ours = ph.DPPL().project(points, constraint, law).value
        our_seconds = time.perf_counter() - start
        method = MinTraceSparse(method="wls_struct", nonnegative=nonnegative, num_threads=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start = time.perf_counter()
            theirs = method.fit_predict(S=sp.csr_matrix(summing), y_hat=base)["mean"]
            peer_seconds = time.perf_counter() - start
        theirs = torch.from_numpy(np.asarray(theirs).T.copy())
        objective = [float(((u - points) ** 2 / law.cov.diagonal()).sum()) / 2 for u in (ours, theirs)]
        name = "coherent and non-negative" if nonnegative else "coherent"
        yield Comparison(
            f"M5 {name}, objective {objective[0]:.0f} (peer {objective[1]:.0f})",
            "MinTraceSparse",
            peer_seconds,
            our_seconds,
            float(constraint.violation(theirs).max()),
            float(constraint.violation(ours).max()),
            goal,
        )
    torch.set_num_threads(1)


def run() -> Iterator[Comparison]:
    """Compare, one thread for the profiles."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(PROFILES, POINTS, generator=generator, dtype=torch.float64)
    z = (torch.linspace(0, 1, POINTS, dtype=torch.float64) + 0.3 * noise).requires_grad_()
    slope = torch.randn(PROFILES, POINTS, generator=generator, dtype=torch.float64)
    projection = ph.DPPL("orthogonal")
    for name, constraint, describe, goal in sets():
        peer = layer(describe)

        def ours(constraint: ph.Constraint = constraint) -> Tensor:
            found = projection.project(z, constraint).value
            z.grad = None
            (found * slope).sum().backward()
            return found

        def theirs(peer: Callable[[Tensor], Tensor] = peer) -> Tensor:
            found = peer(z)
            z.grad = None
            (found * slope).sum().backward()
            return found

        [our_seconds] = interleaved(ours, repeats=20)
        [peer_seconds] = interleaved(theirs, repeats=1, warm_up=1)
        gaps = [float(constraint.violation(value.detach()).max()) for value in (theirs(), ours())]
        yield Comparison(
            f"{name}, {PROFILES} x {POINTS}", "cvxpylayers, Clarabel", peer_seconds, our_seconds, *gaps, goal
        )
    yield from m5_comparisons()
