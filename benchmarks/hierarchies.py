"""Oblique projection of hierarchies with variances, forward and backward.

Tourism-L's 555 series on a (4, 36) batch of time steps against the dense per-element inverse, and what doubling a tree
of 42,840 bottoms costs. The real summation matrix is read from PROBHARD_DATA; without it one of its shape is built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

import probhard as ph
from benchmarks.timing import Comparison, Overhead, measured, worst

TREE = (10, 7, 3, 204)  # children per node, level by level: 1 + 10 + 70 + 210 + 42,840 nodes


def tourism_large() -> ph.Hierarchy:
    """The real hierarchy, or one of its shape: places 1, 7, 27, 76 by four purposes."""
    folder = os.environ.get("PROBHARD_DATA")
    if folder:
        path = Path(folder) / "hierarchical" / "tourism_large" / "agg_mat.csv"
        return ph.Hierarchy(np.genfromtxt(path, delimiter=",", skip_header=1)[:, 1:])
    zone, state = np.arange(76) * 27 // 76, (np.arange(76) * 27 // 76) * 7 // 27
    places = [np.zeros(76, dtype=int), state, zone, np.arange(76)]
    blocks = []
    for purposes in (np.ones((1, 4)), np.eye(4)):
        for place in places:
            blocks.append(np.kron(np.eye(place.max() + 1)[place].T, purposes))
    return ph.Hierarchy(np.vstack(blocks))


def tree(fan_out: tuple[int, ...]) -> ph.Hierarchy:
    """A balanced tree."""
    bottoms = int(np.prod(fan_out))
    blocks = []
    for depth in range(len(fan_out) + 1):
        nodes = int(np.prod(fan_out[:depth]))
        blocks.append(sp.kron(sp.eye_array(nodes), np.ones((1, bottoms // nodes))))
    return ph.Hierarchy(sp.csr_array(sp.vstack(blocks)))


def dense_inverse(mean: Tensor, stddev: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Every batch element with its own inverse and its own n x n projector."""
    variance = stddev.square()
    inverse = torch.linalg.inv((rows * variance.unsqueeze(-2)) @ rows.mT)
    projector = torch.eye(rows.shape[-1]) - (variance.unsqueeze(-1) * rows.mT) @ inverse @ rows
    moved = (projector @ mean.unsqueeze(-1)).squeeze(-1)
    return moved, (projector.square() @ variance.unsqueeze(-1)).squeeze(-1).clamp(min=1e-12).sqrt()


def run(quick: bool = False) -> Iterator[Comparison | Overhead]:
    """Compare in float32."""
    torch.manual_seed(0)
    hierarchy = tourism_large()
    shape = (1, 4, 555) if quick else (4, 36, 555)
    mean = (100 * torch.rand(shape)).requires_grad_()
    stddev = (torch.rand(shape) + 0.1).requires_grad_()
    target, rows = 100 * torch.rand(shape), hierarchy.A.float()

    def dense() -> Tensor:
        law = dense_inverse(mean, stddev, rows)
        ph.crps(law, target).sum().backward()
        return law[0].detach()

    def ours(layer: ph.DPPL) -> Tensor:
        law = layer((mean, stddev), hierarchy)
        ph.crps(law, target).sum().backward()
        return law.mean.detach()

    metrics = ("oblique", "orthogonal")
    peer, *projected = measured(dense, *(partial(ours, ph.DPPL(metric)) for metric in metrics))
    for metric, one in zip(metrics, projected):
        case = f"Tourism-L with variances, {mean[..., 0].numel()} steps, {metric}"
        yield Comparison.of(case, "dense inverse, oblique", peer, one, partial(worst, hierarchy), goal=20)
    yield from doubling(TREE if not quick else (2, 3, 4))


def doubling(fan_out: tuple[int, ...]) -> Iterator[Overhead]:
    """A tree, twice and four times as many bottoms: the factor is the cost of doubling n."""

    def work(factor: int) -> Callable[[], None]:
        hierarchy = tree((*fan_out[:-1], factor * fan_out[-1]))
        dist = torch.rand(hierarchy.variables).requires_grad_(), torch.rand(hierarchy.variables) + 0.1
        layer = ph.DPPL("oblique")

        def projected() -> None:
            law = layer(dist, hierarchy)
            (law.mean.sum() + law.variance.sum()).backward()

        return projected

    factors = (1, 2, 4)
    runs = measured(*map(work, factors))
    for factor, small, large in zip(factors, runs, runs[1:]):
        bottoms = factor * int(np.prod(fan_out))
        yield Overhead(f"tree of {bottoms:,} bottoms, doubled", small.seconds, large.seconds, 2.3)
