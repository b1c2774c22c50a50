"""Correlated laws: what they cost next to independent ones, and next to a transform.

A tree of 101,111 nodes with a low-rank law of 16 columns: moments, CRPS and gradients, next to the diagonal law. A
field of 256 x 256 points with a spectral law and its mass: mean and variances, next to the fast Fourier transforms that
the products need. Points within bounds, next to a dense weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import probhard as ph
from benchmarks.hierarchies import tree
from benchmarks.timing import Comparison, Overhead, measured, worst

FAN_OUT, RANK = (10, 10, 10, 10, 9), 16
SIDE, PAIRS = 256, 3  # points per axis, and pairs of transforms per column
SMALL = 24  # side of a field whose dense covariance can be factored


def run(quick: bool = False) -> Iterator[Comparison | Overhead]:
    """Compare in float64."""
    torch.manual_seed(0)
    yield _tree((3, 3, 3) if quick else FAN_OUT)
    yield _field(16 if quick else SIDE)
    yield _bounded(6 if quick else SMALL)


def _tree(fan_out: tuple[int, ...]) -> Overhead:
    hierarchy = tree(fan_out)
    n = hierarchy.variables
    loc, own = torch.randn(n, dtype=torch.float64), torch.rand(n, dtype=torch.float64) + 0.1
    factor, y = torch.randn(n, RANK, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (loc, own, factor)]

    def step(cov: ph.Covariance) -> None:
        for leaf in leaves:
            leaf.grad = None
        ph.crps(ph.DPPL()(ph.LocationScale(loc, cov), hierarchy), y).sum().backward()

    diagonal, joint = measured(lambda: step(ph.Diagonal(own)), lambda: step(ph.LowRank(factor, own)))
    return Overhead(f"oblique step of a tree of {n:,} nodes, rank {RANK}", diagonal.seconds, joint.seconds, 20)


def _spectral(side: int) -> ph.Spectral:
    k = torch.fft.fftfreq(side, 1 / side, dtype=torch.float64)
    power = (1 + k.square().unsqueeze(1) + k.square()).pow(-1.5).flatten()
    stddev = 0.5 + torch.rand(side * side, dtype=torch.float64)
    return ph.Spectral.normalised((side, side), power, stddev, 0.95)


def _field(side: int) -> Overhead:
    law = ph.LocationScale(torch.randn(side * side, dtype=torch.float64), _spectral(side))
    mass = ph.Conservation(torch.full((side * side,), 1 / side**2, dtype=torch.float64), 1.0)

    def transforms() -> None:
        x = law.loc.unflatten(-1, (side, side))
        for _ in range(PAIRS):
            x = torch.fft.ifft2(torch.fft.fft2(x)).real

    def ours() -> Tensor:
        projected = ph.DPPL()(law, mass)
        return projected.mean + projected.variance

    pairs, projected = measured(transforms, ours)
    case = f"mean and variances of a {side} x {side} spectral field with its mass, next to {PAIRS} pairs of FFTs"
    return Overhead(case, pairs.seconds, projected.seconds, 1)


def _bounded(side: int) -> Comparison:
    n = side * side
    cov = _spectral(side)
    mass = ph.Conservation(torch.full((n,), 1 / n, dtype=torch.float64), 0.5)
    constraint, loc = mass & ph.NonNegative(), 0.5 + torch.randn(4, n, dtype=torch.float64)
    dense = ph.Dense(torch.linalg.cholesky(cov.dense()))

    def projected(cov: ph.Covariance) -> Tensor:
        return ph.DPPL().project(loc, constraint, ph.LocationScale(loc, cov)).value

    peer, ours = measured(partial(projected, dense), partial(projected, cov))
    case = f"4 fields of {side} x {side}, spectral weight, mass and bounds"
    return Comparison.of(case, "active sets, dense weight", peer, ours, partial(worst, constraint))
