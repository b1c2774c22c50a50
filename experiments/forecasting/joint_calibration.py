"""Calibration of forecasts on past windows: a number per group of levels, and the dependence of nodes and of steps.

    c, v = argmin over windows of  sum_groups  CRPS of single steps / sum |y|,          then  (c, v)^(K / (K + 2)),
    rho  = argmin over windows of  sum_groups  CRPS of sums over the horizon / sum |y|,

for K windows that ended before the origin. The numbers c multiply deviations before the projection, v what nodes share;
the metric stays that of the uncalibrated law, so that means do not move and draws stay coherent. Few windows say
little: the numbers are drawn to 1 as if two more windows had asked for 1. The CRPS is that of the normal law with the
moments of the draws. This is ``probhard.calibrate`` for stored forecasts: the variance is quadratic in the weights of
parts, whose moments are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.forecasting.joint_laws import part_weights, step_correlation
from probhard import Diagonal, LocationScale, crps
from probhard._calibration.search import LIMITS, best_numbers

PRIOR = 2  # windows that ask for 1
RHOS = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
TINY = 1e-12


@dataclass(frozen=True, eq=False)
class PastWindow:
    """What calibration needs of a window that is over.

    Args:
        start, end: Rows known at its origin and after it.
        error: Observed minus projected mean, (H, n).
        moments: Products of two parts of deviations at two steps, (parts, parts, H, H, n).
        size: ``|y|``, (H, n).
        masks: Groups, (3, n) bool.
    """

    start: int
    end: int
    error: Tensor
    moments: Tensor
    size: Tensor
    masks: Tensor

    @classmethod
    def of(cls, start: int, mean: Tensor, parts: Tensor, y: Tensor, masks: Tensor) -> PastWindow:
        """Summarise a window from parts (parts, S, H, n) of its draws and from the observed values (H, n)."""
        moments = torch.einsum("ashn,bskn->abhkn", parts, parts) / parts.shape[1]
        return cls(start, start + len(y), y - mean, moments, y.abs(), masks)

    def covariance(self, numbers: Tensor) -> Tensor:
        """Products of deviations at two steps with these numbers, (H, H, n)."""
        weights = part_weights(numbers)
        return torch.einsum("a,b,abhkn->hkn", weights, weights, self.moments)


def group_numbers(windows: Sequence[PastWindow], shared: bool) -> Tensor:
    """Fit the numbers c and, if nodes share a part, v: (3,) or (4,); ones without windows, which have one shape."""
    if not windows:
        return torch.ones(3 + shared, dtype=torch.float64)
    error = torch.stack([window.error for window in windows])  # (K, H, n)
    moments = torch.stack([window.moments.diagonal(dim1=2, dim2=3) for window in windows]).movedim(-1, -2)
    relative = _weights(windows)

    def loss(numbers: Tensor) -> Tensor:
        weights = part_weights(numbers)
        variance = torch.einsum("a,b,wabhn->whn", weights, weights, moments)
        return (_normal_crps(error, variance) * relative).sum()

    return best_numbers(loss, 3, int(shared), LIMITS, ridge=0.0) ** (len(windows) / (len(windows) + PRIOR))


def step_number(windows: Sequence[PastWindow], numbers: Tensor) -> float:
    """Fit rho; 0 without windows. The moments are those of draws whose steps share their noise (rho = 1)."""
    if not windows:
        return 0.0
    error = torch.stack([window.error.sum(0) for window in windows])  # (K, n)
    covariance = torch.stack([window.covariance(numbers) for window in windows])  # (K, H, H, n)
    relative = _weights(windows)

    def loss(rho: float) -> float:
        variance = torch.einsum("hk,whkn->wn", step_correlation(covariance.shape[1], rho), covariance)
        return float((_normal_crps(error, variance) * relative).sum())

    return min(RHOS, key=loss)


def _weights(windows: Sequence[PastWindow]) -> Tensor:
    """One over the summed ``|y|`` of the group of every node, (n,)."""
    masks = windows[0].masks.double()
    return (1 / (masks @ sum(window.size.sum(0) for window in windows))) @ masks


def _normal_crps(error: Tensor, variance: Tensor) -> Tensor:
    """The CRPS of centred normal laws at an error, elementwise."""
    return crps(LocationScale(torch.zeros_like(error), Diagonal(variance.clamp(min=TINY))), error)
