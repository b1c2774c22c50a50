"""Units of the conformal table, and simple models of them.

| case           | unit                                  | mean before the projection        | constraint     |
|----------------|---------------------------------------|-----------------------------------|----------------|
| a PDE problem  | the exact field of a random parameter | linear in the parameter           | mass of slices |
| simulated tree | 31 nodes with shared noise            | regression of each node alone     | sums, u >= 0   |
| a data set     | all nodes one step after an origin    | last value, seasonal naive, drift | sums, u >= 0   |

All covariances are shrunk residual correlations (low rank plus diagonal) between residual standard deviations. Masses
are those of the exact fields on the grid, so that targets obey the constraint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from probhard import BlockMeans, Conservation, ConstrainedModel, Hierarchy, LocationScale, NonNegative, per_slice
from probhard._score.functionals import Functionals
from probhard.forecasting.data.datasets import load
from probhard.laws.correlation import shrunk_correlation
from probhard.laws.covariance import Covariance
from probhard.model import Batch
from probhard.pde.problems import PROBLEMS
from probhard.score import Levels

FIELDS = ("heat", "pme", "stefan", "advection")
DATASETS = ("labour", "tourism", "tourism_large", "traffic", "wiki")
TREE = "simulated tree"
POINTS, SLICES = 64, 16  # of fields
SIZES = (1, 2, 4, 8, 16)  # of blocks
TRAINING = 100  # units that fit the means, and as many more that fit the covariance
DEPTH = 4  # of the simulated tree
FLOOR = 0.05  # smallest standard deviation, relative to the mean one
RANK = 16


@dataclass(frozen=True)
class Case:
    """A model and units that it has not seen; those of a data set are in the order of time."""

    name: str
    model: ConstrainedModel
    units: Batch  # targets (count, n)
    family: Functionals
    summation: np.ndarray | None = None  # of hierarchies


class Around(nn.Module):
    """A law with one covariance around its inputs, the base forecasts.

    Args:
        cov: The covariance.
    """

    def __init__(self, cov: Covariance) -> None:
        super().__init__()
        self.cov = cov

    def forward(self, mean: Tensor) -> LocationScale:
        """The law around means (*batch, n)."""
        return LocationScale(mean, self.cov)


def covariance(residuals: Tensor) -> Covariance:
    """The shrunk covariance of residuals (T, n)."""
    deviation = residuals.square().mean(0).sqrt()
    deviation = deviation.clamp(min=FLOOR * float(deviation.mean()))
    return shrunk_correlation(residuals / deviation, rank=RANK).scaled(deviation)


def field_case(name: str, count: int, seed: int = 0) -> Case:
    """Fields of a PDE problem.

    Args:
        name: One of ``FIELDS``.
        count: Number of units.
        seed: Of the parameters.
    """
    problem = PROBLEMS[name](points=POINTS, slices=SLICES, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand(2 * TRAINING + count, dtype=torch.float64, generator=generator)
    fields = problem.solution(problem.lower + (problem.upper - problem.lower) * unit)  # (count, nt, nx)
    features = torch.stack([unit**power for power in range(2)], -1)
    flat, fit = fields.flatten(1), slice(0, TRAINING)
    means = features @ torch.linalg.lstsq(features[fit], flat[fit]).solution
    cov = covariance((flat - means)[TRAINING : 2 * TRAINING])

    def constraint(mass: Tensor) -> Conservation:
        return per_slice(Conservation(problem.weights, mass), problem.shape)

    masses = fields @ problem.weights  # of the grid, which differ from the exact ones
    new = slice(2 * TRAINING, None)
    units = Batch(means[new], flat[new], None, masses[new])
    return Case(name, ConstrainedModel(Around(cov), constraint), units, BlockMeans(problem.shape, SIZES))


def tree_case(count: int, seed: int = 0) -> Case:
    """Units of a binary tree: means depend on inputs, and noise is shared along branches.

    Args:
        count: Number of units.
        seed: Of inputs and noise.
    """
    random = np.random.default_rng(seed)
    bottoms, total = 2**DEPTH, 2 * TRAINING + count
    S = np.vstack([np.kron(np.eye(2**k), np.ones((1, bottoms >> k))) for k in range(DEPTH + 1)])
    inputs = random.normal(size=(total, 3))
    level = 5 + inputs @ random.normal(size=(3, bottoms))
    noise = random.standard_t(4, size=(total, len(S))) @ np.vstack([row / math.sqrt(row.sum()) for row in S])
    y = torch.from_numpy(np.maximum(level + noise, 0) @ S.T)
    features = torch.from_numpy(np.hstack([np.ones((total, 1)), inputs]))
    means = torch.empty_like(y)
    for node in range(len(S)):  # each node has seen other units, so that base forecasts do not add up
        seen = torch.from_numpy(random.choice(TRAINING, TRAINING // 2, replace=False))
        means[:, node] = features @ torch.linalg.lstsq(features[seen], y[seen, node : node + 1]).solution.squeeze(-1)
    cov = covariance((y - means)[TRAINING : 2 * TRAINING])
    hierarchy = Hierarchy(S)
    model = ConstrainedModel(Around(cov), hierarchy & NonNegative())
    new = slice(2 * TRAINING, None)
    return Case(TREE, model, Batch(means[new], y[new]), Levels(hierarchy), S)


def origin_case(name: str) -> Case:
    """One-step forecasts of a data set from rolling origins; the first half of the rows fits the covariance.

    Args:
        name: One of ``DATASETS``.
    """
    data = load(name)
    values, season = data.values, data.season
    now, before = values[season:], values[season - 1 : -1]
    seasonal = values[:-season]
    half = (len(values) - season) // 2
    drift = before + (now - before)[:half].mean(0)
    candidates: Mapping[str, np.ndarray] = {"last value": before, "seasonal naive": seasonal, "drift": drift}
    errors = np.stack([np.abs(now - forecast)[:half].mean(0) for forecast in candidates.values()])  # (3, n)
    means = np.choose(errors.argmin(0), list(candidates.values()))
    cov = covariance(torch.from_numpy((now - means)[:half]))
    model = ConstrainedModel(Around(cov), data.hierarchy & NonNegative())
    units = Batch(torch.from_numpy(means[half:]), torch.from_numpy(now[half:]))
    return Case(name, model, units, Levels(data.hierarchy), data.hierarchy.summation.toarray())
