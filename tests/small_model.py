"""A small backbone under a hierarchy of seven series, its data, and its projection in dense algebra."""

from __future__ import annotations

import numpy as np
import scoringrules
import torch
from torch import nn

from probhard import (
    ConstrainedModel,
    Covariance,
    Hierarchy,
    LocationScale,
    Method,
)

DOUBLE = torch.float64
SUMS = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]], dtype=DOUBLE)
S = torch.cat([SUMS, torch.eye(4, dtype=DOUBLE)])
N, INPUTS, SIZE = 7, 3, 6
ROWS = torch.cat([torch.eye(3, dtype=DOUBLE), -SUMS], 1).numpy()


class Backbone(nn.Module):
    """Means and standard deviations of n variables from three inputs."""

    def __init__(self, n: int = N, width: int = 8, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = [nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, 2 * n)]
            self.layers = nn.Sequential(*layers).to(DOUBLE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, raw = self.layers(x).chunk(2, -1)
        return mean, nn.functional.softplus(raw) + 0.05


class Fixed(nn.Module):
    """A law with one covariance around its inputs."""

    def __init__(self, cov: Covariance) -> None:
        super().__init__()
        self.cov = cov

    def forward(self, x: torch.Tensor) -> LocationScale:
        return LocationScale(x, self.cov)


def data(size: int = SIZE, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, INPUTS, dtype=DOUBLE, generator=generator)
    bottom = torch.randn(size, 4, dtype=DOUBLE, generator=generator)
    return x, bottom @ S.T


def model(method: str | Method = "probhard-ob", **options) -> ConstrainedModel:
    return ConstrainedModel(Backbone(**options), Hierarchy(S), method)


def predicted(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The untouched means and standard deviations of the backbone."""
    with torch.no_grad():
        mean, stddev = Backbone()(x)
    return mean.numpy(), stddev.numpy()


def dense_projection(mean: np.ndarray, variance: np.ndarray, oblique: bool) -> tuple[np.ndarray, np.ndarray]:
    """Means and variances of the projected law, point by point."""
    means, variances = [], []
    for mu, spread in zip(mean, variance):
        W = np.diag(spread) if oblique else np.eye(N)
        P = np.eye(N) - W @ ROWS.T @ np.linalg.solve(ROWS @ W @ ROWS.T, ROWS)
        means.append(P @ mu)
        variances.append(np.diag(P @ np.diag(spread) @ P.T))
    return np.stack(means), np.stack(variances)


def normal_crps(y: torch.Tensor, mean: np.ndarray, stddev: np.ndarray) -> float:
    return float(scoringrules.crps_normal(y.numpy(), mean, stddev).sum())
