"""One registry of constraints, covariances and metrics: a new one is tested everywhere by adding a line."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import probhard as ph

generator = torch.Generator().manual_seed(20)


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.1


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def binary_tree(depth: int) -> np.ndarray:
    return np.vstack([np.kron(np.eye(2**k), np.ones((1, 2 ** (depth - k)))) for k in range(depth + 1)])


def crossed(depth: int, purposes: int) -> np.ndarray:
    levels = [np.kron(np.eye(2**k), np.ones((1, 2 ** (depth - k)))) for k in range(depth + 1)]
    return np.vstack([np.kron(place, by) for by in (np.ones((1, purposes)), np.eye(purposes)) for place in levels])


OVERLAPPING = np.vstack(  # the paper's hierarchy figure
    [[[1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 0]], np.eye(6)]
)

CONSTRAINTS: dict[str, Callable[[], ph.LinearEquality]] = {
    "conservation": lambda: ph.Conservation.trapezoid(torch.linspace(0, 1, 7, dtype=torch.float64), 2.0),
    "slices": lambda: ph.per_slice(ph.Conservation(rand(5), rand(4)), (4, 5)),
    "disjoint": lambda: ph.LinearEquality([[2.0, 0, -1, 0, 0, 0], [0, 1, 0, 0.5, 1, 0]], [1.0, 2.0]),
    "tree": lambda: ph.Hierarchy(binary_tree(3)),
    "weighted tree": lambda: ph.LinearEquality([[2.0, 1, -1, 0, 0, 0], [0, 0, 3, 0.5, 1, 0]], [1.0, 2.0]),
    "chain": lambda: ph.LinearEquality(torch.eye(9)[1:] - torch.eye(9)[:-1], rand(8)),
    "fixed nodes": lambda: ph.Hierarchy(binary_tree(3)).fix([1, 9], [5.0, 1.0]),
    "hierarchy per step": lambda: ph.per_slice(ph.Hierarchy(binary_tree(2)), (3, 7)),
    "overlapping": lambda: ph.Hierarchy(OVERLAPPING),
    "crossed small": lambda: ph.Hierarchy(crossed(1, 3)),
    "crossed sparse": lambda: ph.Hierarchy(crossed(4, 3)),
    "dense": lambda: ph.LinearEquality(randn(3, 8), randn(3)),
    "complement": lambda: ph.LinearEquality(randn(6, 8), randn(6)),
    "pins": lambda: ph.LinearEquality(2 * torch.eye(5)[:3], randn(3)),
    "pins and mass": lambda: ph.Conservation(rand(6), 2.0) & ph.LinearEquality(torch.eye(6)[[0, 5]], [0.3, 0.1]),
    "per batch element": lambda: ph.LinearEquality(randn(2, 3, 3, 8), randn(2, 3, 3)),
}

ALGORITHMS = {
    "conservation": "disjoint",
    "slices": "disjoint",
    "disjoint": "disjoint",
    "tree": "tree",
    "weighted tree": "tree",
    "chain": "tree",
    "fixed nodes": "pinned variables substituted; tree",
    "hierarchy per step": "tree",
    "crossed small": "dense Cholesky of 6 x 6",
    "crossed sparse": "sparse",
    "dense": "dense Cholesky of 3 x 3",
    "complement": "complement",
    "pins": "3 pinned variables substituted",
    "pins and mass": "2 pinned variables substituted; disjoint",
    "per batch element": "dense",
}


def triangle(*shape: int) -> Tensor:
    return randn(*shape, shape[-1]).tril(-1) / shape[-1] + torch.diag_embed(rand(*shape))


def pattern(n: int) -> ph.HierarchyPattern:
    """A hierarchy over any n >= 3 nodes: a total of all bottoms and, of five or more nodes, two halves."""
    bottoms = n - 1 if n < 5 else n - 3
    first = np.arange(bottoms) < bottoms // 2
    halves = np.stack([first, ~first]) if n >= 5 else np.zeros((0, bottoms))
    return ph.HierarchyPattern(np.vstack([np.ones((1, bottoms)), halves, np.eye(bottoms)]))


def spectral(boundary: str) -> Callable[..., ph.Covariance]:
    return lambda power, scale, own: ph.Spectral((power.shape[-1],), power, scale, own, boundary)


def along_hierarchy(loadings: Tensor, own: Tensor) -> ph.Covariance:
    return ph.HierarchyFactors(pattern(own.shape[-1]), loadings, own)


COVARIANCES: dict[str, tuple[Callable[..., ph.Covariance], Callable[..., tuple[Tensor, ...]]]] = {
    # how it is built, and what from
    "diagonal": (ph.Diagonal, lambda *shape: (rand(*shape),)),
    "from stddev": (ph.Diagonal.from_stddev, lambda *shape: (rand(*shape),)),
    "low rank": (ph.LowRank, lambda *shape: (randn(*shape, 2), rand(*shape))),
    "dense": (lambda root: ph.Dense(root.tril()), lambda *shape: (triangle(*shape),)),
    "spectral": (spectral("reflecting"), lambda *shape: (rand(shape[-1]), randn(*shape), rand(*shape))),
    "along a hierarchy": (along_hierarchy, lambda *shape: (randn(*shape[:-1], pattern(shape[-1]).loads), rand(*shape))),
}


def covariance(name: str, *shape: int) -> ph.Covariance:
    build, parts = COVARIANCES[name]
    return build(*parts(*shape))


METRICS: dict[str, Callable[[int], str | ph.Metric]] = {
    "oblique": lambda n: "oblique",
    "orthogonal": lambda n: "orthogonal",
    "variances": lambda n: "variances",
    "diagonal": lambda n: ph.DiagonalMetric(rand(n)),
    "learned diagonal": lambda n: ph.DiagonalMetric(rand(n), learn=True),
    "low rank": lambda n: ph.LowRankMetric(randn(n, 2), rand(n)),
    "dense": lambda n: ph.DenseMetric(triangle(n)),
}


def dense_projection(constraint: ph.LinearEquality, weight: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's closed form with dense matrices: projected points and the projector."""
    rows = constraint.A
    gain = weight @ rows.mT @ torch.linalg.inv(rows @ weight @ rows.mT)
    projector = torch.eye(rows.shape[-1]) - gain @ rows
    offset = (gain @ constraint.b.to(z.dtype).unsqueeze(-1)).squeeze(-1)
    return (projector @ z.unsqueeze(-1)).squeeze(-1) + offset, projector
