"""A Gaussian process as a backbone: the exact posterior at target places, given observations.

    k(x, x') = v exp(-1/2 sum_a (x_a - x'_a)^2 / l_a^2),      K = k(context, context) + s I,
    mean = k(targets, context) K^-1 y,   cov = k(targets, targets) - k(targets, context) K^-1 k(context, targets) + s I.

Lengths, variance and noise are parameters. A ``ConstrainedModel`` learns them over many functions by any score, or
``evidence`` gives the marginal likelihood of one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from probhard.errors import ParameterError
from probhard.laws.covariance import Dense
from probhard.laws.distribution import LocationScale
from probhard.pde.neural_process import Observations

JITTER = 1e-9  # relative to the variance: smooth kernels are singular to rounding


class GaussianProcess(nn.Module):
    """A backbone for ``Observations``; it ignores their truth and computes in float64.

    Args:
        dim: Dimension d of a place.
        lengths: Initial lengths, d numbers; None for ones.
        variance: Initial variance.
        noise: Initial variance of the noise.

    Raises:
        ParameterError: If a number is not positive, or there are not d lengths.
    """

    def __init__(
        self, dim: int = 2, lengths: tuple[float, ...] | None = None, variance: float = 1.0, noise: float = 1e-4
    ) -> None:
        super().__init__()
        lengths = (1.0,) * dim if lengths is None else tuple(lengths)
        if len(lengths) != dim or min(variance, noise, *lengths) <= 0:
            raise ParameterError(
                f"Got dim={dim}, lengths={lengths}, variance={variance} and noise={noise}.",
                "Every axis has a length, and all numbers are kept as logarithms.",
                "Pass one positive length per axis, and positive variances.",
            )
        self.log_lengths = nn.Parameter(torch.tensor(lengths, dtype=torch.float64).log())
        self.log_variance = nn.Parameter(torch.tensor(math.log(variance), dtype=torch.float64))
        self.log_noise = nn.Parameter(torch.tensor(math.log(noise), dtype=torch.float64))

    def forward(self, inputs: Any) -> LocationScale:
        """The joint law over the targets, batch (batch,), in the dtype of the observed values."""
        parts = Observations.of(inputs)
        targets = parts.targets.double()
        root, solved = self._solved(parts)
        cross = self.kernel(parts.places.double(), targets)  # (batch, c, n)
        mean = (cross.mT @ solved.unsqueeze(-1)).squeeze(-1)
        half = torch.linalg.solve_triangular(root, cross, upper=False)
        cov = self.kernel(targets, targets) - half.mT @ half
        tril = torch.linalg.cholesky(cov + self._noise() * torch.eye(cov.shape[-1], dtype=cov.dtype))
        kind = parts.values.dtype
        return LocationScale(mean.to(kind), Dense(tril.to(kind)), validate_args=False)

    def evidence(self, inputs: Any) -> Tensor:
        """The log marginal likelihood of the observations, (batch,)."""
        parts = Observations.of(inputs)
        root, solved = self._solved(parts)
        y = parts.values.double()
        logs = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -0.5 * (y * solved).sum(-1) - logs - 0.5 * y.shape[-1] * math.log(2 * math.pi)

    def kernel(self, first: Tensor, second: Tensor) -> Tensor:
        """Covariances between places (batch, n, d) and (batch, m, d), (batch, n, m)."""
        lengths = self.log_lengths.exp()
        gaps = (first / lengths).unsqueeze(-2) - (second / lengths).unsqueeze(-3)
        return self.log_variance.exp() * torch.exp(-0.5 * gaps.square().sum(-1))

    def _noise(self) -> Tensor:
        return self.log_noise.exp() + JITTER * self.log_variance.exp()

    def _solved(self, parts: Observations) -> tuple[Tensor, Tensor]:
        """The Cholesky factor of K, (batch, c, c), and K^-1 y, (batch, c)."""
        places = parts.places.double()
        own = self.kernel(places, places)
        root = torch.linalg.cholesky(own + self._noise() * torch.eye(own.shape[-1], dtype=own.dtype))
        return root, torch.cholesky_solve(parts.values.double().unsqueeze(-1), root).squeeze(-1)
