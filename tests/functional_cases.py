"""Families of functionals and covariances that the tests of functionals share."""

from __future__ import annotations

import numpy as np
import torch

import probhard as ph
from registry import binary_tree, crossed

N, BATCH = 12, 3
GRID = ph.BlockMeans((3, 4), (2, (1, 2), "total"))
FAMILIES = {
    "block means": GRID,
    "levels": ph.Levels(binary_tree(2)),
    "crossed levels": ph.Levels(crossed(1, 2)),
    "horizons": ph.Horizons(4, 3),
    "directions": ph.Directions(torch.randn(4, N, generator=torch.Generator().manual_seed(3)), ["a", "b", "a", "b"]),
    "joined": GRID + ph.Horizons(3, 4) + ph.Directions(np.eye(N)),
}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(kind: str, n: int = N) -> ph.Covariance:
    spread = randn(BATCH, n, seed=1).exp()
    if kind == "diagonal":
        return ph.Diagonal(spread)
    if kind == "low rank":
        return ph.LowRank(randn(BATCH, n, 2, seed=2), spread)
    return ph.Dense(randn(BATCH, n, n, seed=2).tril(-1) / 3 + torch.diag_embed(spread))


def dense_rows(family: ph.Functionals) -> torch.Tensor:
    return torch.from_numpy(family.matrix.toarray())
