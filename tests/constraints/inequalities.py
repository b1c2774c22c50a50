"""Points near, beside and far from the sets of the registry."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import probhard as ph
from sets import BATCH, SETS, Set

each_set = pytest.mark.parametrize("name", SETS)


def built(name: str) -> tuple[Set, ph.Constraint]:
    """The entry and its constraint."""
    return SETS[name], SETS[name].build()


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spread(entry: Set, seed: int = 5) -> Tensor:
    """Points (3, BATCH, n) near the set, beside it, and far outside."""
    sizes = 0.3, 2.0, entry.far
    return torch.stack([entry.loc + size * normal(seed + i, BATCH, entry.n) for i, size in enumerate(sizes)])


def distance(u: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """``|u - z|^2`` in the metric, (..., BATCH)."""
    if weight.dim() == 2:
        return ((u - z).square() / weight).sum(-1)
    return torch.einsum("...bi,bij,...bj->...b", u - z, torch.linalg.inv(weight), u - z)
