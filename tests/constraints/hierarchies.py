"""Hierarchies of all kinds and dense algebra as the oracle of their projections."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch

from probhard import (
    Dense,
    Diagonal,
    Hierarchy,
    LocationScale,
    LowRank,
)

DOUBLE = torch.float64


def summation(groups: list[list[int]], bottoms: int) -> np.ndarray:
    """S (n, m) from the bottom series of every aggregate."""
    upper = np.zeros((len(groups), bottoms))
    for row, group in enumerate(groups):
        upper[row, group] = 1.0
    return np.vstack([upper, np.eye(bottoms)])


def crossed(places: int, regions: int, purposes: int) -> np.ndarray:
    """Total, place, region, purpose, place x purpose and region x purpose (the bottom)."""
    keys = list(itertools.product(range(places), range(regions), range(purposes)))
    rules = [lambda k: 0, lambda k: k[0], lambda k: k[:2], lambda k: k[2], lambda k: (k[0], k[2])]
    groups = []
    for rule in rules:
        labels = [rule(key) for key in keys]
        groups += [[i for i, own in enumerate(labels) if own == label] for label in dict.fromkeys(labels)]
    return summation(groups, len(keys))


def comb(depth: int) -> np.ndarray:
    """Node k is bottom k plus node k + 1: as deep as it has aggregates."""
    return summation([list(range(k, depth + 1)) for k in range(depth)], depth + 1)


PAPER = np.array(  # paper, figure "hierarchical_ts": overlapping groups
    [[1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 0]], dtype=float
)
WEIGHTED = np.array([[0.5, 2.0, -1.0, 1.0], [0.25, 0.0, 3.0, 0.0], [0.0, 1.5, 0.0, 0.1]])
HIERARCHIES = {  # S and the algorithms that fit it
    "tree": (summation([range(6), [0, 1, 2], [3, 4, 5]], 6), ("tree",)),
    "three levels": (summation([range(8), [0, 1, 2, 3], [4, 5, 6, 7], [0, 1], [2, 3], [4, 5], [6, 7]], 8), ("tree",)),
    "shuffled rows": (summation([[0, 1], [4, 5, 6, 7], range(8), [2, 3], [0, 1, 2, 3]], 8), ("tree",)),
    "unequal depth": (summation([range(7), [1, 2, 3, 4], [2, 3, 4], [3, 4], [5, 6]], 7), ("tree",)),
    "single children": (summation([range(5), [0], [0], [1, 2, 3, 4], [1, 2, 3, 4], [2, 3]], 5), ("tree",)),
    "repeated total": (summation([range(4), range(4), range(4)], 4), ("tree",)),
    "forest": (summation([[0, 1, 2], [0, 1], [3, 4, 5], [4, 5]], 6), ("tree",)),
    "two levels": (summation([range(5)], 5), ("disjoint",)),
    "two levels of one": (summation([[0]], 1), ("disjoint",)),
    "uncovered bottoms": (summation([[1, 2, 3], [2, 3]], 6), ("tree",)),
    "comb": (comb(20), ("tree",)),
    "deep comb": (comb(140), ("sparse", "dense")),
    "grouped": (summation([range(6), [0, 1], [2, 3], [4, 5], [0, 2, 4], [1, 3, 5]], 6), ("sparse", "dense")),
    "crossed": (crossed(2, 2, 3), ("sparse", "dense")),
    "large crossed": (crossed(6, 4, 3), ("sparse",)),
    "paper": (np.vstack([PAPER, np.eye(6)]), ("sparse", "dense")),
    "weighted": (np.vstack([WEIGHTED, np.eye(4)]), ("sparse", "dense")),
    "weighted total": (np.vstack([[[0.2, 0.3, 0.5]], np.eye(3)]), ("disjoint",)),
}


@functools.cache
def hierarchy_of(name: str) -> Hierarchy:
    """One of the above, built once for all tests."""
    return Hierarchy(HIERARCHIES[name][0])


each_hierarchy = pytest.mark.parametrize("name", HIERARCHIES)


def rows_of(S: np.ndarray) -> np.ndarray:
    """[I | -S_sum]."""
    nodes, bottoms = S.shape
    return np.hstack([np.eye(nodes - bottoms), -S[: nodes - bottoms]])


def projector(A: np.ndarray, W: np.ndarray) -> np.ndarray:
    return np.eye(A.shape[1]) - W @ A.T @ np.linalg.solve(A @ W @ A.T, A)


def expected(A: np.ndarray, W: np.ndarray, mean: np.ndarray, cov: np.ndarray, b: np.ndarray | float = 0.0):
    """Mean and variances of the dense projection."""
    P = projector(A, W)
    shift = W @ A.T @ np.linalg.solve(A @ W @ A.T, np.broadcast_to(b, A.shape[:1]))
    return P @ mean + shift, np.diag(P @ cov @ P.T)


def close(actual: torch.Tensor, oracle: np.ndarray, tolerance: float = 1e-10) -> None:
    assert actual.dtype == DOUBLE
    assert tuple(actual.shape) == oracle.shape
    scale = max(1.0, float(np.abs(oracle).max()))
    np.testing.assert_allclose(actual.detach().numpy(), oracle, rtol=0, atol=tolerance * scale)


def law(n: int, seed: int, kind: str = "diagonal", batch: tuple[int, ...] = ()) -> LocationScale:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=DOUBLE, generator=g)

    diagonal = torch.rand(*batch, n, dtype=DOUBLE, generator=g) * 2 + 0.2
    if kind == "diagonal":
        cov = Diagonal(diagonal)
    elif kind == "low rank":
        cov = LowRank(normal(*batch, n, 2), diagonal)
    else:
        cov = Dense(normal(*batch, n, n).tril(-1) / n**0.5 + torch.diag_embed(diagonal))
    return LocationScale(3 * normal(*batch, n), cov)
