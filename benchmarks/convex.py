"""Convex sets of 400 profiles of 100 points, forward and backward in float64, for any peer that solves such problems.

    min |u - z|^2 / 2 + variation * sum_i |u_{i+1} - u_i|    s.t.   A u = b,   G u <= h,   lower <= u <= upper.

The gradient of ``sum(slope * u)`` is checked against central differences of our projection, which is exact on every
piece: in ``CHECKED`` columns of all profiles at once, because profiles do not see one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import probhard as ph
from benchmarks.timing import Comparison, measured, worst

PROFILES, POINTS, ROWS = 400, 100, 20
CHECKED, STEP = (0, 17, 49, 63, 99), 1e-6

Solved = tuple[Tensor, Tensor]  # points and gradient, (profiles, points)
Matrix = tuple[np.ndarray, np.ndarray]  # rows and right-hand sides


@dataclass(frozen=True)
class Problem:
    """A set, as ours and as matrices."""

    name: str
    constraint: ph.Constraint
    equal: Matrix | None = None
    unequal: Matrix | None = None
    box: tuple[float, float] | None = None
    variation: float = 0.0


@dataclass(frozen=True)
class Program:
    """``min x P x / 2 + q x`` with rows ``A x = b`` and ``G x <= h``; x begins with u, and q with -z."""

    curvature: np.ndarray  # (n,), the diagonal of P
    rest: np.ndarray  # what follows -z in q
    equal: Matrix
    unequal: Matrix


def problems() -> Iterator[Problem]:
    """The four sets."""
    mass = np.full((1, POINTS), 1 / POINTS), np.array([0.4])
    conserved = ph.Conservation(torch.full((POINTS,), 1 / POINTS, dtype=torch.float64), 0.4)
    box = ph.Box(0.0, 1.0)
    yield Problem("TV penalty + box", ph.TotalVariationPenalty(0.3) & box, box=(0.0, 1.0), variation=0.3)
    yield Problem("box + mass", conserved & box, equal=mass, box=(0.0, 1.0))
    rows = torch.randn(ROWS, POINTS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    right = rows @ torch.full((POINTS,), 0.5, dtype=torch.float64) + 0.1
    unequal = rows.numpy(), right.numpy()
    yield Problem(f"polyhedron of {ROWS} rows", ph.LinearInequality(rows, right), unequal=unequal)
    falls = -np.diff(np.eye(POINTS), axis=0), np.zeros(POINTS - 1)
    monotone = ph.Monotone() & conserved & box
    yield Problem("monotone + mass + box", monotone, equal=mass, unequal=falls, box=(0.0, 1.0))


def program(problem: Problem) -> Program:
    """The problem as a quadratic program, its variation by one more variable per difference."""
    extra = POINTS - 1 if problem.variation else 0
    rows, right = [], []
    if problem.unequal is not None:
        rows, right = [problem.unequal[0]], [problem.unequal[1]]
    if problem.box is not None:
        rows += [-np.eye(POINTS), np.eye(POINTS)]
        right += [np.full(POINTS, -problem.box[0]), np.full(POINTS, problem.box[1])]
    wide = [np.hstack([part, np.zeros((len(part), extra))]) for part in rows]
    if extra:
        differences = np.diff(np.eye(POINTS), axis=0)
        wide += [np.hstack([sign * differences, -np.eye(extra)]) for sign in (1, -1)]
        right += [np.zeros(2 * extra)]
    equal = problem.equal or (np.zeros((0, POINTS)), np.zeros(0))
    return Program(
        np.concatenate([np.ones(POINTS), np.zeros(extra)]),
        np.full(extra, problem.variation),
        (np.hstack([equal[0], np.zeros((len(equal[0]), extra))]), equal[1]),
        (np.vstack(wide), np.concatenate(right)),
    )


def backward(solve: Callable[[Tensor], Tensor], z: Tensor, slope: Tensor) -> Solved:
    """Points and the gradient in z of their product with ``slope``, by torch."""
    leaf = z.clone().requires_grad_()
    nearest = solve(leaf)
    (nearest * slope).sum().backward()
    assert leaf.grad is not None
    return nearest.detach(), leaf.grad


def comparisons(
    peer: str,
    build: Callable[[Problem, Tensor, Tensor], Callable[[], Solved]],  # of a problem, z and slope
    quick: bool = False,
    goals: Mapping[str, float] | None = None,
    skip: tuple[str, ...] = (),
    explanation: str = "",
) -> Iterator[Comparison]:
    """Compare a peer on every set that it can do."""
    kwargs: dict[str, Any] = {"generator": torch.Generator().manual_seed(1), "dtype": torch.float64}
    noise, slope = (torch.randn(8 if quick else PROFILES, POINTS, **kwargs) for _ in range(2))
    z = torch.linspace(0, 1, POINTS, dtype=torch.float64) + 0.3 * noise
    layer = ph.DPPL("orthogonal")
    for problem in problems():
        if problem.name in skip:
            continue

        def project(points: Tensor, constraint: ph.Constraint = problem.constraint) -> Tensor:
            return layer.project(points, constraint).value

        def judge(solved: Solved, constraint: ph.Constraint = problem.constraint) -> float:
            return worst(constraint, solved[0])

        theirs, ours = measured(build(problem, z, slope), partial(backward, project, z, slope))
        gradient = _gradient_errors(project, z, slope, theirs.value[1], ours.value[1])
        goal = (goals or {}).get(problem.name)
        case = f"{problem.name}, {len(z)} x {POINTS}"
        yield Comparison.of(case, peer, theirs, ours, judge, goal=goal, gradient=gradient, explanation=explanation)


def _gradient_errors(
    project: Callable[[Tensor], Tensor], z: Tensor, slope: Tensor, *gradients: Tensor
) -> tuple[float, ...]:
    """Relative distance of gradients from central differences, over the checked columns."""
    true = []
    for column in CHECKED:
        step = torch.zeros(POINTS, dtype=z.dtype).index_fill(0, torch.tensor(column), STEP)
        true.append(((project(z + step) - project(z - step)) * slope).sum(-1) / (2 * STEP))
    exact = torch.stack(true, -1)
    return tuple(float((one[:, list(CHECKED)] - exact).norm() / exact.norm()) for one in gradients)
