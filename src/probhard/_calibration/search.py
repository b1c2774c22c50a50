"""Searches for the few positive numbers of a calibration, on a logarithmic scale and within limits.

    one factor:     argmin over c of loss(c),                 bounded search by Brent's method
    all numbers:    argmin over x of loss(exp(x)),            from the best common factor: L-BFGS-B with gradients,
                                                              or Nelder-Mead where a gradient is not finite

All are deterministic. The best point that was tried is returned, so that a loss with kinks (scores of draws) cannot
make the result worse than the start. A small ridge on x keeps numbers that the data do not determine near the common
factor.
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
RIDGE = 1e-4  # weight of squared distances from the common factor, relative to the loss
WAVES = 1e-2  # the same for numbers of octaves: a few dozen fields say little about their longest waves
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
    loss: Callable[[Tensor], Tensor],
    leading: int,
    relative: int = 0,
    limits: tuple[float, float] = WIDE,
    ridge: float = RIDGE,
) -> Tensor:
    """The numbers within limits that minimise a differentiable loss.

    Args:
        loss: Maps positive numbers (leading + relative,) in float64 to a scalar.
        leading: How many numbers come first that a common factor multiplies.
        relative: How many follow that it does not.
        limits: Smallest and largest number.
        ridge: Weight of squared distances from the common factor, relative to the loss.

    Returns:
        The numbers, (leading + relative,).

    Raises:
        ParameterError: The loss is not finite where all numbers are 1.
    """
    direction = np.repeat([1.0, 0.0], [leading, relative])
    common = _Trials(loss)
    if not math.isfinite(common.value(0 * direction)):
        raise ParameterError(
            "The score of the validation data is not finite.",
            "Targets or forecasts are NaN or infinite, or projections fail.",
            "Mask missing targets, and check the forecasts of the validation data.",
        )
    best_factor(lambda factor: common.value(math.log(factor) * direction), limits)
    start, least = common.best
    if len(start) > 1:
        origin = torch.from_numpy(start)
        trials = _Trials(lambda x: loss(x) + ridge * abs(least) * (x.log() - origin).square().sum())
        options: dict[str, Any] = {"bounds": [tuple(map(math.log, limits))] * len(start)}
        try:
            scipy.optimize.minimize(
                trials.value_and_gradient, start, jac=True, method="L-BFGS-B", options=PRECISE, **options
            )
        except FloatingPointError:
            scipy.optimize.minimize(trials.value, trials.best[0], method="Nelder-Mead", options=ROBUST, **options)
        start = trials.best[0]
    return torch.from_numpy(start).exp()


class _Trials:
    """A loss of positive numbers as a function of their logarithms, and the best point that was tried."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        self.loss = loss
        self.tried: list[tuple[float, np.ndarray]] = []

    @property
    def best(self) -> tuple[np.ndarray, float]:
        """Logarithms and loss."""
        value, logs = min(self.tried, key=lambda pair: pair[0])
        return logs, value

    @torch.no_grad()
    def value(self, logs: np.ndarray) -> float:
        """The loss."""
        self.tried.append((float(self.loss(torch.from_numpy(np.array(logs)).exp())), np.array(logs)))
        return self.tried[-1][0]

    def value_and_gradient(self, logs: np.ndarray) -> tuple[float, np.ndarray]:
        """The loss and its gradient.

        Raises:
            FloatingPointError: The gradient is not finite, as where units failed; their score is left out.
        """
        x = torch.from_numpy(np.array(logs)).requires_grad_()
        value = self.loss(x.exp())
        self.tried.append((float(value.detach()), np.array(logs)))
        (gradient,) = torch.autograd.grad(value, x)
        if not (math.isfinite(self.tried[-1][0]) and bool(torch.isfinite(gradient).all())):
            raise FloatingPointError
        return self.tried[-1][0], gradient.numpy()


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
