"""Scores of parametric forecasts, and the checks of forecasts, targets, levels and masks that all scores share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from probhard._score.skewed import skewed_crps
from probhard._util.tensors import checking
from probhard.errors import ParameterError, ShapeError, check_choice
from probhard.laws.distribution import Marginals, marginals


def crps(dist: Any, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Closed-form continuous ranked probability score, with finite gradients at any scale >= 0.

    Args:
        dist: A forecast over n variables; or torch's Gamma or Beta, for evaluation only.
        y: Targets, (*batch, n).
        mask: True where the target is observed, (*batch, n) bool.

    Returns:
        The score, (*batch, n).

    Raises:
        ParameterError: Also if an argument requires a gradient under a Gamma or Beta law.
    """
    base = dist.base_dist if isinstance(dist, td.Independent) else dist
    if isinstance(base, td.Gamma | td.Beta):
        check_target(base.batch_shape, y)
        return masked(skewed_crps(base, observed(y, mask, 0.5)), mask)
    laws = marginals_for(dist, y)
    return masked(laws.crps(observed(y, mask, laws.loc.detach())), mask)


def nll(dist: Any, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Negative log density of the marginals; 0 for ``degenerate`` coordinates.

    At a bound of a censored law it is the negative log of the point mass.

    Args:
        dist: A forecast over n variables.
        y: Targets, (*batch, n).
        mask: True where the target is observed, (*batch, n) bool.

    Returns:
        The score, (*batch, n).
    """
    check_mask(mask)
    return marginals_for(dist, y).nll(y, mask)


def degenerate(dist: Any) -> Tensor:
    """Whether coordinates of a forecast are point masses, (*batch, n) bool; they have no density, so ``nll`` is 0."""
    return marginals(dist).degenerate


def mse(dist: Any, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Squared error of the mean.

    Args:
        dist: A forecast over n variables.
        y: Targets, (*batch, n).
        mask: True where the target is observed, (*batch, n) bool.

    Returns:
        The score, (*batch, n).

    Raises:
        ParameterError: Also if ``dist`` is a tensor.
    """
    if isinstance(dist, Tensor):
        raise ParameterError(
            f"mse got a tensor of shape {tuple(dist.shape)}.",
            "It could hold means or draws.",
            "Pass a distribution or (mean, stddev); the error of a point forecast is (point - y).square().",
        )
    mean = dist.mean if hasattr(dist, "mean") else marginals_for(dist, y).mean
    check_target(mean.shape, y)
    return masked((observed(y, mask, mean.detach()) - mean).square(), mask)


def marginals_for(dist: Any, y: Tensor) -> Marginals:
    """The marginal laws of a forecast, checked against targets y (*batch, n)."""
    laws = marginals(dist)
    check_target(laws.batch_shape, y)
    return laws


def check_target(shape: Sequence[int], y: Tensor, forecast: str = "a forecast") -> None:
    """Raise unless the target has the forecast's event size and batch dimensions that broadcast."""
    pairs = zip(reversed(shape[:-1]), reversed(y.shape[:-1]))
    fits = all(a == b or 1 in (a, b) for a, b in pairs) and tuple(shape[-1:]) == tuple(y.shape[-1:])
    if not fits:
        raise ShapeError(
            f"Got {forecast} of shape {tuple(shape)} and a target of shape {tuple(y.shape)}.",
            "Both need n variables in the last dimension, and batch dimensions that broadcast.",
            "Move the variables to the last dimension of both, or unsqueeze the one that lacks it.",
        )


def check_samples(samples: Tensor, y: Tensor | None = None) -> None:
    """Raise unless there are at least two draws (S, *batch, n), of the shape of the target if one is passed."""
    if samples.dim() == 0 or samples.shape[0] < 2:
        raise ParameterError(
            f"Got samples of shape {tuple(samples.shape)}.",
            "The first dimension counts draws, and a spread needs at least two.",
            "Draw with dist.sample((S,)), S >= 2, or move the sample dimension to the front.",
        )
    if y is not None:
        check_target(samples.shape[1:], y, "draws")


def check_levels(levels: Sequence[float] | Tensor, like: Tensor) -> Tensor:
    """Quantile levels as a tensor (Q,) in float64 on the device of ``like``, checked to lie in (0, 1)."""
    tensor = torch.as_tensor(levels, dtype=torch.float64, device=like.device)  # (Q,)
    if checking() and not bool(((tensor > 0) & (tensor < 1)).all()):
        raise ParameterError(
            f"Got quantile levels {tensor.tolist()}.",
            "A quantile level is a probability strictly between 0 and 1.",
            "Divide percentages by 100 and leave out 0 and 1.",
        )
    return tensor


def check_mask(mask: Tensor | None) -> None:
    """Raise unless the mask is boolean or None."""
    if mask is not None and mask.dtype != torch.bool:
        raise ParameterError(
            f"The mask has dtype {mask.dtype}.",
            "A mask says which targets are observed; it holds no weights.",
            "Pass mask.bool(), and multiply the scores by weights yourself.",
        )


def observed(y: Tensor, mask: Tensor | None, instead: Tensor | float) -> Tensor:
    """The target with its masked entries replaced by ``instead``."""
    check_mask(mask)
    return y if mask is None else torch.where(mask, y, instead)


def masked(score: Tensor, mask: Tensor | None) -> Tensor:
    """The score, 0 where the mask is False."""
    return score if mask is None else torch.where(mask, score, 0.0)


def pair_count(size: int, estimator: str) -> int:
    """Number of pairs of ``size`` draws that an estimator averages over."""
    check_choice("estimator", estimator, ("standard", "fair"))
    return size * size if estimator == "standard" else size * (size - 1)
