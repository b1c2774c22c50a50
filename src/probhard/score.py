"""Scores: plain functions of a forecast and a target, training losses and evaluation metrics alike.

    CRPS = E|X - y| - E|X - X'| / 2,      energy = E||X - y|| - E||X - X'|| / 2,      nll = -log p(y),
    QL_q = 2 |(x_q - y) (1[y <= x_q] - q)|,      pooled CRPS = mean over q of sum QL_q / sum |y|.

Scores are elementwise, (*batch, n), unless said otherwise. A forecast ``dist`` is anything that ``as_location_scale``
takes, or a projected distribution. Draws come first in ensembles, (S, *batch, n). ``mask`` is True where the target is
observed; elsewhere score and gradient are exactly 0, even if the target is NaN.

Every function raises ShapeError if forecast and target do not fit, and ParameterError for a mask that is not boolean,
fewer than two draws, or levels outside (0, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from probhard._score.checks import check_levels, check_samples, check_target, masked, observed
from probhard._score.ensembles import crps_ensemble, energy_score, variogram_score
from probhard._score.families import BlockMeans, Horizons, Levels
from probhard._score.functional_crps import functional_rule
from probhard._score.functionals import Directions, Functionals
from probhard._score.joined import functionals_from_record
from probhard._score.parametric import crps, degenerate, marginals_for, mse, nll
from probhard._score.rescaled import n_merci
from probhard._score.violation import ConstraintViolation, constraint_error
from probhard._util.tensors import plain
from probhard.errors import ShapeError

__all__ = [
    "LEVELS",
    "SCORES",
    "BlockMeans",
    "ConstraintViolation",
    "Directions",
    "Functionals",
    "Horizons",
    "Levels",
    "constraint_error",
    "coverage",
    "crps",
    "crps_ensemble",
    "degenerate",
    "energy_score",
    "functional_rule",
    "functionals_from_record",
    "mse",
    "n_merci",
    "nll",
    "pit",
    "quantile_loss",
    "sample_quantiles",
    "variogram_score",
    "weighted_quantile_loss",
]

LEVELS = tuple(k / 20 for k in range(1, 20))  # 0.05, ..., 0.95


def quantile_loss(
    forecast: Tensor,  # (Q, *batch, n)
    y: Tensor,  # (*batch, n)
    levels: Sequence[float] | Tensor,  # (Q,), in (0, 1)
    mask: Tensor | None = None,  # (*batch, n) bool
) -> Tensor:
    """``2 |(x_q - y) (1[y <= x_q] - q)|`` for every level.

    Args:
        forecast: Quantiles, (Q, *batch, n).
        y: Targets, (*batch, n).
        levels: Their levels, (Q,), in (0, 1).
        mask: True where the target is observed, (*batch, n) bool.

    Returns:
        The loss, (Q, *batch, n).
    """
    level = check_levels(levels, forecast)
    if forecast.shape[:1] != level.shape:
        raise ShapeError(
            f"Got a forecast of shape {tuple(forecast.shape)} and levels of shape {tuple(level.shape)}.",
            "The first dimension of the forecast holds one quantile per level.",
            "Pass as many levels as forecast.shape[0].",
        )
    check_target(forecast.shape[1:], y, "quantiles")
    level = level.to(forecast.dtype).reshape(-1, *[1] * (forecast.dim() - 1))
    over = forecast - observed(y, mask, 0.0)
    return masked(2 * torch.maximum((1 - level) * over, -level * over), mask)


def sample_quantiles(
    samples: Tensor,  # (S, *batch, n)
    levels: Sequence[float] | Tensor = LEVELS,  # (Q,), in (0, 1)
) -> Tensor:
    """Empirical quantiles ``sorted[round((S - 1) q)]``, where halves round to even.

    Args:
        samples: Draws, (S, *batch, n).
        levels: Quantile levels, (Q,), in (0, 1).

    Returns:
        The quantiles, (Q, *batch, n).
    """
    check_samples(samples)
    index = torch.round((samples.shape[0] - 1) * check_levels(levels, samples)).long()
    if not plain(samples):
        return samples.sort(dim=0).values.index_select(0, index)
    # NumPy's vectorised sort of contiguous rows is several times faster, and gradients touch the chosen draws only.
    flat = samples.detach().flatten(1).mT.contiguous().numpy()
    chosen = torch.from_numpy(flat.argsort(-1)[:, index.numpy()]).mT.reshape(-1, *samples.shape[1:])
    return samples.gather(0, chosen)


def weighted_quantile_loss(
    samples: Tensor,  # (S, *batch, n)
    y: Tensor,  # (*batch, n)
    levels: Sequence[float] | Tensor = LEVELS,
    mask: Tensor | None = None,
) -> Tensor:
    """Pooled CRPS: the mean over levels of the summed quantile loss, divided by the summed ``|y|``.

    Args:
        samples: Draws, (S, *batch, n).
        y: Targets, (*batch, n).
        levels: Quantile levels, (Q,), in (0, 1).
        mask: True where the target is observed, (*batch, n) bool.

    Returns:
        A scalar.
    """
    loss = quantile_loss(sample_quantiles(samples, levels), y, levels, mask)
    return loss.sum() / loss.shape[0] / observed(y, mask, 0.0).abs().expand(loss.shape[1:]).sum()


def coverage(dist_or_samples: Any, y: Tensor, level: float = 0.9, mask: Tensor | None = None) -> Tensor:
    """Whether the target lies in the central interval of probability ``level``.

    Args:
        dist_or_samples: A forecast over n variables, or draws (S, *batch, n).
        y: Targets, (*batch, n).
        level: Probability of the interval, in (0, 1).
        mask: True where the target is observed, (*batch, n) bool.

    Returns:
        1.0 where it does, else 0.0, (*batch, n).
    """
    check_levels((level,), y)
    bounds = ((1 - level) / 2, (1 + level) / 2)
    if isinstance(dist_or_samples, Tensor):
        check_samples(dist_or_samples, y)
        lower, upper = sample_quantiles(dist_or_samples, bounds)
    else:
        laws = marginals_for(dist_or_samples, y)
        lower, upper = (laws.icdf(torch.as_tensor(p, dtype=y.dtype, device=y.device)) for p in bounds)
    return masked(((lower <= y) & (y <= upper)).to(y.dtype), mask)


def pit(dist_or_samples: Any, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Probability integral transform F(y); draws and point masses at the target count half.

    Args:
        dist_or_samples: A forecast over n variables, or draws (S, *batch, n).
        y: Targets, (*batch, n).
        mask: True where the target is observed, (*batch, n) bool.

    Returns:
        F(y), (*batch, n).
    """
    if isinstance(dist_or_samples, Tensor):
        check_samples(dist_or_samples, y)
        return masked((0.5 * (dist_or_samples < y) + 0.5 * (dist_or_samples <= y)).to(y.dtype).mean(0), mask)
    laws = marginals_for(dist_or_samples, y)
    return masked(laws.pit(observed(y, mask, laws.loc.detach())), mask)


SCORES: dict[str, Callable[..., Tensor]] = {"crps": crps, "nll": nll}
