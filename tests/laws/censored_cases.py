"""Families, bounds and points for tests of censored marginals, and a quadrature rule."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch

from probhard.laws.family import LAPLACE, LOGISTIC, NORMAL, UNIFORM
from probhard.laws.student_t import student_t

INF = math.inf
FAMILIES = [NORMAL, LAPLACE, LOGISTIC, UNIFORM, student_t(5.0), student_t(2.5)]
SCIPY = {
    "normal": lambda f: scipy.stats.norm,
    "laplace": lambda f: scipy.stats.laplace,
    "logistic": lambda f: scipy.stats.logistic,
    "uniform": lambda f: lambda loc, scale: scipy.stats.uniform(loc - scale, 2 * scale),
    "student-t": lambda f: lambda loc, scale: scipy.stats.t(f.df, loc, scale),
}
BOUNDS = [(-1.0, 1.0), (0.0, INF), (-INF, 0.5), (-INF, INF), (0.3, 0.9), (-2.0, -1.4), (0.2, 0.2)]
POINTS = [(0.1, 0.8), (-0.9, 1.3), (1.7, 0.6), (0.3, 1.0), (-0.2, 3.0)]  # loc, scale
TARGETS = [-2.5, 0.0, 0.25, 0.7, 3.0]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.name}{getattr(f, 'df', '')}")
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
NODES, WEIGHTS = np.polynomial.legendre.leggauss(24)


def integral(function, low: float, high: float, *breaks: float) -> float:
    """Composite Gauss-Legendre rule; infinite pieces in the logarithm of the distance to their finite end."""
    total, knots = 0.0, [low, *sorted(b for b in breaks if low < b < high), high]
    for a, b in itertools.pairwise(knots):
        infinite = math.isinf(a) or math.isinf(b)
        edges = np.linspace(-45, 90, 121) if infinite else np.linspace(a, b, 13)
        half = np.diff(edges)[:, None] / 2
        x, weight = (edges[:-1, None] + half + half * NODES).ravel(), (half * WEIGHTS).ravel()
        if infinite:
            x, weight = (a + np.exp(x) if math.isinf(b) else b - np.exp(x)), weight * np.exp(x)
        total += float(np.sum(weight * function(x)))
    return total


def grid() -> tuple[torch.Tensor, ...]:
    """loc, scale, lower, upper and y: every combination of the tables above."""
    rows = [(*point, *bounds, y) for point in POINTS for bounds in BOUNDS for y in TARGETS]
    return tuple(torch.tensor(column) for column in zip(*rows))


def mixed(n: int = 60) -> tuple[torch.Tensor, ...]:
    """loc, scale, y, lower, upper with loc and y on either side of the bounds, none at a kink."""
    loc, y, lower = 1.5 * torch.randn(3, n)
    return loc, 0.4 + torch.rand(n), y, lower, lower + 0.2 + 2 * torch.rand(n)


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.clone().requires_grad_() for t in tensors]
