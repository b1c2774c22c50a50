"""The loss of a calibration: the score of projected laws, per unit and in total.

    score of a unit = sum over variables of CRPS + weight * n * sum over groups of the mean CRPS of functionals
                      + energy * sqrt(n) * energy score

The energy score is that of fixed draws. It sees the size of the whole error, which single variables and functionals
do not: where a few variables have most of it, their scores hardly count.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from probhard import score
from probhard._score.checks import masked, observed
from probhard._score.functional_crps import antithetic_crps
from probhard._score.functionals import Directions, Functionals, functional_mask
from probhard.projection.forecast import Forecast
from probhard.projection.layer import DPPL
from probhard.projection.mixture import Mixture
from probhard.projection.projected import Projected

FAILED = 0.01  # largest share of units without a finite score
DRAWS, SEED = 20, 0  # of the energy score


def flagging(layer: DPPL | None) -> DPPL | None:
    """The layer with NaN where a projection fails: a few failed draws must not end a search."""
    if layer is None:
        return None
    twin = copy.copy(layer)
    twin.on_failure = "flag"
    return twin


def unit_scores(
    predicted: Forecast,
    y: Tensor,
    mask: Tensor | None,
    functionals: Any,
    weight: float,
    energy: float = 0.0,
) -> Tensor:
    """The score of each unit.

    Args:
        predicted: The projected laws, over (*batch, n).
        y: Targets, (*batch, n).
        mask: True where they are observed, (*batch, n) bool.
        functionals: A family or matrix of functionals; None for none.
        weight: Their weight, as in the loss of a method.
        energy: Weight of the energy score.

    Returns:
        The scores, (*batch,).
    """
    total = score.crps(predicted, y, mask=mask).sum(-1)
    if energy:
        distance = score.energy_score(_fixed(predicted), y, mask, estimator="fair")
        total = total + energy * y.shape[-1] ** 0.5 * distance
    if functionals is None or not weight:
        return total
    family = functionals if isinstance(functionals, Functionals) else Directions(functionals)
    if score.functional_rule(predicted) == "draws" and not isinstance(predicted, Mixture):
        draws = predicted.fixed_draws()
        draws = torch.where(torch.isfinite(draws), draws, predicted.mean.detach())  # those that failed
        rows = family.rows(y.shape[-1]).at(draws)
        values = antithetic_crps(rows.apply(draws - observed(y, mask, 0.0)))
        values = masked(values, functional_mask(rows, mask))
    else:
        values = score.crps(predicted, y, mask=mask, functionals=family)
    return total + weight * y.shape[-1] * (values * family.weight.to(values)).sum(-1)


def _fixed(predicted: Forecast) -> Tensor:
    """Draws (S, *batch, n) from the same random numbers at every call; those that failed are at the mean."""
    generator = torch.Generator(predicted.mean.device).manual_seed(SEED)
    if not isinstance(predicted, Projected):
        return predicted.rsample((DRAWS,), generator)
    solution = predicted.draw((DRAWS,), generator)
    return torch.where(solution.stats.converged.unsqueeze(-1), solution.value, predicted.mean.detach())


def total_score(scores: Tensor) -> Tensor:
    """The sum of scores (*batch,), as if units without a finite score had the mean of the others.

    It is infinite if more than ``FAILED`` of the units have none.
    """
    finite = torch.isfinite(scores)
    count, units = int(finite.sum()), scores.numel()
    if count < (1 - FAILED) * units:
        return torch.full((), torch.inf, dtype=torch.float64)
    return torch.where(finite, scores, 0.0).sum().cpu() * (units / max(count, 1))
