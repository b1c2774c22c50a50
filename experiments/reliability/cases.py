"""Cases from recipes: a feasible point, constraints around it, a law to project and a metric."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import probhard as ph
from experiments.reliability.curved_parts import CURVED
from experiments.reliability.parts import Maker, Part
from experiments.reliability.recipes import Recipe

DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True, eq=False)
class Case:
    """A law, a constraint and what is known of them.

    Args:
        recipe: What the case is made from.
        parts: The constraints; all of them hold.
        law: The law that is projected.
        metric: A name or a metric.
        feasible: A point of the set, (*batch, n).
    """

    recipe: Recipe
    parts: list[Part]
    law: ph.LocationScale
    metric: str | ph.Metric
    feasible: np.ndarray

    @property
    def constraint(self) -> ph.Constraint:
        """All parts."""
        joined = self.parts[0].constraint
        for part in self.parts[1:]:
            joined = joined & part.constraint
        return joined

    @property
    def convex(self) -> bool:
        """Whether cvxpy can describe the set."""
        return self.feasible.ndim == 1 and all(part.terms is not None for part in self.parts)

    def violation(self, u: np.ndarray) -> np.ndarray:
        """Largest relative violation of points (..., n) in float64."""
        return np.max([part.violation(u) for part in self.parts], axis=0)

    def __str__(self) -> str:
        recipe, names = self.recipe, " & ".join(part.name for part in self.parts)
        law = f"{recipe.covariance}, {recipe.metric}, {recipe.dtype}, 1e{recipe.size:.1f}, {recipe.decades:.1f} decades"
        return f"{names}, {tuple(self.law.loc.shape)}, {law}{', zeros' if recipe.certain else ''}"


def build(recipe: Recipe, loose: float = 0.0) -> Case:
    """Make the case of a recipe.

    Args:
        recipe: The recipe.
        loose: Relative violation of bounds that is tolerated; 0 for our own points.
    """
    random = np.random.default_rng(recipe.seed)
    scale = 10.0**recipe.size
    point, summing = _point(random, recipe, scale)
    rounding = 0.0 if recipe.dtype == "float64" else float(np.finfo(np.float32).eps)
    maker = Maker(random, point, scale, recipe.flat, rounding, summing, loose)
    parts = [CURVED[name](maker) if name in CURVED else getattr(maker, name)() for name in recipe.parts]
    law = _law(random, recipe, point, scale)
    return Case(recipe, parts, law, _metric(random, recipe, point.shape[-1]), point)


def _point(random: np.random.Generator, recipe: Recipe, scale: float) -> tuple[np.ndarray, np.ndarray | None]:
    """A point (*batch, n) of the kind of the recipe, and the summation matrix of one that adds up."""
    n, batch = recipe.n, recipe.batch
    if recipe.kind == "sums":
        bottoms = max(2, n - 2)
        groups = (random.uniform(size=(int(random.integers(0, 3)), bottoms)) < 0.5).astype(float)
        groups = np.unique(groups[(groups.sum(1) > 1) & (groups.sum(1) < bottoms)], axis=0).reshape(-1, bottoms)
        summing = np.vstack([np.ones((1, bottoms)), groups, np.eye(bottoms)])
        return scale * random.uniform(0, 2, (*batch, bottoms)) @ summing.T, summing
    if recipe.kind in ("matrix", "correlation"):
        return _matrices(random, 1 + n // 4, batch, recipe.kind == "correlation", scale), None
    if recipe.kind == "fading":
        slices = scale * random.normal(size=(*batch, 1, max(2, n // 3)))
        return (slices * np.array([[1.0], [0.7], [0.7]])).reshape(*batch, 3 * slices.shape[-1]), None
    point = scale * random.normal(size=(*batch, n if "standard_cone" not in recipe.parts else max(2, n)))
    if recipe.kind == "positive":
        point = np.abs(point) * (random.uniform(size=point.shape) < 0.8)
        if "standard_cone" in recipe.parts:
            rest = np.linalg.norm(point[..., 1:], axis=-1)
            point[..., 0] = rest * (1.0 if recipe.flat else 1.2)
    elif recipe.kind == "lots":
        point = np.where(random.uniform(size=point.shape) < 0.4, 0.0, scale + np.abs(point))
    elif recipe.kind == "rising":
        point = np.sort(point, -1)
    elif recipe.kind == "bent":
        point = np.cumsum(np.sort(point, -1), -1)
    return point, None


def _matrices(random: np.random.Generator, size: int, batch: tuple[int, ...], unit: bool, scale: float) -> np.ndarray:
    """Vectors of positive semidefinite matrices, some of low rank, with a diagonal of ones if ``unit``."""
    rank = int(random.integers(1, size + 1))
    root = random.normal(size=(*batch, size, rank))
    if unit:
        root = root / np.linalg.norm(root, axis=-1, keepdims=True)
    matrix = root @ np.swapaxes(root, -1, -2) * (1.0 if unit else scale)
    row, column = np.tril_indices(size)
    return matrix[..., row, column] * np.where(row == column, 1.0, 2**0.5)


def _law(random: np.random.Generator, recipe: Recipe, point: np.ndarray, scale: float) -> ph.LocationScale:
    """A law near or far from the point, with variances over some decades; some are 0 where the location is right."""
    away = recipe.distance * scale * random.normal(size=point.shape)
    variance = scale**2 * 10 ** random.uniform(-recipe.decades, recipe.decades, point.shape)
    if recipe.certain:
        variance = np.where(random.uniform(size=point.shape) < 0.2, 0.0, variance)
        away = np.where(variance == 0, 0.0, away)  # known values are right
    loc = torch.from_numpy(point + away)
    own, n, dtype = torch.from_numpy(variance), point.shape[-1], DTYPES[recipe.dtype]
    covariance: ph.Covariance = ph.Diagonal(own)
    if recipe.covariance == "low rank":
        factor = torch.from_numpy(random.normal(size=(*point.shape, 2))) * own.sqrt().unsqueeze(-1)
        covariance = ph.LowRank(factor, own)
    elif recipe.covariance == "dense" and not recipe.certain:
        root = torch.from_numpy(np.tril(random.normal(size=(*point.shape[:-1], n, n)) / n, -1) + np.eye(n))
        covariance = ph.Dense(own.sqrt().unsqueeze(-1) * root)
    return ph.LocationScale(loc.to(dtype), covariance.to(dtype))


def _metric(random: np.random.Generator, recipe: Recipe, n: int) -> str | ph.Metric:
    if recipe.metric in ("oblique", "orthogonal"):
        return recipe.metric
    values = torch.from_numpy(10 ** random.uniform(-recipe.decades, recipe.decades, n))
    if recipe.metric == "diagonal":
        return ph.DiagonalMetric(values)
    root = torch.from_numpy(np.tril(random.normal(size=(n, n)) / n, -1) + np.eye(n))
    return ph.DenseMetric(values.sqrt().unsqueeze(-1) * root)
