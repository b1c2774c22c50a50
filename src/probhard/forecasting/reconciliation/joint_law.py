"""Normal laws of forecast paths: n series over H steps, dependent across series and across steps.

    x_h = mean_h + s_h w_h,      cov(w_h, w_k) = rho^|h-k| C,      h = 1, ..., H,

with the means and deviations s_h of every series, the correlation ``C = diag(d) + F F^T`` of errors and one number rho.
Independent series have C = I. No n x n matrix is formed. What series do alone may be forgotten faster than what they do
together: with two numbers, ``cov(w_h, w_k) = rho_own^|h-k| diag(d) + rho^|h-k| F F^T``.

Without past windows, rho is read from the growth of the deviations. If the error of step h is a sum of h innovations,
``e_h = sum_{j<h} psi_j eps_{h-j}``, then ``psi_j^2 = s_{j+1}^2 - s_j^2`` (``psi_0 = s_1``) and
``cov(e_h, e_{h+1}) = sum_{j<h} psi_j psi_{j+1}``. Autocorrelated one-step errors raise it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from probhard.errors import ParameterError, ShapeError
from probhard.laws import Diagonal, LowRank, shrunk_correlation
from probhard.laws.base import Covariance
from probhard.laws.correlation import FEWEST
from probhard.laws.factored import Factored

SMALLEST = 1e-6  # least deviation of a series, relative to its mean
CERTAIN = 1e-3  # deviation that replaces 0, relative to the smallest positive one of the step
FACTOR_NUMBERS = 4_000_000  # most numbers in the factor F, to bound the memory: rank 80 for 5e4 series
LARGE, LARGE_RANK = 1_000, 128  # series above which the rank of F is bounded, for speed, and that bound
ERROR_NUMBERS = 40_000_000  # most errors that a correlation is estimated from, the latest
NOISE_NUMBERS = 4_000_000  # noise per chunk of draws
LARGEST_RHO = 0.99


@dataclass(frozen=True, eq=False)
class PathLaw:
    """A normal law of paths, not coherent. Deviations of constant series are raised a little above 0.

    Args:
        mean: (H, n).
        stddev: (H, n), >= 0.
        correlation: C, (n,); None for independent series.
        rho: Correlation of two successive steps, in [0, 1].
        own_rho: The same for the noise of each series alone; None if it is rho.

    Raises:
        ShapeError: If shapes differ.
        ParameterError: If numbers are not finite, a deviation is negative, or rho is not in [0, 1].
    """

    mean: Tensor
    stddev: Tensor
    correlation: Factored | None = None
    rho: float = 0.0
    own_rho: float | None = None

    def __post_init__(self) -> None:
        mean, stddev = (torch.as_tensor(x, dtype=torch.float64) for x in (self.mean, self.stddev))
        size = None if self.correlation is None else self.correlation.shape[-1]
        if mean.dim() != 2 or mean.shape != stddev.shape or size not in (None, mean.shape[-1]):
            raise ShapeError(
                f"The law has a mean {tuple(mean.shape)}, deviations {tuple(stddev.shape)}"
                f"{'' if size is None else f' and a correlation of {size} series'}.",
                "It describes H steps of n series.",
                "Pass (H, n) for both, and a correlation of n series.",
            )
        bad = ~(mean.isfinite() & stddev.isfinite() & (stddev >= 0))
        if bool(bad.any()) or not all(0 <= x <= 1 for x in (self.rho, self.own_rho or 0.0)):
            raise ParameterError(
                f"{int(bad.sum())} means or deviations are NaN, infinite or negative, rho is {self.rho} and own_rho "
                f"{self.own_rho}.",
                "They define a normal law.",
                "Fill in missing forecasts; rho is a correlation from 0 to 1.",
            )
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "stddev", floored(mean, stddev))

    @classmethod
    def of_errors(cls, mean: Tensor, stddev: Tensor, errors: Tensor | None) -> PathLaw:
        """Take the dependence of series from past errors, and that of steps from both.

        Args:
            mean: (H, n).
            stddev: (H, n).
            errors: One-step errors, (T, n), NaN where missing. None, or fewer than 3: independent series.
        """
        law = cls(mean, stddev)
        if errors is None or len(errors) < FEWEST:
            return replace(law, rho=implied_rho(law.stddev))
        errors = latest(torch.as_tensor(errors, dtype=torch.float64))
        return replace(law, correlation=error_correlation(errors), rho=implied_rho(law.stddev, errors))

    @property
    def covariance(self) -> Covariance:
        """The covariance of each step, (H, n)."""
        if self.correlation is None:
            return Diagonal.from_stddev(self.stddev)
        return self.correlation.scaled(self.stddev)

    def at(self, steps: Tensor | slice) -> PathLaw:
        """The law of some steps; rho stays that of successive steps of the whole path."""
        return replace(self, mean=self.mean[steps], stddev=self.stddev[steps])

    def deviations(self, samples: int, seed: int) -> Tensor:
        """Draw ``s_h w_h``, (S, H, n), in float64.

        Args:
            samples: Number of paths S.
            seed: Seed of the noise.
        """
        generator = torch.Generator().manual_seed(seed)
        (steps, nodes) = self.mean.shape
        drawn = path_noise((samples, steps, nodes), self.correlation, self.rho, generator, self.own_rho)
        return drawn.mul_(self.stddev)

    def draws(self, samples: int, seed: int) -> Tensor:
        """Draw paths, (S, H, n), in float64.

        Args:
            samples: Number of paths S.
            seed: Seed of the noise.
        """
        return self.mean + self.deviations(samples, seed)


def path_noise(
    shape: tuple[int, int, int],
    correlation: Factored | None,
    rho: float,
    generator: torch.Generator,
    own_rho: float | None = None,
) -> Tensor:
    """Draw standard normal noise w, correlated across series and steps.

    Args:
        shape: Paths, steps and series, (S, H, n).
        correlation: C, (n,), with unit diagonal; None for the identity.
        rho: Correlation of two successive steps.
        generator: Source of the noise.
        own_rho: The same for the noise of each series alone; None if it is rho.

    Returns:
        Noise, (S, H, n), in float64.
    """
    samples, steps, nodes = shape
    size = nodes if correlation is None else correlation.root_size
    shared, own = step_root(steps, rho), step_root(steps, rho if own_rho is None else own_rho)
    drawn = torch.empty(shape, dtype=torch.float64)
    for part in drawn.split(max(1, NOISE_NUMBERS // (steps * size))) if samples else ():
        noise = torch.randn(len(part), steps, size, generator=generator, dtype=torch.float64)
        noise = torch.cat([own @ noise[..., :nodes], shared @ noise[..., nodes:]], -1)
        part.copy_(noise if correlation is None else correlation.root(noise))
    return drawn


def error_correlation(errors: Tensor) -> LowRank:
    """The shrunk correlation of errors (T, n), NaN where missing, of a rank that bounds the memory."""
    nodes, errors = errors.shape[-1], latest(errors)
    rank = min(*errors.shape, FACTOR_NUMBERS // nodes)
    return shrunk_correlation(errors, max(1, min(rank, LARGE_RANK) if nodes > LARGE else rank))


def latest(errors: Tensor) -> Tensor:
    """The last rows of errors (T, n), as many as the memory allows."""
    return errors[-max(FEWEST, ERROR_NUMBERS // errors.shape[-1]) :]


def floored(mean: Tensor, stddev: Tensor) -> Tensor:
    """Raise deviations of series that hardly vary, so that every series can move in a metric of deviations.

    Args:
        mean: (..., n).
        stddev: (..., n), >= 0.

    Returns:
        Deviations (..., n) above 0.
    """
    varies = stddev > SMALLEST * mean.abs()
    least = torch.where(varies, stddev, torch.inf).amin(-1, keepdim=True)
    least = torch.where(least.isfinite(), least, 1.0)
    return torch.where(varies, stddev, torch.maximum(SMALLEST * mean.abs(), CERTAIN * least))


def implied_rho(stddev: Tensor, errors: Tensor | None = None) -> float:
    """Estimate the correlation of successive steps, averaged over steps and series.

    Args:
        stddev: Deviations of each step, (H, n), above 0.
        errors: One-step errors, (T, n), NaN where missing.

    Returns:
        The larger of what the growth of deviations and the autocorrelation of the errors imply, in [0, 0.99].
    """
    rho = 0.0
    if len(stddev) > 1:
        variance = stddev.square()
        innovations = torch.cat([variance[:1], variance.diff(dim=0).clamp(min=0)]).sqrt()  # psi, (H, n)
        shared = (innovations[:-1] * innovations[1:]).cumsum(0)
        rho = float((shared / (stddev[:-1] * stddev[1:])).clamp(max=1).mean())
    if errors is not None and len(errors) > FEWEST:
        centred = errors - errors.nanmean(0)
        size = centred.square().nanmean(0).sqrt()
        products = (centred[1:] * centred[:-1] / size.square()).flatten()
        products = products[products.isfinite()]
        rho = max(rho, float(products.mean()) if len(products) else 0.0)
    return float(np.clip(rho, 0.0, LARGEST_RHO))


def step_root(steps: int, rho: float) -> Tensor:
    """A root of the step correlation ``rho^|h-k|``, (H, H) lower triangular; with rho = 1 all steps are equal."""
    step = torch.arange(steps)
    lag = step[:, None] - step
    root = torch.where(lag >= 0, torch.as_tensor(rho, dtype=torch.float64) ** lag.clamp(min=0), 0.0)
    return root * torch.where(step == 0, 1.0, (1 - rho**2) ** 0.5)
