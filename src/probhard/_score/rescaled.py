"""n-MeRCI: how well the predicted spread ranks the errors (Moukari et al., 2019; Mouli et al., 2024).

    e_i = mean |y - mean| of element i,   s_i = sqrt(mean variance),   L = quantile of e_i / s_i at the level,
    n-MeRCI = (L mean(s) - mean(e)) / (max(e) - mean(e)).

It is 0 if spreads are proportional to errors, about 1 if they say nothing, and more if they mislead. It is not proper:
it ignores the size of the spread and the quality of the mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from probhard._score.checks import check_levels
from probhard._score.parametric import marginals_for
from probhard.errors import ShapeError


def n_merci(dist: Any, y: Tensor, level: float = 0.95) -> Tensor:
    """Normalised mean rescaled confidence interval of a set of forecasts; small is good.

    Args:
        dist: Forecasts over n variables, batch (*batch,).
        y: Targets, (*batch, n).
        level: Share of elements whose error the rescaled spread must cover, in (0, 1).

    Returns:
        A scalar over all batch elements.

    Raises:
        ShapeError: If there are fewer than two elements.
    """
    check_levels((level,), y)
    laws = marginals_for(dist, y)
    errors = (laws.mean - y).abs().mean(-1).flatten()
    if errors.numel() < 2:
        raise ShapeError(
            f"n_merci got targets of shape {tuple(y.shape)}.",
            "It compares errors and spreads of several elements.",
            "Pass a batch of at least two forecasts.",
        )
    spreads = laws.variance.mean(-1).flatten().sqrt()
    factor = torch.quantile(errors / spreads, level)
    return (factor * spreads.mean() - errors.mean()) / (errors.max() - errors.mean())
