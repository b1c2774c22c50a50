"""Fronts of 100 points with two phases and a mass, against a mixed-integer solver with a binary variable per point.

    min |u - z|^2,   u falling,   mean(u) = mass,   least b <= u <= b,   b binary.

Among all feasible profiles both look for the nearest.
"""

from __future__ import annotations

from collections.abc import Iterator

import cvxpy as cp
import numpy as np
import torch
from torch import Tensor

import probhard as ph
from benchmarks.timing import Comparison, measured, worst

POINTS, LEAST = 100, 0.6


def fronts(count: int) -> tuple[Tensor, Tensor]:
    """Smeared and noisy fronts, (count, POINTS), and the masses of the sharp ones."""
    generator = torch.Generator().manual_seed(0)
    place = torch.linspace(0.3, 0.9, count, dtype=torch.float64)[:, None]
    x = torch.linspace(0, 1, POINTS, dtype=torch.float64)
    sharp = torch.where(x <= place, 1 - (1 - LEAST) * x / place, 0.0)
    noise = torch.randn(sharp.shape, generator=generator, dtype=torch.float64)
    smeared = (1 - (1 - LEAST) * x / place).clamp(min=LEAST) * torch.sigmoid((place - x) / 0.03)
    return smeared + 0.1 * noise, sharp.mean(-1)


def mixed_integer(z: Tensor, mass: Tensor) -> Tensor:
    """SCIP's answers, one after the other; its problem is built once."""
    u, b, goal, total = cp.Variable(POINTS), cp.Variable(POINTS, boolean=True), cp.Parameter(POINTS), cp.Parameter()
    said = [cp.diff(u) <= 0, cp.sum(u) / POINTS == total, u >= LEAST * b, u <= b]
    problem = cp.Problem(cp.Minimize(cp.sum_squares(u - goal)), said)
    profiles = []
    for point, one in zip(z.numpy(), mass.numpy()):
        goal.value, total.value = point, one
        problem.solve(solver=cp.SCIP, scip_params={"parallel/maxnthreads": 1})
        profiles.append(np.asarray(u.value))
    return torch.from_numpy(np.stack(profiles))


def run(quick: bool = False) -> Iterator[Comparison]:
    """Compare in float64, orthogonally."""
    z, mass = fronts(2 if quick else 8)
    weights = torch.full((POINTS,), 1 / POINTS, dtype=torch.float64)
    constraint = (
        ph.Semicontinuous(LEAST) & ph.Monotone("decreasing") & ph.Box(0.0, 1.0) & ph.Conservation(weights, mass)
    )
    layer = ph.DPPL("orthogonal")
    theirs, ours = measured(lambda: mixed_integer(z, mass), lambda: layer.project(z, constraint).value)
    case = f"monotone + mass + two phases, {len(z)} x {POINTS}"
    apart = float(((ours.value - z).square().sum(-1) / (theirs.value - z).square().sum(-1) - 1).abs().max())
    agreed = f"The squared distances of both agree within {apart:.0e}."
    yield Comparison.of(case, "SCIP", theirs, ours, lambda value: worst(constraint, value), explanation=agreed)
