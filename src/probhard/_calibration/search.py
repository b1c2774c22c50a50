"""Searches for the few positive numbers of a calibration, on a logarithmic scale and within limits.

    one factor:     argmin over c of loss(c),                 bounded search by Brent's method
    all numbers:    argmin over x of loss(exp(x)),            from the best common factor: L-BFGS-B with gradients,
                                                              or Nelder-Mead where a gradient is not finite

All are deterministic. The best point that was tried is returned, so that a loss with kinks (scores of draws) cannot
make the result worse than the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from probhard import score
from probhard.errors import ParameterError

LIMITS = (0.1, 10.0)  # range of one factor on draws
WIDE = (1 / 30, 30.0)  # range of the numbers of a law
PRECISE = {"maxiter": 100, "ftol": 1e-10, "gtol": 1e-8}  # of L-BFGS-B
ROBUST = {"xatol": 1e-3, "fatol": 1e-6, "maxfev": 200}  # of Nelder-Mead, on the logarithmic scale


def best_factor(loss: Callable[[float], float], limits: tuple[float, float] = LIMITS) -> float:
    """The factor within limits that minimises a loss.

    Args:
        loss: Maps a factor to a number; one minimum is expected.
        limits: Smallest and largest factor.

    Returns:
        The factor.
    """
    bounds = [math.log(limit) for limit in limits]
    found = scipy.optimize.minimize_scalar(lambda x: loss(math.exp(x)), bounds=bounds, method="bounded")
    return math.exp(float(found.x))


def best_numbers(
    loss: Callable[[Tensor], Tensor], leading: int, relative: int = 0, limits: tuple[float, float] = WIDE
) -> Tensor:
    """The numbers within limits that minimise a differentiable loss.

    Args:
        loss: Maps positive numbers (leading + relative,) in float64 to a scalar.
        leading: How many numbers come first that a common factor multiplies.
        relative: How many follow that it does not.
        limits: Smallest and largest number.

    Returns:
        The numbers, (leading + relative,).

    Raises:
        ParameterError: The loss is not finite where all numbers are 1.
    """
    tried: list[tuple[float, np.ndarray]] = []
    direction = np.repeat([1.0, 0.0], [leading, relative])

    def value_and_gradient(logs: np.ndarray) -> tuple[float, np.ndarray]:
        x = torch.from_numpy(np.array(logs, dtype=np.float64)).requires_grad_()
        value = loss(x.exp())
        tried.append((float(value.detach()), x.detach().numpy()))
        gradient = torch.autograd.grad(value, x)[0] if value.requires_grad else torch.full_like(x, torch.nan)
        if not bool(torch.isfinite(gradient).all()):  # units that failed have a score of NaN, which is left out
            raise FloatingPointError
        return tried[-1][0], gradient.numpy()

    @torch.no_grad()
    def value_at(logs: np.ndarray) -> float:
        tried.append((float(loss(torch.from_numpy(np.array(logs, dtype=np.float64)).exp())), logs.copy()))
        return tried[-1][0]

    if not math.isfinite(value_at(0 * direction)):
        raise ParameterError(
            "The score of the validation data is not finite.",
            "Targets or forecasts are NaN or infinite, or projections fail.",
            "Mask missing targets, and check the forecasts of the validation data.",
        )
    best_factor(lambda factor: value_at(math.log(factor) * direction), limits)
    if leading + relative > 1:
        options: dict[str, Any] = {"bounds": [tuple(map(math.log, limits))] * len(direction)}
        try:
            scipy.optimize.minimize(
                value_and_gradient, _best(tried), jac=True, method="L-BFGS-B", options=PRECISE, **options
            )
        except FloatingPointError:
            scipy.optimize.minimize(value_at, _best(tried), method="Nelder-Mead", options=ROBUST, **options)
    return torch.from_numpy(_best(tried)).exp()


def _best(tried: list[tuple[float, np.ndarray]]) -> np.ndarray:
    return min(tried, key=lambda pair: pair[0])[1]


def draws_factor(draws: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
    """The factor on the deviations of draws from their mean that minimises the sum of pooled CRPS over windows.

    The loss is convex in the factor, since quantiles are linear in it.

    Args:
        draws: Draws of each window, (S, *batch, n).
        targets: What came, (*batch, n) each; NaN where it is not known.

    Returns:
        The factor, within ``LIMITS``.
    """
    terms = []
    for samples, y in zip(draws, targets, strict=True):
        mean = samples.mean(0)
        terms.append((mean, score.sample_quantiles(samples, score.LEVELS) - mean, y.nan_to_num(), ~y.isnan()))

    def loss(factor: float) -> float:
        total = 0.0
        for mean, deviation, y, seen in terms:
            losses = score.quantile_loss(mean + factor * deviation, y, score.LEVELS, seen)
            total += float(losses.sum() / (y * seen).abs().sum())
        return total

    return best_factor(loss)
