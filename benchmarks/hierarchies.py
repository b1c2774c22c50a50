"""Oblique projection of hierarchies with variances, forward and backward.

Tourism-L's 555 series on a (4, 36) batch of time steps against the dense per-element inverse, and how a tree of 42,840
nodes scales. The real summation matrix is read from PROBHARD_DATA; without it a hierarchy of the same shape is built.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

import probhard as ph
from benchmarks.timing import Comparison, interleaved

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


def run() -> Iterator[Comparison]:
    """Compare in float32, one thread."""
    torch.manual_seed(0)
    hierarchy = tourism_large()
    mean = (100 * torch.rand(4, 36, 555)).requires_grad_()
    stddev = (torch.rand(4, 36, 555) + 0.1).requires_grad_()
    target, rows = 100 * torch.rand(4, 36, 555), hierarchy.A.float()
    layers = {metric: ph.DPPL(metric) for metric in ("oblique", "orthogonal")}

    def dense() -> None:
        ph.crps(dense_inverse(mean, stddev, rows), target).sum().backward()

    def ours(metric: str) -> None:
        ph.crps(layers[metric]((mean, stddev), hierarchy), target).sum().backward()

    (dense_time,) = interleaved(dense, repeats=3, warm_up=1)
    peer_left = float(hierarchy.violation(dense_inverse(mean.detach(), stddev.detach(), rows)[0]).max())
    for metric in ("oblique", "orthogonal"):
        (our_time,) = interleaved(lambda metric=metric: ours(metric), repeats=20)
        left = float(hierarchy.violation(layers[metric]((mean, stddev), hierarchy).mean.detach()).max())
        yield Comparison(
            f"Tourism-L, 144 steps, {metric}", "dense inverse, oblique", dense_time, our_time, peer_left, left, ">= 20"
        )
    yield from scaling()


def scaling() -> Iterator[Comparison]:
    """A tree of 43,131 nodes against twice as many: the ratio is the cost of doubling n."""
    times, left = [], []
    for factor in (1, 2, 4):
        hierarchy = tree((*TREE[:-1], factor * TREE[-1]))
        stddev = torch.rand(hierarchy.variables) + 0.1
        mean = torch.rand(hierarchy.variables).requires_grad_()
        layer = ph.DPPL("oblique")

        dist = (mean, stddev)

        def work(layer: ph.DPPL = layer, hierarchy: ph.Hierarchy = hierarchy, dist: tuple = dist) -> None:
            projected = layer(dist, hierarchy)
            (projected.mean.sum() + projected.variance.sum()).backward()

        (seconds,) = interleaved(work, repeats=30)
        times.append((hierarchy.variables, seconds))
        left.append(float(hierarchy.violation(layer(dist, hierarchy).mean.detach()).max()))
    for (n, seconds), (twice, longer), before, after in zip(times, times[1:], left, left[1:]):
        yield Comparison(f"tree of {twice:,} nodes", f"tree of {n:,} nodes", longer, seconds, after, before, "<= 2.3")
