"""Families, covariances with their dense matrices, and oracles that the tests of the laws share."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch

from probhard import (
    DPPL,
    LAPLACE,
    LOGISTIC,
    NORMAL,
    UNIFORM,
    Dense,
    Diagonal,
    HierarchyFactors,
    HierarchyPattern,
    LinearEquality,
    LocationScale,
    LowRank,
    ProjectedCovariance,
    Spectral,
    student_t,
)

DOUBLE = torch.float64
N = 4
FAMILIES = {
    "normal": NORMAL,
    "laplace": LAPLACE,
    "logistic": LOGISTIC,
    "uniform": UNIFORM,
    "t": student_t(7.0),
    "independent t": student_t(7.0).independent(),
    "independent laplace": LAPLACE.independent(),
}
UNIT_VARIANCE = {
    "normal": 1.0,
    "laplace": 2.0,
    "logistic": math.pi**2 / 3,
    "uniform": 1 / 3,
    "t": 7 / 5,
    "independent t": 7 / 5,
    "independent laplace": 2.0,
}
SCIPY = {
    "normal": scipy.stats.norm,
    "laplace": scipy.stats.laplace,
    "logistic": scipy.stats.logistic,
    "uniform": lambda loc, scale: scipy.stats.uniform(loc - scale, 2 * scale),
    "t": lambda loc, scale: scipy.stats.t(7, loc, scale),
    "independent t": lambda loc, scale: scipy.stats.t(7, loc, scale),
    "independent laplace": scipy.stats.laplace,
}
KINDS = ["diagonal", "stddev", "low rank", "dense", "periodic", "reflecting", "zero", "hierarchy", "projected"]
each_kind = pytest.mark.parametrize("kind", KINDS)
each_family = pytest.mark.parametrize("name", FAMILIES)
each_batch = pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def covariance(kind: str, batch: tuple[int, ...] = (), n: int = N, seed: int = 0):
    """A covariance and the dense matrix it stands for, computed here."""
    positive = normal(*batch, n, seed=seed).abs() + 0.3
    if kind == "diagonal":
        return Diagonal(positive), torch.diag_embed(positive)
    if kind == "stddev":
        return Diagonal.from_stddev(positive), torch.diag_embed(positive**2)
    if kind == "low rank":
        factor = normal(*batch, n, 2, seed=seed + 1)
        return LowRank(factor, positive), factor @ factor.mT + torch.diag_embed(positive)
    if kind in ("periodic", "reflecting", "zero"):
        return spectral(kind, positive, normal(*batch, n, seed=seed + 4))
    if kind == "hierarchy":
        return along_hierarchy(positive, batch, seed)
    root = normal(*batch, n, n, seed=seed + 2).tril(-1) + torch.diag_embed(positive)
    if kind == "dense":
        return Dense(root), root @ root.mT
    rows = normal(2, n, seed=seed + 3)
    base = Dense(root)
    projected = DPPL("orthogonal")(LocationScale(normal(*batch, n), base), LinearEquality(rows)).cov
    assert isinstance(projected, ProjectedCovariance)
    P = torch.eye(n, dtype=DOUBLE) - torch.linalg.pinv(rows) @ rows
    return projected, P @ (root @ root.mT) @ P.mT


def spectral(boundary: str, own: torch.Tensor, scale: torch.Tensor):
    """A spectral covariance and its dense matrix, by the basis functions written out."""
    n = own.shape[-1]
    j, k = torch.arange(n, dtype=DOUBLE), torch.arange(n, dtype=DOUBLE).unsqueeze(1)
    power = 1 / (1 + torch.minimum(k, n - k).squeeze(1)) if boundary == "periodic" else 1 / (1 + k.squeeze(1))
    if boundary == "periodic":
        basis = (torch.cos(2 * math.pi * k * j / n) + torch.sin(2 * math.pi * k * j / n)) / math.sqrt(n)
    else:
        angle = math.pi * (k + (boundary == "zero")) * (2 * j + 1) / (2 * n)
        basis = torch.cos(angle) if boundary == "reflecting" else torch.sin(angle)
        basis = basis / torch.linalg.vector_norm(basis, dim=-1, keepdim=True)
    inner = basis.mT @ torch.diag(power) @ basis
    dense = scale.unsqueeze(-1) * inner * scale.unsqueeze(-2) + torch.diag_embed(own)
    return Spectral((n,), power, scale, own, boundary), dense


def along_hierarchy(own: torch.Tensor, batch: tuple[int, ...], seed: int):
    """A total over its bottoms: factors of the total alone, and their dense matrix."""
    n = own.shape[-1]
    summing = torch.cat([torch.ones(1, n - 1, dtype=DOUBLE), torch.eye(n - 1, dtype=DOUBLE)])
    loadings = normal(*batch, n - 1, seed=seed + 5)
    column = (summing @ loadings.unsqueeze(-1)).squeeze(-1)
    dense = column.unsqueeze(-1) * column.unsqueeze(-2) + torch.diag_embed(own)
    return HierarchyFactors(HierarchyPattern(summing), loadings, own), dense


def same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-11) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
