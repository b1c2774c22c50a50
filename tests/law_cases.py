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
    LinearEquality,
    LocationScale,
    LowRank,
    ProjectedCovariance,
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
KINDS = ["diagonal", "stddev", "low rank", "dense", "projected"]
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
    root = normal(*batch, n, n, seed=seed + 2).tril(-1) + torch.diag_embed(positive)
    if kind == "dense":
        return Dense(root), root @ root.mT
    rows = normal(2, n, seed=seed + 3)
    base = Dense(root)
    projected = DPPL("orthogonal")(LocationScale(normal(*batch, n), base), LinearEquality(rows)).cov
    assert isinstance(projected, ProjectedCovariance)
    P = torch.eye(n, dtype=DOUBLE) - torch.linalg.pinv(rows) @ rows
    return projected, P @ (root @ root.mT) @ P.mT


def same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-11) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
